"""The growth of a batch's cost with envs, bytes and workers: straight lines through measured points."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks import ours, peers
from benchmarks.pools import Contender, Job, Pool
from benchmarks.ratios import fit_line
from benchmarks.rounds import Entry, Plan, measure
from benchmarks.runner import Slot
from benchmarks.work import SteadyFactory
from benchmarks.workloads import ALL

MEMCPY, NARROW = "one memcpy", "envherd, first W"
NUM_ENVS, MANY_ENVS = (2, 8, 32), (2, 8, 32, 128)
SIZES = (84 * 84, 84 * 84 * 4, 84 * 84 * 16)
WORKERS = (1, 2, 4, 8)

#: A series: contender, x, and the job at x.
Point = tuple[str, float, Job]


def _memcpy(job: Job) -> Pool:
    """Copy each env's observation once, into storage as large as a rollout's, which has each observation twice.

    (With half of that, which may fit a cache, it took 0.4 of the time after some rounds.)
    """
    source = np.ones(job.make_env().observation_space.shape, np.uint8)
    num_columns = 2 * ours.ROLLOUT_STEPS
    storage = np.ones((job.num_envs, num_columns, *source.shape), np.uint8)  # ones, so its pages exist
    rows = [[storage[env, column] for env in range(job.num_envs)] for column in range(num_columns)]
    column = 0

    def step() -> int:
        nonlocal column
        column = (column + 1) % num_columns
        for row in rows[column]:
            row[...] = source
        return job.num_envs

    return Pool(step, lambda: None)


_FIRST_W = functools.partial(ours.first_k, is_narrow=True)
CONTENDERS = {
    **ALL,
    MEMCPY: Contender(name=MEMCPY, build=_memcpy, kind="bound"),
    NARROW: Contender(name=NARROW, build=_FIRST_W, kind="ours"),
}


def _points(num_workers: int) -> dict[str, list[Point]]:
    tiny = Job(make_env=SteadyFactory(), num_workers=num_workers)
    few = (peers.GYMNASIUM_ASYNC, peers.SB3_SUBPROC, peers.TORCHRL_PARALLEL)
    envs = [(ours.OURS, float(n), replace(tiny, num_envs=n)) for n in MANY_ENVS]
    envs += [(name, float(n), replace(tiny, num_envs=n)) for name in few for n in NUM_ENVS]
    images = {size: replace(tiny, make_env=SteadyFactory(shape=(size,), dtype="uint8")) for size in SIZES}
    sizes = [
        (name, float(size), job)
        for name in (MEMCPY, ours.ROLLOUT, ours.OURS, ours.VIEWS)
        for size, job in images.items()
    ]
    workers = [(ours.OURS, float(count), replace(tiny, num_workers=count)) for count in WORKERS]
    parts = [(NARROW, float(count), replace(tiny, num_envs=32, num_workers=count)) for count in WORKERS]
    return {"envs": envs, "bytes": sizes, "workers": workers, "parts": parts}


def run(num_workers: int, plan: Plan, chosen: Callable[[str], bool], say: Callable[[str], None]) -> dict[str, Any]:
    """Measure all points of each series in one interleaved run.

    Returns:
        "envs" (x: N), "bytes" (x: of one env's observation, per env step), "workers" (x: W) and "parts" (x: W, as many
        envs being received and sent on at a time, of 32) -> contender -> "x", "cpu_us", "caller_us" (the caller's
        processor) and "wall_us" (medians: of a batch; of an env step for "bytes"), and the lines "cpu_fit",
        "caller_fit" and "wall_fit" (`[a, b, unexplained]`), or "status" where a point could not be measured.
    """
    found = {}
    for series, points in _points(num_workers).items():
        kept = [point for point in points if point[0] in (MEMCPY, NARROW) or chosen(point[0])]
        pairs = [(replace(CONTENDERS[name], name=_label(name, x)), job) for name, x, job in kept]
        entries, _ = measure(pairs, plan, functools.partial(_say, say, series))
        found[series] = _lines(series, kept, {entry.contender.name: entry for entry in entries})
    return found


def _say(say: Callable[[str], None], series: str, text: str) -> None:
    say(f"{series}: {text}")


def _label(name: str, x: float) -> str:
    return f"{name} ({x:g})"


def _lines(series: str, points: Sequence[Point], entries: dict[str, Entry]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in dict.fromkeys(point[0] for point in points):
        mine = [(x, job, entries[_label(name, x)]) for one, x, job in points if one == name]
        failures = [entry.failure for _, _, entry in mine if entry.failure or not entry.turns]
        if failures:
            found[name] = {"status": failures[0] or "no round"}
            continue
        xs = [x for x, _, _ in mine]
        found[name] = {"status": "measured", "x": xs}
        for figure, read in _FIGURES.items():
            values = [
                _num_steps(series, x, job) * statistics.median(read(turn.slot) for turn in entry.turns)
                for x, job, entry in mine
            ]
            found[name] |= {f"{figure}_us": values, f"{figure}_fit": list(fit_line(xs, values))}
    return found


#: The figures of a slot, in microseconds per env step.
_FIGURES: dict[str, Callable[[Slot], float]] = {
    "cpu": lambda slot: slot.cpu_us,
    "caller": lambda slot: slot.parent_run_ns / 1e3 / max(1, slot.steps),
    "wall": lambda slot: 1e6 / slot.steps_per_s,
}


def _num_steps(series: str, x: float, job: Job) -> float:
    """Return the number of env steps that a series' figures cover."""
    return {"bytes": 1, "parts": min(x, job.num_envs)}.get(series, job.num_envs)
