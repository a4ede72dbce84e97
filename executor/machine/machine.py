"""The resources that this process may really use, which are often less than those of the machine.

Guarantees: reading changes nothing, starts no process but `nvidia-smi`, and does not raise for values that a kernel or
container hides: these are None or empty.
"""

import contextlib
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from envherd.executor.machine.cgroups import Cgroup, read_cgroup
from envherd.executor.machine.gpus import Gpu, read_gpus
from envherd.shm.cgroups import read_count, read_word
from envherd.shm.platforms import (
    bytes_of_disk,
    open_descriptors,
    resource,
    usable_cpus,
    user_id,
)

_ROOT = Path("/")


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
        limits: soft limits by name, "nofile", "nproc", "as"; None for unlimited.
        open_files: descriptors that this process has open.
        user_threads: threads of this user, which is what "nproc" counts (not for root).
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
    limits: dict[str, int | None]
    open_files: int
    user_threads: int
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

    @property
    def files_left(self) -> int | None:
        """Descriptors this process may still open."""
        limit = self.limits.get("nofile")
        return None if limit is None else max(0, limit - self.open_files)

    @property
    def processes_left(self) -> int | None:
        """Processes and threads that may still be created; None without a limit."""
        return _least_left(self.cgroup, self.limits, self.user_threads)


def read_machine(root: Path = _ROOT) -> Machine:
    """Read what this process may use.

    Args:
        root: of the control groups; see `read_cgroup`.
    """
    cpus, memory = usable_cpus(), psutil.virtual_memory()
    shm_total, shm_free = bytes_of_disk("/dev/shm")
    return Machine(
        cpus=cpus,
        num_cpus=os.cpu_count() or len(cpus),
        physical_cores=_physical_cores(cpus),
        cgroup=read_cgroup(root),
        memory_total=memory.total,
        memory_free=memory.available,
        shm_total=shm_total,
        shm_free=shm_free,
        limits=_limits(),
        open_files=open_descriptors(),
        user_threads=_user_threads(),
        load=psutil.getloadavg()[0],
        cpu_pressure=_cpu_pressure(),
        gpus=read_gpus(),
    )


def processes_left() -> int | None:
    """Return how many processes and threads this process may still create, at most; None without a limit."""
    rooms = (
        _least_left(read_cgroup(), _limits(), _user_threads()),
        read_count(Path("/proc/sys/kernel/pid_max")),
    )
    return min((room for room in rooms if room is not None), default=None)


def _least_left(
    cgroup: Cgroup,
    limits: dict[str, int | None],
    user_threads: int,
) -> int | None:
    """Return how many processes and threads the tightest limit leaves; root is not held to "nproc"."""
    nproc = None if user_id() == 0 else limits.get("nproc")
    own = None if nproc is None else max(0, nproc - user_threads)
    return min(
        (room for room in (cgroup.pids_room, own) if room is not None),
        default=None,
    )


class Others:
    """Measures how much of the processors' time other programs take from now on.

    Args:
        cpus: ids of the processors.
    """

    def __init__(self, cpus: tuple[int, ...]) -> None:
        self._cpus = cpus
        self._began, self._taken_s = time.monotonic(), self._read()

    def share(self) -> float:
        """Return the share so far, 0..1. What has run is known to 10 ms for each process."""
        span_s = max(1e-9, (time.monotonic() - self._began) * len(self._cpus))
        return min(1.0, max(0.0, (self._read() - self._taken_s) / span_s))

    def _read(self) -> float:
        """Return seconds that the processors have run programs other than this one, its children and theirs."""
        seconds = 0.0
        for cpu, times in enumerate(psutil.cpu_times(percpu=True)):
            if cpu in self._cpus:
                seconds += (
                    times.user
                    + times.system
                    + getattr(times, "nice", 0.0)
                    + getattr(times, "steal", 0.0)
                )
        own = psutil.Process()
        for process in (own, *own.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                # With those of children that have ended.
                seconds -= sum(process.cpu_times()[:4])
        return seconds


def usable_cores(root: Path = _ROOT) -> int:
    """Return how many cores this process may use: its affinity, or its cgroup's CPU quota if that is less."""
    allowed, quota = len(usable_cpus()), read_cgroup(root).cpu_quota
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def _limits() -> dict[str, int | None]:
    """Return the soft limits that the system has; None for unlimited."""
    limits: dict[str, int | None] = {}
    for name in ("nofile", "nproc", "as"):
        # There may be no such limit, or no module for limits.
        with contextlib.suppress(OSError, AttributeError):
            soft = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[0]
            limits[name] = None if soft == resource.RLIM_INFINITY else soft
    return limits


def _physical_cores(cpus: Iterable[int]) -> int:
    files = (
        Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        for cpu in cpus
    )
    return len({read_word(file) or str(file) for file in files})


def _cpu_pressure() -> float | None:
    for line in (read_word(Path("/proc/pressure/cpu")) or "").splitlines():
        if line.startswith("some "):
            fields = dict(part.split("=") for part in line.split()[1:])
            return float(fields["avg10"]) / 100
    return None


def _user_threads() -> int:
    own, count = user_id(), 0
    if own is None:
        return 0
    for process in psutil.process_iter(["uids", "num_threads"]):
        with contextlib.suppress(psutil.Error, AttributeError, TypeError):
            info: dict[str, Any] = process.info
            if info["uids"].real == own:
                count += info["num_threads"]
    return count
