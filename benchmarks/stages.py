"""Break down the time of a batch: the caller's stages and the worker's share, warm and after a policy's pause."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.ours import drawn_actions
from benchmarks.work import SteadyFactory
from envherd.executor import ParallelEnv
from envherd.workers.adapters.named import NamedFactory

NUM_ENVS = 8
#: The stages of a case; "rest" is the remainder of "batch".
STAGES = ("actions", "command", "TensorDicts", "waiting", "noting", "copying", "rest")
_WARM_UP, _LEAST_TYPICAL = 50, 0.9
#: For timings alone and next to another process: number of turns, and seconds for that process to start, stop or
#:     continue.
_TURNS, _START_S, _SETTLE_S = 15, 2.0, 0.05
#: As large as a rollout's storage, so no cache holds it.
_COPY_BYTES, _COPY_PLACES = 100_000, 600
#: The program of the other process.
_LOOPING = "while True: pass"
_COPYING = f"""
import numpy as np
source, places = np.ones({_COPY_BYTES}, np.uint8), np.ones(({_COPY_PLACES}, {_COPY_BYTES}), np.uint8)
while True:
    for place in places:
        place[...] = source
"""


@dataclass(frozen=True)
class Case:
    """One timed case.

    Attributes:
        name: in the table.
        make_env: of each env.
        num_workers: that run them.
        num_batches: number of timed batches.
        pause_s: between batches, so that caches are cold.
        is_first_k: `recv` of half, `current` and `send`, instead of `step_and_maybe_reset`.
    """

    name: str
    make_env: Callable[[], Any]
    num_workers: int
    num_batches: int = 3000
    pause_s: float = 0.0
    is_first_k: bool = False


def cases(calibration: float) -> tuple[Case, ...]:
    """Return all cases; `calibration` is iterations per microsecond of fixed work."""
    tiny, cartpole = SteadyFactory(), NamedFactory("gymnasium", "CartPole-v1")
    return (
        Case("cost nothing, 1 worker", tiny, 1),
        Case("cost nothing, 2 workers", tiny, 2),
        Case("the same, 5 ms between batches", tiny, 2, num_batches=200, pause_s=5e-3),
        Case("1 ms, 2 workers", SteadyFactory(mean=1e3 * calibration), 2, num_batches=200),
        Case("CartPole, 1 worker", cartpole, 1),
        Case("cost nothing, 2 workers, first-K of 4", tiny, 2, is_first_k=True),
    )


class _Clocks:
    """Times calls by wrapping functions of one object."""

    def __init__(self) -> None:
        self.spent_ns: dict[str, int] = dict.fromkeys((*STAGES, "waiting, CPU"), 0)

    def watch(self, owner: Any, name: str, stage: str) -> None:
        """Add the time of a method's calls to a stage; if it is waiting, also processor time to "waiting, CPU"."""
        setattr(owner, name, self.timed(getattr(owner, name), stage))

    def timed(self, inner: Callable[..., Any], stage: str) -> Callable[..., Any]:
        """Return a function whose calls are added to a stage; see `watch`."""
        clock, spent = time.perf_counter_ns, self.spent_ns

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = clock()
            try:
                return inner(*args, **kwargs)
            finally:
                spent[stage] += clock() - began

        def timed_wait(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time_ns()
            try:
                return timed(*args, **kwargs)
            finally:
                spent["waiting, CPU"] += time.thread_time_ns() - began

        return timed_wait if stage == "waiting" else timed


def measure(calibration: float) -> dict[str, Any]:
    """Time every case.

    Returns:
        "loop_us" and "copy_us": what a python loop of 1,000 additions and a copy of 100,000 bytes take here, to compare
        machines by; "loop_beside_us" and "copy_beside_us": the same while another process does so too, which says what
        processors share; and "cases": name ->
        "batch" (microseconds of one call, or of `recv`, `current` and `send`), each of `STAGES`, "waiting, CPU" (the
        caller's processor time while it waits), "worker" (busy, of one worker), "envs" (what of that the envs take
        when they are stepped in one process) and "typical" (the share of batches that these are means of).
    """
    loop, loop_beside = _alone_and_beside(_loop_us, _LOOPING)
    copy, copy_beside = _alone_and_beside(_copies(), _COPYING)
    return {
        "loop_us": loop,
        "loop_beside_us": loop_beside,
        "copy_us": copy,
        "copy_beside_us": copy_beside,
        "cases": {case.name: _measure(case) for case in cases(calibration)},
    }


def _alone_and_beside(measure: Callable[[], float], program: str) -> tuple[float, float]:
    """Return the medians of a measurement alone, and while another process runs a Python program, in turns."""
    other = subprocess.Popen([sys.executable, "-c", program])
    turns: dict[signal.Signals, list[float]] = {signal.SIGSTOP: [], signal.SIGCONT: []}
    try:
        time.sleep(_START_S)
        for _ in range(_TURNS):
            for change, found in turns.items():
                other.send_signal(change)
                time.sleep(_SETTLE_S)
                found.append(measure())
    finally:
        other.kill()
        other.wait()
    alone, beside = (float(np.median(found)) for found in turns.values())
    return alone, beside


def _loop_us() -> float:
    found = []
    for _ in range(200):
        began, total = time.perf_counter_ns(), 0
        for number in range(1000):
            total += number
        found.append(time.perf_counter_ns() - began)
    return float(np.median(found)) / 1e3


def _copies() -> Callable[[], float]:
    """Return a function that times copies of 100,000 bytes to successive places, in microseconds."""
    source = np.ones(_COPY_BYTES, np.uint8)
    places = [*np.ones((_COPY_PLACES, _COPY_BYTES), np.uint8)]

    def measure() -> float:
        began = time.perf_counter_ns()
        for place in places:
            place[...] = source
        return (time.perf_counter_ns() - began) / 1e3 / _COPY_PLACES

    return measure


def _measure(case: Case) -> dict[str, float]:
    with ParallelEnv(NUM_ENVS, case.make_env, num_workers=case.num_workers, seed=0) as env:
        step = _first_k(env) if case.is_first_k else _synchronous(env)
        for _ in range(_WARM_UP):
            step()
        clocks = _watched(env, is_first_k=case.is_first_k)
        busy = env.engine.pool.slab.words["busy_ns"]
        samples = []
        for _ in range(case.num_batches):
            if case.pause_s:
                time.sleep(case.pause_s)
            before, busy_before, began = dict(clocks.spent_ns), int(busy.sum()), time.perf_counter_ns()
            step()
            took = time.perf_counter_ns() - began
            spent = {stage: clocks.spent_ns[stage] - before[stage] for stage in before}
            spent["rest"] = took - sum(spent[stage] for stage in STAGES[:-1])
            samples.append({"batch": took, "worker": (int(busy.sum()) - busy_before) / case.num_workers, **spent})
    limit = float(np.quantile([one["batch"] for one in samples], _LEAST_TYPICAL))
    typical = [one for one in samples if one["batch"] <= limit]
    found = {name: float(np.mean([one[name] for one in typical])) / 1e3 for name in typical[0]}
    per_call = NUM_ENVS / 2 if case.is_first_k else NUM_ENVS
    return {**found, "envs": _envs_us(case) * per_call / case.num_workers, "typical": _LEAST_TYPICAL}


def _watched(env: ParallelEnv, *, is_first_k: bool) -> _Clocks:
    """Return clocks on an executor's stages."""
    engine, clocks = env.engine, _Clocks()
    if is_first_k:
        clocks.watch(engine, "write_inputs", "actions")
        clocks.watch(engine.pool, "submit", "command")
        clocks.watch(engine.pool, "wait_some", "waiting")
        clocks.watch(engine.batches.groups[0], "next_at", "TensorDicts")
        clocks.watch(engine.positions, "stepped", "noting")
        return clocks
    intake, commands = engine.plain_intake, engine.pool.compile()
    assert intake is not None
    timed_intake = intake._replace(take_all=clocks.timed(intake.take_all, "actions"))
    timed_commands = commands._replace(
        give=clocks.timed(commands.give, "command"), has_all=clocks.timed(commands.has_all, "waiting")
    )
    replaced: Any = engine
    replaced._intake.plain = timed_intake  # noqa: SLF001
    replaced.pool.compile = lambda: timed_commands
    replaced.batches.steps.draft = {
        op: clocks.timed(make, "TensorDicts") for op, make in engine.batches.steps.draft.items()
    }
    clocks.watch(engine.positions, "stepped_all", "noting")
    clocks.watch(engine.batches.steps, "finish", "copying")
    env.compile()
    return clocks


def _synchronous(env: ParallelEnv) -> Callable[[], None]:
    root = env.reset()
    actions = drawn_actions(env)

    def step() -> None:
        nonlocal root
        for key, value in actions:
            root.set(key, value)
        _, root = env.step_and_maybe_reset(root)

    return step


def _first_k(env: ParallelEnv) -> Callable[[], None]:
    root = env.reset()
    actions = drawn_actions(env)
    for key, value in actions:
        root.set(key, value)
    env.send(root)

    def step() -> None:
        env_ids = env.recv(min_envs=NUM_ENVS // 2, with_root=False)["env_ids"]
        root = env.current(env_ids)
        for key, value in actions:
            root.set(key, value[env_ids])
        env.send(root, env_ids)

    return step


def _envs_us(case: Case) -> float:
    """Return microseconds of one step of one env, in this process, resets among them."""
    env, actions = case.make_env(), torch.arange(8).remainder(2).tolist()
    env.reset(seed=0)
    num_steps, began = min(2000, case.num_batches), time.perf_counter_ns()
    for number in range(num_steps):
        *_, terminated, truncated, _ = env.step(actions[number % 8])
        if terminated or truncated:
            env.reset()
    took = time.perf_counter_ns() - began
    env.close()
    return took / num_steps / 1e3
