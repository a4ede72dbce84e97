"""The walks of docs/architecture.md are those of real calls: functions are called in the order of the hops."""

import functools
import itertools
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest

from envherd import ExecutorOptions, ParallelEnv
from envherd.executor.protocol import engine
from envherd.executor.protocol.plain import what_is_plain
from envherd.workers import native
from envherd.workers.protocol import RESET, STEP_RESET
from envherd.workers.testing import CountingEnv
from tests.oracles.native_sides import Side
from tests.test_imports import ROOT
from tests.workers.test_native import adapters
from tools.architecture import hops

#: A file relative to the checkout, and the qualified name of a function; of a nested one, that of the outermost.
Call = tuple[str, str]

#: Files of the project that a call touches in the caller's process, and calls of its functions: a receipt, as the lines
#: of `tests/test_architecture.py` are. No env ends its episode, and there are four envs on one worker. At most 9 files
#: were wanted for a plain step.
TOUCHED = {
    "plain step": (9, 23),
    "plain step with a lent frame": (10, 30),
    "step": (16, 47),
    "plain recv": (11, 34),
    "recv": (14, 61),
}
LENGTH = 3
SIDE = 100  # of pictures, so that their frames are lent
needs_c = pytest.mark.skipif(
    native.load() is None, reason="the C extension was not built, or is switched off"
)
#: Files of the hops in a worker.
IN_WORKER = re.compile(r"workers/|shm/")


@functools.cache
def file_of(name: str) -> str | None:
    """Return a file of the package relative to the checkout, or None for another file."""
    file = Path(name).resolve()
    is_ours = file.is_relative_to(ROOT) and file.relative_to(ROOT).parts[0] in (
        "executor",
        "workers",
        "shm",
    )
    return file.relative_to(ROOT).as_posix() if is_ours else None


def calls_in(call: Callable[[], Any]) -> list[Call]:
    """Return the calls of functions of the project, in Python and of the caller's C, that a call makes."""
    found: list[Call] = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            if file := file_of(frame.f_code.co_filename):
                found.append((file, frame.f_code.co_qualname.partition(".<locals>")[0]))
        elif event == "c_call" and type(
            getattr(arg, "__self__", None)
        ).__module__.endswith("_native"):
            kind = type(arg.__self__).__name__.lower()
            found.append((f"executor/native/{kind}.c", f"{kind}_{arg.__name__}"))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def missing(section: str, calls: list[Call], *, is_in_worker: bool) -> list[Call]:
    """Return the functions of a walk, of the hops of one side, that are not called after those of the hop before."""
    left, lacking = iter(calls), []
    for file, functions in hops(section):
        if bool(IN_WORKER.match(file)) != is_in_worker:
            continue
        for function in functions:
            if (file, function) not in left:  # this uses up the calls before it
                lacking.append((file, function))
                left = iter(())
    return lacking


def least(tries: list[list[Call]]) -> list[Call]:
    """Return the calls of the try with the fewest: in others the envs took long, or a check of the workers was due."""
    return min(tries, key=len)


def goes_on(tries: list[list[Call]], most: int) -> Iterator[int]:
    """Count until there are some tries, and until one has at most `most` calls: a busy machine takes some time."""
    end = time.monotonic() + 20
    for index in itertools.count(1):
        if len(tries) >= 4 * LENGTH and (
            len(least(tries)) <= most or not most or time.monotonic() > end
        ):
            return
        yield index


def stepped(env: Any, *, ends: bool, most: int = 0) -> list[Call]:
    """Return the calls of a step in which the envs end their episodes, or do not."""
    root, tries = env.reset(), list[list[Call]]()
    for index in goes_on(tries, most):
        acted, made = env.rand_action(root), []
        calls = calls_in(lambda: made.append(env.step_and_maybe_reset(acted)))  # noqa: B023  # it is called at once
        ((td, root),) = made
        if bool(td["next", "done"].any()) == ends and index > 2 * LENGTH:
            tries.append(calls)
    return least(tries)


