"""The resources that this process may really use, which are often less than those of the machine.

Guarantees: reading changes nothing, starts no process but `nvidia-smi`, and does not raise for values that a kernel or
container hides: these are None or empty.
"""

import contextlib
import errno
import math
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from envherd.executor.machine.gpus import Gpu, read_gpus
from envherd.shm.cgroups import group_folders, read_count, read_memory, read_word
from envherd.shm.platforms import (
    bytes_of_disk,
    open_descriptors,
    soft_limit,
    usable_cpus,
    user_id,
)
from envherd.shm.segment import available_bytes
from envherd.workers.errors import EnvherdError

# ---- cgroups -----------------------------------------------------------------------------------
# Control groups, v1 and v2: read the limits of a process from a root folder.
#
# Any group above the process may set a limit (a systemd slice, a SLURM job, a pod), so every group from its own up to
# the mount is read and the tightest limit counts. All functions are pure over `root`: tests give them trees of files.
# The memory limit is read by `shm.cgroups`, which also admits shared memory against it. Does not know: limits above
# what a container can see of the hierarchy.


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


# ---- machine -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The resources that a process may use. Sizes are bytes.

    Attributes:
        cpus: ids of the processors that affinity allows; the kernel restricts it to the cpuset.
        num_cpus: processors of the machine, allowed or not.
        physical_cores: cores among `cpus`, hyper-threads of one core counted once.
        cgroup: see `Cgroup`.
        memory_total: of the machine.
        memory_free: memory of the machine that is available without swapping, to any process (MemAvailable).
        shm_total: size of /dev/shm; None where there is none.
        shm_free: free space of /dev/shm; None where there is none.
        files_left: descriptors that this process may still open; None without a limit.
        processes_left: processes and threads that may still be created; None without a limit.
        address_space: bytes that this process may map; None without a limit.
        load: runnable processes, mean of the last minute.
        cpu_pressure: share of the last 10 s in which some task waited for a processor, 0..1; None if unknown.
        gpus: see `Gpu`.
    """

    cpus: tuple[int, ...]
    num_cpus: int
    physical_cores: int
    cgroup: Cgroup
    memory_total: int
    memory_free: int
    shm_total: int | None
    shm_free: int | None
    files_left: int | None
    processes_left: int | None
    address_space: int | None
    load: float
    cpu_pressure: float | None
    gpus: tuple[Gpu, ...] = field(default=())

    @property
    def cores(self) -> float:
        """Processors that this process may use at a time: the smaller of the allowed ones and the quota."""
        quota = self.cgroup.cpu_quota
        return (
            float(len(self.cpus))
            if quota is None
            else min(float(len(self.cpus)), quota)
        )

    @property
    def is_throttled(self) -> bool:
        """Whether a quota binds: a program that computes on all allowed processors is stopped until the next period."""
        return self.cores < len(self.cpus)

    @property
    def memory_available(self) -> int:
        """Bytes this process and its children may still take."""
        room = self.cgroup.memory_room
        return self.memory_free if room is None else min(self.memory_free, room)


def read_machine(root: Path = Path("/")) -> Machine:
    """Read what this process may use.

    Args:
        root: of the control groups; see `read_cgroup`.
    """
    cpus = usable_cpus()
    memory = psutil.virtual_memory()
    cgroup = read_cgroup(root)
    shm_total, shm_free = bytes_of_disk("/dev/shm")
    return Machine(
        cpus=cpus,
        num_cpus=os.cpu_count() or len(cpus),
        physical_cores=_physical_cores(cpus),
        cgroup=cgroup,
        memory_total=memory.total,
        memory_free=memory.available,
        shm_total=shm_total,
        shm_free=shm_free,
        files_left=files_left(),
        processes_left=processes_left(cgroup),
        address_space=soft_limit("AS"),
        load=psutil.getloadavg()[0],
        cpu_pressure=_cpu_pressure(),
        gpus=read_gpus(),
    )


def files_left() -> int | None:
    """Return how many descriptors this process may still open; None without a limit."""
    limit = soft_limit("NOFILE")
    return None if limit is None else max(0, limit - open_descriptors())


def processes_left(cgroup: Cgroup) -> int | None:
    """Return how many processes and threads this process may still create; None without a limit.

    Args:
        cgroup: of this process.
    """
    rooms = [cgroup.pids_room, read_count(Path("/proc/sys/kernel/pid_max"))]
    # It counts the threads of this user. Root is not held to it.
    of_user = soft_limit("NPROC")
    if of_user is not None and user_id() != 0:
        rooms.append(max(0, of_user - _user_threads()))
    return min((room for room in rooms if room is not None), default=None)


class Others:
    """Measures how much of the processors' time other programs take from now on.

    Args:
        cpus: ids of the processors.
    """

    def __init__(self, cpus: tuple[int, ...]) -> None:
        self._cpus = cpus
        self._began = time.monotonic()
        self._taken_s = self._read()

    def share(self) -> float:
        """Return the share so far, 0..1. What has run is known to 10 ms for each process."""
        span_s = max(1e-9, (time.monotonic() - self._began) * len(self._cpus))
        return min(1.0, max(0.0, (self._read() - self._taken_s) / span_s))

    def _read(self) -> float:
        """Return seconds that the processors have run programs other than this one, its children and theirs."""
        seconds: float = sum(
            getattr(times, kind, 0.0)
            for cpu, times in enumerate(psutil.cpu_times(percpu=True))
            if cpu in self._cpus
            for kind in ("user", "system", "nice", "steal")
        )
        own = psutil.Process()
        for process in (own, *own.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                # With those of children that have ended.
                seconds -= sum(process.cpu_times()[:4])
        return seconds


def usable_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may use: its affinity, or its cgroup's CPU quota if that is less."""
    allowed = len(usable_cpus())
    quota = read_cgroup(root).cpu_quota
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def _physical_cores(cpus: Iterable[int]) -> int:
    files = (
        Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        for cpu in cpus
    )
    return len({read_word(file) or str(file) for file in files})


