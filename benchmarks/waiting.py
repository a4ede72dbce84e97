"""Measure a pool's processor use while its caller is busy: while a policy runs for 5 or 50 ms after each batch."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import ours, peers
from benchmarks.accounting import Meter, started_by
from benchmarks.pools import Job, Pool
from benchmarks.rounds import BUILD_S
from benchmarks.runner import PoolError, Runner
from benchmarks.work import SteadyFactory
from benchmarks.workloads import ALL

GAPS_S = (0.005, 0.05)
NAMES = (
    ours.OURS,
    ours.WIDE,
    peers.GYMNASIUM_ASYNC,
    peers.SB3_SUBPROC,
    peers.TORCHRL_PARALLEL,
    peers.TIANSHOU,
)


def measure_gaps(pool: Pool, gap_s: float) -> dict[str, Any]:
    """Alternate steps and sleeps for about a second; return the pool's processor use while this process slept.

    Returns:
        "worker_share": of a core, of each process of the pool, while the caller slept, 0..1;
        "cpu_us_per_batch": of all processes, for a batch with cold caches, including the gap after it.
    """
    pool.wake()
    pids = started_by(os.getpid())
    theirs, everybody = Meter(pids), Meter([os.getpid(), *pids])
    used, took, costs = 0, 0, []
    for _ in range(max(15, round(1.0 / gap_s))):
        before = everybody.run_ns()
        pool.step()
        began, idle = time.perf_counter_ns(), theirs.run_ns()  # at once, because some pools spin before they sleep
        time.sleep(gap_s)
        used, took = used + max(0, theirs.run_ns() - idle), took + time.perf_counter_ns() - began
        costs.append((everybody.run_ns() - before) / 1e3)
    theirs.close()
    everybody.close()
    pool.rest()
    return {"worker_share": used / took / max(1, len(pids)), "cpu_us_per_batch": statistics.median(costs)}


def measure(num_workers: int, chosen: Callable[[str], bool], say: Callable[[str], None]) -> dict[str, Any]:
    """Return name -> "status", and for each gap "5 ms" and "50 ms" what `measure_gaps` found; one pool at a time."""
    job = Job(make_env=SteadyFactory(), num_workers=num_workers)
    found: dict[str, Any] = {}
    for name in filter(chosen, NAMES):
        contender = ALL[name]
        if not contender.is_installed:
            found[name] = {"status": "not installed"}
            continue
        say(name)
        runner = Runner(contender, job)
        try:
            runner.start(BUILD_S)
            gaps = {f"{gap * 1e3:.0f} ms": runner.ask(measure_gaps, gap, 60.0) for gap in GAPS_S}
            found[name] = {"status": "measured", **gaps}
        except PoolError as error:
            found[name] = {"status": f"failed in {error}"}
        finally:
            runner.stop()
    return found
