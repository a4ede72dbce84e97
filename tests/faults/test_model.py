"""Explore the model of the concurrency core: no lost wake-up, no deadlock, no stale row, for any death at any time.

Other tests check that the parent and a worker do their steps in the model's order.
"""

import functools
from types import SimpleNamespace
from typing import Any

import pytest

from envherd.executor import ParallelEnv, SerialEnv
from envherd.shm.segment import Segment
from envherd.shm.sync import DOORBELL_BYTES, Doorbell
from envherd.workers import native
from envherd.workers.process.loop import Loop
from envherd.workers.protocol import PARENT_STEPS, RING, WORKER_STEPS, Op, pack
from envherd.workers.testing import CountingEnv
from tests.oracles.protocol_model import Protocol
from tests.scale import IS_FULL


def swapped(steps: tuple[str, ...], one: str, other: str) -> tuple[str, ...]:
    return tuple({one: other, other: one}.get(step, step) for step in steps)


small = functools.partial(Protocol, num_workers=2, num_steps=2)

#: Error -> the broken protocol, and the violation that follows.
MUTATIONS: dict[str, tuple[Protocol, str]] = {
    "the number before the rows": (
        small(worker=swapped(WORKER_STEPS, "rows", "reply_seq")),
        "stale",
    ),
    "the number before the command": (
        small(parent=swapped(PARENT_STEPS, "command", "command_seq")),
        "stale",
    ),
    "the number before the inputs": (
        small(parent=swapped(PARENT_STEPS, "inputs", "command_seq")),
        "stale",
    ),
    "go before the number": (
        small(parent=swapped(PARENT_STEPS, "go", "command_seq")),
        "wake-up",
    ),
    "done before the number": (
        small(worker=swapped(WORKER_STEPS, "done", "reply_seq")),
        "wake-up",
    ),
    "nobody looks for deaths": (
        small(looks_around=False, num_interrupts=0),
        "deadlock",
    ),
    "numbers before tokens": (
        Protocol(drains_first=False, num_deaths=0, num_interrupts=0),
        "wake-up",
    ),
    "a successor that begins at the beginning": (
        small(starts_from_reply=False),
        "has its answer",
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_three_workers_and_three_steps():
    """A death at any point; with ENVHERD_FULL an interrupt at any other too."""
    assert Protocol(num_interrupts=int(IS_FULL)).explore() > 50_000


@pytest.mark.slow
def test_deaths_and_interrupts_together():
    num_deaths = 2 if IS_FULL else 1
    assert small(num_deaths=num_deaths).explore() > 10_000


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_model_sees_what_is_wrong(name):
    protocol, seen = MUTATIONS[name]
    with pytest.raises(AssertionError, match=seen):
        protocol.explore()


# ---- the model is of this code -----------------------------------------------------------------


class Watched:
    """Words of the slab, or a doorbell, that record their uses: writes and calls, and reads if they are wanted."""

    def __init__(
        self, name: str, real: Any, notes: list[str], *, has_reads: bool = False
    ) -> None:
        self._name, self._real, self._notes, self._has_reads = (
            name,
            real,
            notes,
            has_reads,
        )

    def __getitem__(self, index: Any) -> Any:
        if self._has_reads:
            self._notes.append(self._name)
        return self._real[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._notes.append(self._name)
        self._real[index] = value

    def fill(self, value: Any) -> None:
        self._notes.append(self._name)
        self._real.fill(value)

    def __call__(self, *args: Any) -> Any:
        self._notes.append(self._name)
        return self._real(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def in_order(notes: list[str]) -> list[str]:
    """Return the distinct notes, ordered by their last occurrence: announced data must not change afterwards."""
    return [name for index, name in enumerate(notes) if name not in notes[index + 1 :]]


def test_a_worker_does_it_in_that_order():
    segment = Segment.create(2 * DOORBELL_BYTES)
    go, done = (
        Doorbell.create(segment.array(), offset) for offset in (0, DOORBELL_BYTES)
    )
    notes: list[str] = []
    with SerialEnv(1, CountingEnv, seed=0) as env:
        pool: Any = env._pool
        block, words = pool._block, pool.slab.words
        loop = Loop(block, pool.slab, (go, done), lambda: True, lambda: None)
        for name in ("command_seq", "status", "reply_seq"):
            loop._words[name] = Watched(
                name, loop._words[name], notes, has_reads=name == "command_seq"
            )
        loop._done = SimpleNamespace(ring=Watched("done", done.ring, notes))
        carry_out = block._carry_out
        block._carry_out = lambda *args: (carry_out(*args), notes.append("rows"))
        words["command"][0] = pack(Op.RESET, RING, 0)
        words["command_seq"][0] += 1
        loop._scan()
        assert done.try_wait()
        assert in_order(notes) == list(WORKER_STEPS[1:])
        assert words["reply_seq"][0] == words["command_seq"][0]
    segment.close()


@pytest.mark.slow
def test_the_parent_does_it_in_that_order(monkeypatch):
    """In Python (`worker_pool` 1, `commands` 2); `tests/executor/pools/test_fast_commands.py` holds C to it."""
    monkeypatch.setattr(native, "find", lambda: (None, "this is a test"))
    notes: list[str] = []
    with ParallelEnv(1, CountingEnv, num_workers=1, seed=0) as env:
        env.reset()
        pool: Any = env._pool
        pool.words.command = Watched("command", pool.words.command, notes)
        pool.words.command_seq = Watched("command_seq", pool.words.command_seq, notes)
        pool._rings = [Watched("go", ring, notes) for ring in pool._rings]
        pool._go = [SimpleNamespace(ring=ring) for ring in pool._rings]
        write_inputs = env._engine.write_inputs
        env._engine.write_inputs = lambda *args: (
            write_inputs(*args),
            notes.append("inputs"),
        )
        env.send(env.rand_action())
        assert in_order(notes) == list(PARENT_STEPS)
        env.recv()
        intake: Any = env._engine.intakes[0]
        intake.plain = intake.plain._replace(
            take_all=Watched("inputs", intake.plain.take_all, notes)
        )
        env.compile()
        for step in (env.step, env.step_and_maybe_reset):
            notes.clear()
            step(env.rand_action())
            assert in_order(notes) == list(PARENT_STEPS)
