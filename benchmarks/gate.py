"""Whether a slot may be believed: what else the machine did meanwhile. Pure decisions, and the probe that feeds them.

A pool of eight processes on two cores delays itself, so the delays and the pressure of a slot say nothing about
others: both are above any limit on a silent machine. Three readings that others alone can raise are used:
- the probe: one process pinned to each core runs a fixed amount of work while all pools are asleep, right before and
  right after a slot; its run-delay over its run time;
- others' share: processor time that was used during the slot by nobody of the pool, over all there was;
- the pressure at rest: the share of some seconds without any work of ours in which something waited.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Sequence
from typing import Any, NamedTuple

from envherd.benchmarks.accounting import Usage, usage_of
from envherd.benchmarks.work import compute

#: Above these a slot is discarded.
MOST_DELAY, MOST_OTHERS, MOST_PRESSURE = 0.1, 0.1, 0.1
#: Open rounds below which no wall-clock figure is given.
FEWEST_OPEN = 3
_PROBE_ITERATIONS = 200_000  # about 10 ms


class Reading(NamedTuple):
    """What the machine did around one slot.

    Attributes:
        delay: run-delay over run time of the probe, the higher of before and after.
        others: share of all processors that was used by none of ours, 0..1.
    """

    delay: float
    others: float


def reasons_to_discard(reading: Reading) -> list[str]:
    """Return why a slot is not to be believed; nothing if it is."""
    found = []
    if reading.delay > MOST_DELAY:
        found.append("delay")
    if reading.others > MOST_OTHERS:
        found.append("others")
    return found


def delay_ratio(usages: Sequence[Usage]) -> float:
    """Return run-delay over run time of some processes together; 0 if they did not run."""
    run = sum(one.run_ns for one in usages)
    return sum(one.delay_ns for one in usages) / run if run else 0.0


def others_share(busy_ns: float, own_ns: float, wall_ns: float, num_cpus: int) -> float:
    """Return what share of the machine was used by processes that are not ours."""
    return min(1.0, max(0.0, (busy_ns - own_ns) / (wall_ns * num_cpus)))


def tries_for(num_tries: int, opened: Sequence[bool]) -> int:
    """Return how often a slot may be tried, given which of the latest slots were kept.

    Where none of the latest six was, the gate does not open on this machine now, and trying again only costs time.
    """
    latest = opened[-6:]
    return 1 if len(latest) == 6 and not any(latest) else num_tries


def is_judged_by_wall(num_open: int, pressure_at_rest: float | None) -> bool:
    """Return whether wall-clock figures may be published, given the rounds in which both slots were kept."""
    return num_open >= FEWEST_OPEN and (pressure_at_rest is None or pressure_at_rest <= MOST_PRESSURE)


class Probe:
    """One pinned process for each usable core, which runs for some milliseconds when asked. Close it."""

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
        """Return run-delay over run time now, about 10 ms of all cores. Call it while nothing of ours runs."""
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
