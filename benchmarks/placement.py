"""Measure how much a run's speed depends on its workers' placement: many starts, with different ways in turn.

    python -m benchmarks.placement --starts 10 --write

Every start is a process that creates an executor, makes a fixed number of steps and ends. The ways take turns, so
changes of the machine's speed affect all of them. The median batch times of the starts are compared. A start during
which other processes used more than a tenth of the machine is repeated, at most twice.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from benchmarks import bounds
from benchmarks.accounting import busy_ns, started_by, usage_of
from benchmarks.gate import MOST_OTHERS, others_share
from benchmarks.pools import Job
from benchmarks.work import SteadyFactory, iterations_per_us

RESULTS = Path(__file__).parent / "results" / "placement.json"
DEFAULT, PINNED, BOUND = "default", "pinned", "serial loops"
WAYS = (DEFAULT, PINNED, BOUND)
#: name -> (envs, steps of a start)
RUNS = {"commons_harvest": (4, 1500), "cartpole": (8, 8000), "w100": (4, 4000), "w1000": (8, 400)}
_NUM_WORKERS = 2
_WARM_UP = 20
_FREE_S = 1.0
_TRIES = 3


def _factory(run: str, calibration: float) -> tuple[Callable[[], Any], Literal["gymnasium", "meltingpot"]]:
    if run == "commons_harvest":
        from envherd.executor import MeltingPotFactory

        return MeltingPotFactory("commons_harvest__open"), "meltingpot"
    if run == "cartpole":
        from envherd.workers.adapters.named import NamedFactory

        return NamedFactory("gymnasium", "CartPole-v1"), "gymnasium"
    return SteadyFactory(mean=float(run[1:]) * calibration), "gymnasium"


def start(run: str, way: str, calibration: float) -> dict[str, Any]:
    """Make one start; return microseconds per batch and the workers' placement."""
    num_envs, num_steps = RUNS[run]
    make_env, family = _factory(run, calibration)
    if way == BOUND:
        return _start_loops(Job(make_env=make_env, num_envs=num_envs, num_workers=_NUM_WORKERS, family=family))
    from benchmarks.ours import drawn_actions
    from envherd.executor import ExecutorOptions, ParallelEnv

    options = ExecutorOptions(affinity=tuple(sorted(os.sched_getaffinity(0)))) if way == PINNED else None
    took: list[float] = []
    with ParallelEnv(num_envs, make_env, num_workers=_NUM_WORKERS, seed=0, options=options) as env:
        root = env.reset()
        actions = drawn_actions(env)
        others = _Others()
        for _ in range(_WARM_UP + num_steps):
            began = time.perf_counter()
            for key, value in actions:
                root.set(key, value)
            _, root = env.step_and_maybe_reset(root)
            took.append((time.perf_counter() - began) * 1e6)
        share, workers = others.share(), env.statistics().workers
    quantiles = statistics.quantiles(took[_WARM_UP:], n=20)
    return {
        "median_us": quantiles[9],
        "p90_us": quantiles[17],
        "mean_us": statistics.fmean(took[_WARM_UP:]),
        "cpus": [worker.cpu for worker in workers],
        "others": share,
    }


class _Others:
    """The share of the machine that other processes use, from construction until it is read."""

    def __init__(self) -> None:
        self._before = time.perf_counter_ns(), busy_ns(), self._own_ns()

    def share(self) -> float:
        wall, busy, own = (
            now - before
            for now, before in zip((time.perf_counter_ns(), busy_ns(), self._own_ns()), self._before, strict=True)
        )
        return others_share(busy, own, wall, os.cpu_count() or 1)

    def _own_ns(self) -> int:
        return usage_of([os.getpid(), *started_by(os.getpid())]).run_ns


def _start_loops(job: Job) -> dict[str, Any]:
    """Step the same envs in as many free-running processes."""
    pool = bounds.free_running(job)
    pool.wake()
    others, rates, end = _Others(), [], time.perf_counter() + _FREE_S
    while (began := time.perf_counter()) < end:
        num_steps = pool.step() + pool.step()
        if num_steps:
            rates.append((time.perf_counter() - began) * 1e6 / num_steps * job.num_envs)
    share = others.share()
    pool.close()
    return {"median_us": statistics.median(rates), "p90_us": statistics.quantiles(rates, n=20)[17], "others": share}


def measure(runs: list[str], ways: list[str], num_starts: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return run -> way -> the results of each start."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {run: {way: [] for way in ways} for run in runs}
    calibration = iterations_per_us()
    for run in runs:
        for number in range(num_starts):
            for way in ways:
                one = _start_apart(run, way, calibration)
                found[run][way].append(one)
                print(f"{run} {number + 1}/{num_starts} {way}: {json.dumps(one)}", flush=True)
    return found


def study(num_starts: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Start commons_harvest__open repeatedly, in turn with serial loops.

    Args:
        num_starts: of each.
        say: called with a text on the current activity.

    Returns:
        run -> "medians_us" of the starts, and "shares": their speeds relative to as many serial loops as workers, which
        ran in the same turn.
    """
    run, calibration = "commons_harvest", iterations_per_us()
    found: dict[str, list[float]] = {"medians_us": [], "shares": []}
    for number in range(num_starts):
        say(f"start {number + 1} of {num_starts}")
        median = _start_apart(run, DEFAULT, calibration)["median_us"]
        found["medians_us"].append(median)
        found["shares"].append(_start_apart(run, BOUND, calibration)["median_us"] / median)
    return {run: found}


def _start_apart(run: str, way: str, calibration: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.placement", "--one", run, way, str(calibration)]
    for _ in range(_TRIES):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{run}, {way}: {done.stderr[-2000:]}")
        one: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if one["others"] <= MOST_OTHERS:
            break
    return one


def table(found: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """Return the results as a table, with the slowest start relative to the fastest, and to its turn's bound."""
    lines = [
        "| run | way | medians of the starts, us | slowest / fastest | p90, us | of serial loops |",
        "|---|---|---|---|---|---|",
    ]
    for run, ways in found.items():
        bound = [one["median_us"] for one in ways.get(BOUND, [])]
        for way, starts in ways.items():
            medians = [one["median_us"] for one in starts]
            shares = [b / m for b, m in zip(bound, medians, strict=True)] if way != BOUND and bound else []
            listed = ", ".join(f"{median:.0f}" for median in sorted(medians))
            lines.append(
                f"| {run} | {way} | {listed} | {max(medians) / min(medians):.2f} "
                f"| {statistics.median(one['p90_us'] for one in starts):.0f} "
                f"| {f'{min(shares):.2f} to {max(shares):.2f}' if shares else ''} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table, and keep the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--runs", default="commons_harvest", help=f"of {', '.join(RUNS)}; separated by commas")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--write", action="store_true", help=f"keep the results in {RESULTS.name}")
    parser.add_argument("--one", nargs=3, metavar=("RUN", "WAY", "CALIBRATION"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        run, way, calibration = given.one
        print(json.dumps(start(run, way, float(calibration))))
        return
    found = measure(given.runs.split(","), given.ways.split(","), given.starts)
    print(table(found))
    if given.write:
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps({**kept, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
