"""Commands to envs in C and in Python write the same words, ring the same bells, and read answers alike."""

import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envherd.executor.pools import commands, worker_pool
from envherd.executor.pools.commands import CommandWords
from envherd.shm.sync import DOORBELL_BYTES, Counter, Doorbell
from envherd.workers import native
from tests.scale import scaled

pytestmark = pytest.mark.skipif(
    native.load() is None, reason="the C extension was not built, or is switched off"
)

NAMES = ("command", "command_seq", "reply_seq", "status")
OF_WORKERS = ("answered", "ring_at")


class Side:
    """The caller's half of a pool without workers."""

    def __init__(self, num_envs: int, num_workers: int, *, in_c: bool) -> None:
        self.buffer = np.zeros(DOORBELL_BYTES * (num_workers + 1) + 64, np.uint8)
        start = -self.buffer.ctypes.data % 64
        bells = [
            Doorbell.create(self.buffer, start + DOORBELL_BYTES * i)
            for i in range(num_workers + 1)
        ]
        self.done, self.go = bells[0], bells[1:]
        slab: Any = SimpleNamespace(
            words={name: np.zeros(num_envs, np.int64) for name in NAMES}
        )
        self.words = CommandWords(slab)
        self.worker_of = np.arange(num_envs) * num_workers // num_envs
        self.counts = {name: np.zeros(num_workers, np.int64) for name in OF_WORKERS}
        self.caller = commands.native_caller(
            self.words, self.go, self.done, self.counts, self.worker_of
        )
        self.num_workers = num_workers
        self.in_c = in_c

    def step(
        self, command: int, draft: Callable[[int], Any] | None, column: int
    ) -> tuple[Any, bool]:
        """Give all envs a command, draft, and look whether they have answered with rows alone."""
        everyone = np.arange(len(self.worker_of))
        self.give_some(everyone, np.full(len(everyone), command))
        drafted = None if draft is None else draft(column)
        return drafted, self.first(everyone, len(everyone), commands.LOOK_S) is not None

    def give_all(self, command: int) -> None:
        """Give all envs a command, in C."""
        assert self.caller.give_some(
            np.arange(len(self.worker_of)), np.full(len(self.worker_of), command)
        )

    def give_some(self, ids: np.ndarray, commands: np.ndarray) -> None:
        """Give envs a command each."""
        if self.in_c:
            assert self.caller.give_some(ids, commands)
            return
        self.words.write(ids, commands)
        for worker_id in set(self.worker_of[ids].tolist()):
            self.go[worker_id].ring()

    def first(
        self, ids: np.ndarray, wanted: int, wait_s: float = 0.0
    ) -> list[int] | None:
        """Return which of some envs have answered; None if fewer than wanted, or if there is more than rows."""
        if self.in_c:
            room = np.full(len(self.worker_of), -1)
            count = self.caller.first(ids, wanted, int(wait_s * 1e9), room)
            return None if count < 0 else room[:count].tolist()
        end = time.monotonic() + wait_s
        while len(ready := self.words.ready(ids)) < wanted and self.done.wait(
            max(0.0, end - time.monotonic())
        ):
            pass
        _take_all(self.done)
        return (
            self.words.by_order(ready).tolist()
            if len(ready) >= wanted and not self.words.status.any()
            else None
        )

    def answer(self, answered: Any, failed: Any, tokens: int, column: int) -> Any:
        """Let envs answer, and some fail; return the state before."""
        before = self.state()
        self.words.status[:] = 0
        self.words.status[failed] = 2
        self.words.reply_seq[answered] = self.words.command_seq[answered]
        for _ in range(tokens):
            self.done.ring()
        return column, before

    def state(self) -> tuple[Any, ...]:
        """Return all state that commands may change; take the tokens."""
        tokens = [_take_all(bell) for bell in (self.done, *self.go)]
        words = [
            getattr(self.words, name).tolist() for name in (*NAMES, "answers_lost")
        ]
        return tokens, words, self.words.number[0]


def _take_all(bell: Doorbell) -> int:
    count = 0
    while bell.try_wait():
        count += 1
    return count


