"""What it takes to hand a finished batch to the caller: a TensorDict of five leaves under `next`, views or a copy."""

from __future__ import annotations

import statistics
import time
from typing import Any

from envherd.benchmarks.work import SteadyFactory
from envherd.executor import ParallelEnv
from envherd.workers.protocol import Op

_CALLS, _BATCHES = 500, 30


def measure() -> dict[str, Any]:
    """Return microseconds of processor time per batch of 8 envs: "views" of the ring, and "own" memory.

    The rows lie in the ring already; measured is what `step` does with them, in the caller's thread alone. The median
    of batches of calls is given, and the lowest.
    """
    return {"views": _measure(copy=False), "own": _measure(copy=True)}


def _measure(*, copy: bool) -> dict[str, float]:
    with ParallelEnv(8, SteadyFactory(), num_workers=1, seed=0, copy=copy) as env:
        root = env.reset()
        for _ in range(4):
            _, root = env.step_and_maybe_reset(env.rand_action(root))
        batches = env.engine.batches
        draft = batches.draft[Op.STEP]
        column = 0
        found = []
        for _ in range(_BATCHES):
            began = time.thread_time_ns()
            for _ in range(_CALLS):
                batches.finish(draft(column), column, None)
            found.append((time.thread_time_ns() - began) / 1e3 / _CALLS)
    return {"median_us": statistics.median(found), "lowest_us": min(found)}