def _cpu_pressure() -> float | None:
    text = read_word(Path("/proc/pressure/cpu")) or ""
    found = re.search(r"^some .*?avg10=([0-9.]+)", text, re.MULTILINE)
    return None if found is None else float(found[1]) / 100


def _user_threads() -> int:
    count = 0
    for process in psutil.process_iter(["uids", "num_threads"]):
        with contextlib.suppress(psutil.Error, AttributeError, TypeError):
            info: dict[str, Any] = process.info
            if info["uids"].real == user_id():
                count += info["num_threads"]
    return count


# ---- room --------------------------------------------------------------------------------------
# Refuse numbers of envs and of processes that this machine cannot hold, before anything starts.
#
# Guarantees: only what cannot be is refused. The bounds are those of the smallest env and of a worker that has nothing
# but it, so an executor that passes may still be too large: its slab is admitted against the memory when envs have been
# built (`shm.segment.admit`), and `envherd size` measures how many fit.

#: Descriptors of the owner for each worker: socket, log, pidfd.
FILES_PER_WORKER = 3
#: Descriptors of the owner once for an executor: the helper's socket, lifeline and log; the slab; temporary ones while
#: a process is started.
FILES_FIXED = 12
#: Descriptors of the owner for each executor of one worker that starts while others do, by whether they share a helper:
#: those of a worker, the slab, and the temporary ones of its start; without, also those of its helper.
FILES_PER_EXECUTOR = {True: 7, False: 11}
#: Bytes of the smallest env in all processes together, below what `CountingEnv` takes (27 KiB in `SerialEnv`, 55 in
#: workers; 2026-11-28).
_ENV_BYTES = 24 * 2**10
#: Bytes of the smallest worker, below what one with a `CountingEnv` takes (6.4 MiB; 2026-11-28).
_WORKER_BYTES = 2 * 2**20
#: No more than this many are always tried: reading the limits on processes takes milliseconds.
_FEW = 16


class TooMany(EnvherdError, ValueError):
    """More envs or worker processes than the machine can hold, whatever the envs are. Nothing was started."""


def require_room(
    num_envs: int = 1,
    num_workers: int = 0,
    files_per_worker: int = FILES_PER_WORKER,
) -> None:
    """Refuse numbers that the machine cannot hold.

    Args:
        num_envs: N.
        num_workers: processes to start; 0 for envs in this process.
        files_per_worker: descriptors of this process for each.

    Raises:
        TooMany: the memory, or the limits on processes; with the largest number that may fit.
        OSError: EMFILE: the limit on open files.
    """
    available = available_bytes()
    for name, count, each in (
        ("num_envs", num_envs, _ENV_BYTES),
        ("num_workers", num_workers, _WORKER_BYTES),
    ):
        if available is not None and count > _FEW and count * each > available:
            raise TooMany(
                f"{name} failed: expected at most {available // each:,}, because {available / 2**20:,.0f} MiB of "
                f"memory are available and each takes at least {each / 2**10:,.0f} KiB, got {_shown(count)}. Use "
                f"fewer; `envherd size` measures how many fit."
            )
    left = processes_left(read_cgroup()) if num_workers > _FEW else None
    if left is not None and num_workers > left:
        raise TooMany(
            f"num_workers failed: expected at most {left:,}, the number of processes and threads that the limits here "
            f"leave, got {_shown(num_workers)}. Use fewer workers, or raise the limit (ulimit -u, docker --pids-limit, "
            f"TasksMax=, kernel.pid_max)."
        )
    num_files = num_workers * files_per_worker + FILES_FIXED
    files = files_left()
    if num_workers and files is not None and num_files > files:
        raise OSError(
            errno.EMFILE,
            f"starting workers failed: expected room for {num_files} more open files ({num_workers} workers), got a "
            f"limit that leaves {files}. Raise it (ulimit -n), or use fewer workers",
        )


def _shown(count: int) -> str:
    """Return a number for a message; of a huge one only the size, because Python does not print those."""
    return str(count) if count < 2**64 else f"a number of {count.bit_length()} bits"
