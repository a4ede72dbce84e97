"""Decide whether a slot is valid, from the other load on the machine. Pure decisions, and the probe that feeds them.

A pool of eight processes on two cores delays itself, so its own delays and pressure say nothing about other load: both
exceed any limit even on a quiet machine. Three readings that only other load can raise are used:
- the probe: one process pinned to each core does a fixed amount of work while all pools sleep, right before and right
  after a slot; its run delay divided by its run time;
- others' share: the share of all CPU time during the slot that processes outside the pool used;
- the pressure at rest: the share of some seconds without our own work in which some task waited.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.accounting import Usage, usage_of
from benchmarks.work import compute

#: Limits above which a slot is discarded.
MOST_DELAY, MOST_OTHERS, MOST_PRESSURE = 0.1, 0.1, 0.1
#: Least number of open rounds for wall-clock figures.
FEWEST_OPEN = 3
_PROBE_ITERATIONS = 200_000  # about 10 ms


class Reading(NamedTuple):
    """The other load around one slot.

    Attributes:
        delay: run delay divided by run time of the probe, the higher one of before and after.
        others: share of all processors that other processes used, 0..1.
    """

    delay: float
    others: float


def reasons_to_discard(reading: Reading) -> list[str]:
    """Return the reasons why a slot is invalid; empty if it is valid."""
    found = []
    if reading.delay > MOST_DELAY:
        found.append("delay")
    if reading.others > MOST_OTHERS:
        found.append("others")
    return found


def delay_ratio(usages: Sequence[Usage]) -> float:
    """Return the run delay divided by the run time of some processes together; 0 if they did not run."""
    run = sum(one.run_ns for one in usages)
    return sum(one.delay_ns for one in usages) / run if run else 0.0


def others_share(busy_ns: float, own_ns: float, wall_ns: float, num_cpus: int) -> float:
    """Return the share of the machine that other processes used."""
    return min(1.0, max(0.0, (busy_ns - own_ns) / (wall_ns * num_cpus)))


def tries_for(num_tries: int, opened: Sequence[bool]) -> int:
    """Return the number of tries for a slot, depending on which of the latest slots were kept.

    If none of the latest six was kept, the machine is too busy now, and further tries only cost time.
    """
    latest = opened[-6:]
    return 1 if len(latest) == 6 and not any(latest) else num_tries


def is_judged_by_wall(num_open: int, pressure_at_rest: float | None) -> bool:
    """Return whether wall-clock figures may be published, from the number of rounds in which both slots were kept."""
    return num_open >= FEWEST_OPEN and (
        pressure_at_rest is None or pressure_at_rest <= MOST_PRESSURE
    )


class Probe:
    """One pinned process for each usable core, which runs for some milliseconds on request. Must be closed."""

    def __init__(self) -> None:
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        context = multiprocessing.get_context("fork")
        for cpu in sorted(os.sched_getaffinity(0)):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(cpu, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def read(self) -> float:
        """Return the run delay divided by the run time of about 10 ms of work per core. Call it while no pool runs."""
        for pipe in self._pipes:
            pipe.send(None)
        return delay_ratio([Usage(*pipe.recv()) for pipe in self._pipes])

    def close(self) -> None:
        """End its processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            with contextlib.suppress(OSError):
                pipe.close()
            process.kill()
            process.join()
            process.close()


def _serve(cpu: int, pipe: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.sched_setaffinity(0, {cpu})
    own = [os.getpid()]
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.recv()
            before = usage_of(own)
            compute(_PROBE_ITERATIONS)
            pipe.send(tuple(usage_of(own).since(before)))
