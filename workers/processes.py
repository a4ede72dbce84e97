"""Read memory, processor time and threads of a process and its descendants from /proc.

Values are 0 for a process that has ended, or if /proc does not have them.
Platforms: Linux.
"""

import contextlib
import os

from envherd.shm.interrupts import ignoring_refusals
from envherd.shm.platforms import CLOCK_TICKS

_MEMORY_FIELDS = {
    "Private_Clean": "clean",
    "Private_Dirty": "dirty",
    "Private_Hugetlb": "dirty",
    "Pss": "pss",
}


def descendants(pid: int) -> list[int]:
    """Return a process and all its descendants, itself first."""
    found = [pid]
    # The list grows meanwhile, by the children of those that are in it.
    for parent in found:
        for task in _entries(f"/proc/{parent}/task"):
            found.extend(
                map(int, _text(f"/proc/{parent}/task/{task}/children").split())
            )
    return found


def memory_of(pid: int, *, is_alone: bool = False) -> dict[str, int]:
    """Return bytes of memory of a process and its descendants (0.5 ms for a small process, 14 ms for one with torch).

    RSS is not among them: it counts shared pages once for every process that maps them.

    Args:
        pid: of the process.
        is_alone: without its descendants.

    Returns:
        "uss": private memory; the sum of "dirty" (data) and "clean" (files, such as libraries, that another process
        could share). "pss": uss and their part of shared memory.
    """
    sums = {"uss": 0, "pss": 0, "dirty": 0, "clean": 0}
    for one in [pid] if is_alone else descendants(pid):
        for line in _text(f"/proc/{one}/smaps_rollup").splitlines():
            name = _MEMORY_FIELDS.get(line.partition(":")[0])
            if name is not None:
                sums[name] += int(line.split()[1]) * 1024
    return {**sums, "uss": sums["dirty"] + sums["clean"]}


def processor_ns(pid: int) -> tuple[int, int, int]:
    """Return nanoseconds of a process's main thread on a processor and waiting for one, and of its other threads.

    The last is the processor time of all other threads, and of its descendants. Without /proc/PID/schedstat, nothing is
    known of waiting and of other threads, and the first is in steps of 10 ms.
    """
    own = cpu_ns(pid)
    delay = others = 0
    for one in descendants(pid):
        for task in _entries(f"/proc/{one}/task"):
            scheduled = scheduled_ns(f"{one}/task/{task}")
            if scheduled and int(task) == pid:
                own, delay = scheduled
            elif scheduled:
                ran, _ = scheduled
                others += ran
    return own, delay, others


def scheduled_ns(thread: str) -> list[int]:
    """Return nanoseconds of a thread on a processor and waiting for one; empty if the kernel does not count them.

    Args:
        thread: its folder in /proc: `PID/task/ID`, `PID` for a main thread, or `thread-self`.
    """
    return [int(field) for field in _text(f"/proc/{thread}/schedstat").split()[:2]]


def cpu_ns(pid: int) -> int:
    """Return nanoseconds of processor time of a process, without its descendants, in steps of 10 ms."""
    return int(sum(_numbers(pid, 11, 12)) * 1e9 / CLOCK_TICKS)


def cpu_of(pid: int) -> int | None:
    """Return the processor that a process runs on, or ran on last; None if it has gone."""
    return next(iter(_numbers(pid, 36)), None)


def parent_of(pid: int) -> int:
    """Return the process id of a process's parent; 0 if it has gone."""
    return sum(_numbers(pid, 1))


def num_threads(pid: int) -> int:
    """Return how many threads a process and its descendants have."""
    return sum(len(_entries(f"/proc/{one}/task")) for one in descendants(pid))


def _numbers(pid: int, *places: int) -> list[int]:
    """Return numbers of `/proc/PID/stat` by their places after the program's name; none if the process has gone."""
    # The last parenthesis, because a name may have spaces and parentheses.
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return [int(fields[place]) for place in places if place < len(fields)]


def _entries(path: str) -> list[str]:
    with ignoring_refusals():
        return os.listdir(path)
    return []


def _text(path: str) -> str:
    with contextlib.suppress(ValueError), ignoring_refusals(), open(path) as file:
        return file.read()
    return ""