def received(env: Any, most: int = 0) -> list[Call]:
    """Return the calls of a `recv` of all envs."""
    env.reset()
    tries = list[list[Call]]()
    for _ in goes_on(tries, most):
        env.send(env.rand_action())
        tries.append(calls_in(env.recv))
    return least(tries)


def opened(*, is_plain: bool, size: int = 0) -> ParallelEnv:
    why = dict.fromkeys(() if is_plain else ("step", "send", "recv"), ("it is a test",))
    with patch.object(
        engine, "what_is_plain", lambda *facts: what_is_plain(*facts)._replace(**why)
    ):
        return ParallelEnv(
            4, functools.partial(CountingEnv, LENGTH, size=size), num_workers=1, seed=0
        )


@needs_c
@pytest.mark.parametrize(
    ("section", "is_plain", "calls"),
    [
        ("A plain step", True, functools.partial(stepped, ends=True)),
        ("A step", False, functools.partial(stepped, ends=True)),
        ("A receive", False, received),
    ],
)
def test_the_caller_makes_the_hops_in_this_order(section, is_plain, calls):
    with opened(is_plain=is_plain) as env:
        assert missing(section, calls(env), is_in_worker=False) == []


def lose_and_step(env: ParallelEnv) -> None:
    os.kill(env._pool.pid_of(0), signal.SIGKILL)
    env.step_and_maybe_reset(env.rand_action())


@needs_c
@pytest.mark.slow
@pytest.mark.broken_pool
@pytest.mark.parametrize(
    ("section", "options", "call"),
    [
        (
            "A reset",
            ExecutorOptions(recycle_after=100),
            lambda env: env.reset(seed=[1, 2]),
        ),
        ("A restart", ExecutorOptions(on_worker_loss="restart"), lose_and_step),
        ("A branch", ExecutorOptions(), lambda env: env.branch(0, [1])),
    ],
)
def test_the_caller_makes_the_hops_of_other_calls_in_this_order(section, options, call):
    with ParallelEnv(2, CountingEnv, num_workers=2, options=options) as env:
        env.reset()
        calls = calls_in(lambda: call(env))
    assert missing(section, calls, is_in_worker=False) == [], calls


def test_the_worker_makes_the_hops_of_a_step_in_this_order():
    side = Side(adapters(scripts=((),), length=LENGTH)(), "python")
    for op in (RESET, *[STEP_RESET] * (LENGTH - 1)):
        side.do((op, [1]))
    side.command(STEP_RESET, [1])
    side.go.ring()
    side.loop._is_leaving = True  # after this token
    calls = calls_in(side.loop.run)
    assert missing("A step", calls, is_in_worker=True) == [], calls


def test_a_hop_that_is_not_made_is_noticed():
    assert missing("A plain step", [], is_in_worker=False)


@needs_c
@pytest.mark.parametrize("name", TOUCHED)
def test_calls_touch_no_more_files_than_they_did(name):
    with opened(
        is_plain=name.startswith("plain"), size=SIDE if "lent" in name else 0
    ) as env:
        most = TOUCHED[name][1]
        calls = (
            received(env, most)
            if name.endswith("recv")
            else stepped(env, ends=False, most=most)
        )
    touched = {file for file, _ in calls}
    assert ("Loans.leaves" in {function for _, function in calls}) is ("lent" in name)
    assert (len(touched), len(calls)) <= TOUCHED[name], sorted(touched)
    assert len(touched) == TOUCHED[name][0], "lower the number"


def test_walks_are_short():
    """They read from top to bottom: nearly all files are entered once or twice."""
    limits = {
        "A plain step": (10, 9, 2),
        "A step": (16, 14, 2),
        "A receive": (11, 7, 3),
    }
    for section, (most, most_files, visits) in limits.items():
        found = [file for file, _ in hops(section)]
        entered = Counter(file for file, _ in itertools.groupby(found))
        assert (len(found) <= most, len(entered) <= most_files) == (True, True), section
        assert max(entered.values()) <= visits, entered