@settings(max_examples=scaled(150, full=400))
@given(data=st.data(), num_envs=st.integers(1, 9), num_workers=st.integers(1, 3))
def test_every_program_of_commands(data, num_envs, num_workers):
    sides = [Side(num_envs, num_workers, in_c=in_c) for in_c in (True, False)]
    ids_of = st.lists(st.integers(0, num_envs - 1), unique=True)
    for _ in range(3):
        is_to_all = data.draw(st.sampled_from([False, False, True]))
        ids = np.array(data.draw(ids_of), np.int64)
        commands = np.array(
            data.draw(
                st.lists(st.integers(-(2**63), 2**63 - 1), min_size=9, max_size=9)
            )
        )[: len(ids) or 1]
        answers_lost, asked = data.draw(ids_of), np.array(data.draw(ids_of), np.int64)
        answered = data.draw(st.one_of(st.just([*range(num_envs)]), ids_of))
        failed = data.draw(st.one_of(st.just([]), ids_of))
        tokens, wanted = (
            data.draw(st.integers(0, num_workers + 2)),
            data.draw(st.integers(0, len(asked) + 1)),
        )
        stride = data.draw(st.sampled_from([1, 2]))
        found = []
        for side in sides:
            side.words.answers_lost[answers_lost] = True
            answer = partial(side.answer, answered, failed, tokens)
            if is_to_all:
                answers: Any = side.step(int(commands[0]), answer, 3)
            else:
                side.give_some(
                    *(
                        np.repeat(array[: len(ids)], stride)[::stride]
                        for array in (ids, commands)
                    )
                )
                answers = answer(3), side.first(asked, wanted)
            found.append((answers, side.state()))
        assert found[0] == found[1]


@pytest.mark.parametrize("in_c", [True, False])
def test_answers_that_come_late_are_waited_for(in_c, monkeypatch):
    # On a busy machine they are later than its wait.
    for module in (commands, worker_pool):
        monkeypatch.setattr(module, "LOOK_S", 30.0)
    side = Side(2, 2, in_c=in_c)

    def answer():
        for env_id in range(2):
            time.sleep(0.003)
            side.words.reply_seq[env_id] = side.words.command_seq[env_id]
            side.done.ring()

    # It can run, because the wait releases the GIL.
    worker = threading.Thread(target=answer)
    assert side.step(7, lambda _: worker.start(), 0) == (None, True)
    worker.join()


