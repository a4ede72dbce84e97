"""Measure a pool's cost from /proc, per process tree: CPU time, time spent waiting for a processor, memory.

Guarantees: times are the scheduler's (`schedstat`, nanoseconds), of every thread of every given process; a process that
has ended counts as 0 and does not raise.
Platforms: Linux.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from envherd.workers.processes import descendants

_NS_PER_TICK = 10**9 // os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """Nanoseconds.

    Attributes:
        run_ns: spent running.
        delay_ns: spent ready to run, waiting for a processor.
    """

    run_ns: int
    delay_ns: int

    def since(self, before: Usage) -> Usage:
        """Return the increase since an earlier reading; never negative (the time of a thread that ended is gone)."""
        return Usage(
            max(0, self.run_ns - before.run_ns), max(0, self.delay_ns - before.delay_ns)
        )


def usage_of(pids: Iterable[int]) -> Usage:
    """Return the usage of some processes so far, summed over all their threads."""
    run = delay = 0
    for pid in pids:
        for task in _tasks(pid):
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()
                run, delay = run + int(fields[0]), delay + int(fields[1])
    return Usage(run, delay)


class Meter:
    """Reads the usage of some processes within microseconds, for intervals of a few milliseconds. Must be closed.

    Args:
        pids: of the processes, with their present threads.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._fds = []
        for pid in pids:
            for task in _tasks(pid):
                with contextlib.suppress(OSError):
                    self._fds.append(
                        os.open(f"/proc/{pid}/task/{task}/schedstat", os.O_RDONLY)
                    )

    def run_ns(self) -> int:
        """Return the nanoseconds that they have run, without threads that have ended."""
        total = 0
        for fd in self._fds:
            with contextlib.suppress(OSError, IndexError):
                total += int(os.pread(fd, 64, 0).split()[0])
        return total

    def close(self) -> None:
        """Close the files it reads."""
        while self._fds:
            os.close(self._fds.pop())


def started_by(pid: int) -> list[int]:
    """Return all living descendants of a process."""
    return descendants(pid)[1:]


def busy_ns() -> int:
    """Return the nanoseconds that all processors were busy, also for the hypervisor (in steps of 10 ms)."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) * _NS_PER_TICK


def pressure_line() -> str:
    """Return the kernel's pressure line for processors, or an empty string."""
    with contextlib.suppress(OSError):
        return Path("/proc/pressure/cpu").read_text().splitlines()[0]
    return ""


def pressure_total_us(line: str) -> int | None:
    """Return the microseconds in which some task waited, from a line of /proc/pressure/cpu; None if it has none."""
    found = re.search(r"\btotal=(\d+)", line)
    return int(found[1]) if found else None


def pressure_while_idle(seconds: float) -> float | None:
    """Sleep, and return the share of that time in which some task waited for a processor, 0..1.

    The kernel updates the value every two seconds; None if it has none. (Its avg10 would include our own pools for half
    a minute after they were built.)
    """
    before, began = pressure_total_us(pressure_line()), time.monotonic()
    time.sleep(seconds)
    after, took = pressure_total_us(pressure_line()), time.monotonic() - began
    return None if before is None or after is None else (after - before) / 1e6 / took


def _tasks(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
