"""Control groups, v1 and v2: read the limits of a process from a root folder.

Any group above the process may set a limit (a systemd slice, a SLURM job, a pod), so every group from its own up to the
mount is read and the tightest limit counts. All functions are pure over `root`: tests give them trees of files. The
memory limit is read by `shm.cgroups`, which also admits shared memory against it.
Does not know: limits above what a container can see of the hierarchy.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from envherd.shm.cgroups import group_folders, read_count, read_memory, read_word


@dataclass(frozen=True, kw_only=True)
class Cgroup:
    """The limits of a process's control groups.

    Attributes:
        cpu_quota: cores, may be fractional; None without a quota.
        memory_limit: bytes; None without one.
        memory_room: bytes left below the tightest limit; page cache that can be dropped counts as free.
        oom_kills: processes of the process's own group that the kernel has killed for a memory limit so far.
        pids_room: processes and threads that may still be created; None without a limit.
    """

    cpu_quota: float | None = None
    memory_limit: int | None = None
    memory_room: int | None = None
    oom_kills: int = 0
    pids_room: int | None = None


def read_cgroup(root: Path = Path("/")) -> Cgroup:
    """Read the control groups of this process.

    Args:
        root: folder that holds `proc` and `sys`.
    """
    folders = {
        name: list(group_folders(root, name)) for name in ("cpu", "memory", "pids")
    }
    memory = read_memory(root)
    quotas = [quota for quota in map(_cpu_quota, folders["cpu"]) if quota is not None]
    rooms = [room for room in map(_pids_room, folders["pids"]) if room is not None]
    return Cgroup(
        cpu_quota=min(quotas, default=None),
        memory_limit=memory.limit,
        memory_room=memory.room,
        oom_kills=_oom_kills(folders["memory"][0]) if folders["memory"] else 0,
        pids_room=min(rooms, default=None),
    )


class OomKills(NamedTuple):
    """How many processes the kernel has killed for lack of memory.

    Attributes:
        own: in this process's own group.
        everywhere: on the machine; None if the kernel does not report it.
    """

    own: int
    everywhere: int | None


def count_oom_kills() -> OomKills:
    """Return how many processes the kernel has killed so far."""
    own = next(group_folders(Path("/"), "memory"), None)
    return OomKills(
        0 if own is None else _oom_kills(own),
        _kills_in(Path("/proc/vmstat")),
    )


def _cpu_quota(folder: Path) -> float | None:
    text = read_word(folder / "cpu.max")
    if text is not None:
        quota, _, period = text.partition(" ")
        return None if quota == "max" else int(quota) / int(period or 100_000)
    microseconds = read_count(folder / "cpu.cfs_quota_us")
    every = read_count(folder / "cpu.cfs_period_us")
    return microseconds / every if microseconds and every else None


def _oom_kills(folder: Path) -> int:
    names = ("memory.events", "memory.oom_control")  # of version 2 and 1
    return next(filter(None, (_kills_in(folder / name) for name in names)), 0)


def _kills_in(file: Path) -> int | None:
    """Return the number in the line "oom_kill NUMBER" of a file; None without one."""
    lines = (read_word(file) or "").splitlines()
    counts = (line.split()[1] for line in lines if line.startswith("oom_kill "))
    return next(map(int, counts), None)


def _pids_room(folder: Path) -> int | None:
    most = read_count(folder / "pids.max")
    return (
        None
        if most is None
        else max(0, most - (read_count(folder / "pids.current") or 0))
    )
