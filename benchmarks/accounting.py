"""What a pool costs: processor time, time spent waiting for a processor, memory. From /proc, per process tree.

Guarantees: time is the scheduler's own (`schedstat`, nanoseconds), of every thread of every process that is named;
a process that has gone counts nothing, and never raises.
Platforms: Linux.
"""

from __future__ import annotations

import contextlib
import os
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
        delay_ns: spent ready to run, while others had the processors.
    """

    run_ns: int
    delay_ns: int

    def since(self, before: Usage) -> Usage:
        """Return what was added since an earlier reading; never negative (a thread that ended takes its time along)."""
        return Usage(max(0, self.run_ns - before.run_ns), max(0, self.delay_ns - before.delay_ns))


def usage_of(pids: Iterable[int]) -> Usage:
    """Return what some processes have used so far, all their threads together."""
    run = delay = 0
    for pid in pids:
        for task in _tasks(pid):
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()
                run, delay = run + int(fields[0]), delay + int(fields[1])
    return Usage(run, delay)


class Meter:
    """Reads what some processes have used within microseconds, for intervals of a few milliseconds. Close it.

    Args:
        pids: their threads are those that are there now.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._fds = []
        for pid in pids:
            for task in _tasks(pid):
                with contextlib.suppress(OSError):
                    self._fds.append(os.open(f"/proc/{pid}/task/{task}/schedstat", os.O_RDONLY))

    def run_ns(self) -> int:
        """Return the nanoseconds that they have run; of threads that have ended, nothing."""
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
    """Return all living processes that a process has started, and those that they have."""
    return descendants(pid)[1:]


def busy_ns() -> int:
    """Return the nanoseconds that all processors have worked, for whomever, the hypervisor too (in steps of 10 ms)."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) * _NS_PER_TICK


def pressure_line() -> str:
    """Return the kernel's own account of how often something waited for a processor, or an empty string."""
    with contextlib.suppress(OSError):
        return Path("/proc/pressure/cpu").read_text().splitlines()[0]
    return ""


def pressure_total_us(line: str) -> int | None:
    """Return the microseconds in which something waited, from a line of /proc/pressure/cpu; None if it has none."""
    for field in line.split():
        name, _, value = field.partition("=")
        if name == "total":
            return int(value)
    return None


def pressure_while_idle(seconds: float) -> float | None:
    """Sleep, and return the share of that time in which something waited for a processor, 0..1.

    The kernel brings its account up to date every two seconds; None if it keeps none. (Its avg10 would tell of our own
    pools for half a minute after they were built.)
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