@pytest.mark.parametrize("in_c", [True, False])
def test_a_step_without_a_draft_and_one_whose_draft_raises(in_c):
    side = Side(2, 1, in_c=in_c)
    side.words.reply_seq[:] = 1
    side.done.ring()
    assert side.step(7, None, 0) == (None, True)
    assert [side.words.command[:].tolist(), side.words.command_seq[:].tolist()] == [
        [7, 7],
        [1, 1],
    ]
    with pytest.raises(ZeroDivisionError):
        side.step(8, lambda column: 1 // column, 0)
    assert [side.words.command[:].tolist(), side.words.command_seq[:].tolist()] == [
        [8, 8],
        [2, 2],
    ], "it was given"


@pytest.mark.parametrize(
    "ids",
    [
        np.array([0, 9]),
        np.array([-1]),
        np.array([0], np.int32),
        np.array([[0]]),
        np.array([True]),
        [0],
        None,
    ],
    ids=repr,
)
def test_ids_that_are_not_plain_are_left_to_python(ids):
    side = Side(3, 1, in_c=True)
    before = side.state()
    assert side.caller.give_some(ids, np.zeros(1, np.int64)) is False
    assert side.caller.give_some(np.array([0, 1]), np.zeros(1, np.int64)) is False
    assert side.caller.first(ids, 1, 0, np.zeros(3, np.int64)) == -1
    assert side.caller.first(np.arange(3), 1, 0, np.zeros(2, np.int64)) == -1
    assert side.caller.first(np.arange(4) // 2, 1, 0, np.zeros(4, np.int64)) == -1
    assert side.state() == before


@pytest.mark.parametrize("num_envs", [3, 200])
def test_first_returns_envs_in_the_order_of_their_commands(num_envs):
    side, room = Side(num_envs, 1, in_c=True), np.zeros(num_envs, np.int64)
    numbers = np.arange(num_envs) * 37 % 101 // 7  # some are equal
    for number in range(1, 20):
        given = np.flatnonzero(numbers == number - 1)
        assert side.caller.give_some(given, np.zeros(len(given), np.int64))
    side.words.reply_seq[:] = side.words.command_seq
    asked = np.arange(num_envs)[::-1]
    assert side.caller.first(asked, 1, 0, room) == num_envs
    assert room.tolist() == asked[numbers[asked].argsort(kind="stable")].tolist()


def test_the_caller_is_woken_once_for_the_answers_that_it_waits_for():
    """`native/caller.c` 4 and 5."""
    side, room = Side(6, 2, in_c=True), np.zeros(6, np.int64)
    side.give_all(7)
    counters = [
        Counter({name: memoryview(array) for name, array in side.counts.items()}, w)
        for w in range(2)
    ]
    rung, has_returned = [], threading.Event()

    def answer():
        while not side.counts["ring_at"].all():  # until the caller waits
            time.sleep(0.001)
        for env_id in range(6):
            if rung:
                has_returned.wait(10)
            side.words.reply_seq[env_id] = side.words.command_seq[env_id]
            if counters[side.worker_of[env_id]].add():
                rung.append(env_id)
                side.done.ring()

    worker = threading.Thread(target=answer)
    worker.start()
    assert side.caller.first(np.arange(6), 4, int(10e9), room) == 4
    has_returned.set()
    assert room[:4].tolist() == [0, 1, 2, 3]
    worker.join()
    assert rung[0] == 3


class Alarm(Exception):
    """Raised by the signal handler."""


@pytest.mark.parametrize("delay_s", [0.0001, 0.004])
@pytest.mark.parametrize("is_for_all", [True, False])
def test_a_signal_ends_the_wait(monkeypatch, delay_s, is_for_all):
    """During the spin, and while it blocks. Another follows one between the two, which is noticed `LOOK_S` later."""
    monkeypatch.setattr(commands, "LOOK_S", 30.0)
    side = Side(1, 1, in_c=True)
    side.give_all(7)

    def handle(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise Alarm

    before = signal.signal(signal.SIGALRM, handle)

    def wait() -> None:
        signal.setitimer(signal.ITIMER_REAL, delay_s, 0.5)
        side.step(1, None, 0) if is_for_all else side.caller.first(
            np.arange(1), 1, int(30e9), np.zeros(1, np.int64)
        )

    try:
        began = time.monotonic()
        with pytest.raises(Alarm):
            wait()
        assert time.monotonic() - began < 10
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("name", "wrong", "error"),
    [
        ("done", None, TypeError),
        ("status", np.zeros(3, np.int64), ValueError),
        ("status", np.zeros(2, np.int32), ValueError),
        ("answers_lost", np.zeros(5, bool), ValueError),
        ("go", [np.zeros(3, np.uint8)], ValueError),
        ("go", None, (TypeError, SystemError)),
        ("look_ns", "soon", TypeError),
        ("ring_at", np.zeros(2, np.int64), ValueError),
        ("worker_of", np.array([0, 1]), ValueError),
        ("worker_of", np.array([0, -1]), ValueError),
        ("worker_of", np.array([0]), ValueError),
    ],
)
def test_memory_that_does_not_fit_is_refused(name, wrong, error, monkeypatch):
    side, made, module = Side(2, 1, in_c=False), [], native.load()
    monkeypatch.setattr(native, "load", lambda: SimpleNamespace(Caller=made.append))
    commands.native_caller(side.words, side.go, side.done, side.counts, side.worker_of)
    (facts,) = made
    module.Caller(facts)
    with pytest.raises(error):
        module.Caller({**facts, name: wrong})
    with pytest.raises(KeyError, match=name):
        module.Caller({key: value for key, value in facts.items() if key != name})


def test_native_caller_references_its_arrays_until_freed():
    side = Side(2, 1, in_c=True)
    arrays = [
        *(getattr(side.words, name) for name in NAMES),
        *side.counts.values(),
        side.worker_of,
    ]
    before = [sys.getrefcount(array) for array in arrays]
    for _ in range(3):
        commands.native_caller(
            side.words, side.go, side.done, side.counts, side.worker_of
        )
        side.caller.give_some(np.arange(2), np.arange(2))
        side.caller.first(side.worker_of, 1, 0, side.worker_of)
        side.caller.first(None, 1, 0, side.worker_of)
    gc.collect()
    assert [sys.getrefcount(array) for array in arrays] == before
    caller = side.caller
    gone = weakref.ref(side.buffer)
    side.words.command = side.words.command_seq = side.buffer = None
    del side, arrays
    caller.give_some(np.arange(2), np.full(2, 3))  # its memory still exists
    assert gone() is not None
    caller = None
