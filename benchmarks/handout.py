"""Time the hand-out of finished rows to the caller: a batch of five leaves under `next`, or the first ready envs."""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks.work import SteadyFactory
from envherd.executor import ParallelEnv
from envherd.workers.protocol import Op

_CALLS, _BATCHES = 500, 30


def measure() -> dict[str, Any]:
    """Return microseconds of processor time of the caller's thread: the median of many measurements, and the lowest.

    Returns:
        "views" and "own": the part of `step` after the rows of 8 envs are in the ring, for a batch of views or of
        copies. "first_k": `recv`, `current` and `send` of 4 of 8 envs that have answered, for each env step.
    """
    return {"views": _measure(copy=False), "own": _measure(copy=True), "first_k": _measure_first_k()}


def _measure(*, copy: bool) -> dict[str, float]:
    with ParallelEnv(8, SteadyFactory(), num_workers=1, seed=0, copy=copy) as env:
        root = env.reset()
        for _ in range(4):
            _, root = env.step_and_maybe_reset(env.rand_action(root))
        batches = env.engine.batches
        draft = batches.steps.draft[Op.STEP]
        column = 0
        found = []
        for _ in range(_BATCHES):
            began = time.thread_time_ns()
            for _ in range(_CALLS):
                batches.steps.finish(draft(column), column, None)
            found.append((time.thread_time_ns() - began) / 1e3 / _CALLS)
    return {"median_us": statistics.median(found), "lowest_us": min(found)}


def _measure_first_k() -> dict[str, float]:
    wanted, clock = 4, time.perf_counter_ns  # the thread's clock is too coarse for one turn
    with ParallelEnv(8, SteadyFactory(), num_workers=1, seed=0) as env:
        env.send(env.rand_action(env.reset()))
        actions = env.rand_action()["action"]
        found = []
        for _ in range(_CALLS * _BATCHES // 4):
            while len(env.engine.pool.outstanding()):
                time.sleep(0)
            began = clock()
            env_ids = env.recv(wanted, with_root=False)["env_ids"]
            root = env.current(env_ids)
            received = clock()
            root.set("action", actions[env_ids])
            sending = clock()
            env.send(root, env_ids)
            found.append((clock() - sending + received - began) / 1e3 / wanted)
    return {"median_us": statistics.median(found), "lowest_us": statistics.quantiles(found, n=10)[0]}
