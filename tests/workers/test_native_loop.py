"""The loop in C waits like a doorbell, and follows the protocol's order."""

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envherd.executor import ParallelEnv, WorkerLost
from envherd.shm import slab
from envherd.shm.sync import DOORBELL_BYTES
from envherd.workers import native
from envherd.workers.protocol import RESET, STEP, WORKER_STEPS
from envherd.workers.testing import CountingEnv
from envherd.workers.testing.envs import PlainAdapter
from tests.oracles.native_sides import Side
from tools import native_header

pytestmark = pytest.mark.skipif(
    native.load() is None, reason=f"the C extension is not there: {native.why_not()}"
)

SOURCE = (Path(native.__file__).parent / "loop.c").read_text()


class Alarm(Exception):
    """Raised by the test's signal handler."""


def make_side(way: str = "loop") -> Side:
    return Side([PlainAdapter(CountingEnv(3)) for _ in range(3)], way)


@pytest.mark.parametrize("way", ["loop", "python"])
def test_it_serves_until_a_message_says_to_leave(way):
    side = make_side(way)
    thread = threading.Thread(target=side.loop.run)
    thread.start()
    for op in (RESET, STEP, STEP):
        side.command(op, [1, 2, 3])
        side.go.ring()
        assert side.done.wait(60)
        assert (side.words["reply_seq"] == side.words["command_seq"]).all()
    time.sleep(0.05)  # long enough for it to block
    side.send(None)
    side.go.ring()
    thread.join(60)
    assert not thread.is_alive()
    assert side.words["env_steps"].tolist() == [0, 2, 2, 2]
    assert not side.done.try_wait()
    assert not side.go.try_wait()  # it has waited for every token


@pytest.fixture
def alarm():
    """Return a function that sets the handler of SIGALRM, and rings after some time, then at intervals."""
    before = signal.getsignal(signal.SIGALRM)

    def ring(handler: Any, *delays_s: float) -> None:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *delays_s)

    yield ring
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("delay", "spin_ns"), [(0.001, None), (0.2, None), (0.02, 10**8)]
)
def test_handler_that_raises_ends_the_wait_and_the_loop_continues(
    delay, spin_ns, alarm
):
    """During the spin, while it blocks, and while it yields in a long spin."""
    side = make_side()
    loop = (
        side.native
        if spin_ns is None
        else native.load().Loop(side.loop.facts() | {"brief_spin": spin_ns})
    )

    def handle(_number: int, _frame: Any) -> None:
        raise Alarm

    with pytest.raises(Alarm):  # noqa: PT012  # it may come before the call
        alarm(handle, delay)
        loop.run()
    side.command(RESET, [1, 2, 3])
    side.send(lambda: None)
    side.go.ring()
    threading.Timer(0.05, lambda: (side.send(None), side.go.ring())).start()
    loop.run()
    assert side.words["resets"].tolist() == [0, 1, 1, 1]


def test_a_signal_handler_that_returns_does_not_end_the_wait(alarm):
    side = make_side()
    caught: list[int] = []

    def handle(number: int, _frame: Any) -> None:
        caught.append(number)
        if len(caught) == 3:
            side.send(None)
            side.go.ring()

    alarm(handle, 0.05, 0.05)
    side.loop.run()
    assert len(caught) >= 3


@pytest.mark.slow
@pytest.mark.broken_pool
def test_signals_to_a_worker_that_waits_do_what_they_do_without_c():
    with ParallelEnv(2, CountingEnv, num_workers=1, seed=0) as env:
        env.reset()
        pid = env.call("pid")[0]
        os.kill(pid, signal.SIGINT)  # ignored
        env.step(env.rand_action())
        assert env.call("pid")[0] == pid
        os.kill(pid, signal.SIGTERM)
        with pytest.raises(WorkerLost, match="SIGTERM"):  # noqa: PT012  # whichever call finds it
            for _ in range(10_000):
                env.step(env.rand_action())
                env.reset()


# ---- the code does it in this order, and packs words as python does ---------------------------------


def body_of(function: str) -> str:
    """Return the source of a C function, which ends with the first brace that begins a line."""
    found = re.search(
        rf"\n[^\n;]*\b{function}\([^;]*?\n\{{\n(.*?)\n\}}\n", SOURCE, re.DOTALL
    )
    assert found is not None, function
    return found.group(1)


def test_c_loop_has_the_order_of_worker_steps():
    """`native/loop.c` 1, 2 and 4; `tests/shm/test_tally_model.py` is about 3."""
    landmarks = {
        "command_seq": "number = LOAD_NUMBER(word(&loop->command_seq",
        "rows": "carry_out(loop, env, command)",
        "status": "STORE(word(&loop->status",
        "reply_seq": "STORE_NUMBER(word(&loop->reply_seq",
        "done": "bell_ring(&loop->done)",
    }
    source = body_of("scan")
    places = [source.index(landmarks[step]) for step in WORKER_STEPS[1:]]
    assert places == sorted(places)
    assert source.index("command = LOAD(word(&loop->command,") > places[0]
    assert "bell_ring" not in SOURCE.replace(source, "")


def test_a_command_is_served_with_its_number_written_after_its_rows():
    """During its step the env sees no answer yet; the parent sees the complete answer."""
    side = make_side()
    side.command(RESET, [1, 2, 3])
    side.serve()
    side.command(STEP, [1, 2, 3])
    side.serve()
    seen: list[list[int]] = []
    for adapter in side.adapters.values():
        step = adapter.env.step
        adapter.env.step = lambda action, step=step: (
            seen.append(side.owing()),
            step(action),
        )[1]
    assert side.num_rings() == 2
    side.command(STEP, [1, 2, 3])
    side.serve()
    assert seen == [[1, 2, 3], [2, 3], [3]]
    assert side.owing() == []
    assert side.num_rings() == 1


def test_constants_of_c_are_those_of_python():
    assert native_header.HEADER.read_text() == native_header.header(), (
        "python -m tools.native_header --write"
    )


def test_durations_fall_into_the_bins_of_the_slab(monkeypatch):
    """Steps of known length are counted where `bin_of` counts them, one doubling aside."""
    side = make_side()
    side.command(RESET, [1])
    side.serve()
    step = CountingEnv.step
    for seconds in (0.001, 0.01, 0.05):
        monkeypatch.setattr(
            CountingEnv,
            "step",
            lambda *args, seconds=seconds: (time.sleep(seconds), step(*args))[1],
        )
        before = side.words["step_bins"].copy()
        side.command(STEP, [1])
        side.serve()
        monkeypatch.undo()
        (index,) = np.flatnonzero(side.words["step_bins"] - before)
        assert index - slab.NUM_BINS >= slab.bin_of(int(seconds * 1e9))


def test_a_doorbell_that_is_not_one_is_refused():
    side = make_side()
    facts = side.loop.facts()
    module: Any = native.load()
    module.Loop(facts)
    for wrong in (
        np.zeros(8, np.uint8),
        np.zeros(DOORBELL_BYTES + 1, np.uint8)[1:],
        b"x" * DOORBELL_BYTES,
    ):
        with pytest.raises((ValueError, BufferError)):
            module.Loop(facts | {"go": wrong})
    for name, value in {
        "worker_id": 2,
        "num_bins": 3,
        "slots": [(99, None)],
        "tidy_every": 0,
    }.items():
        with pytest.raises(ValueError, match="slab"):
            module.Loop(facts | {name: value})
