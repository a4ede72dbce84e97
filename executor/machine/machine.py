"""The resources that this process may really use, which are often less than those of the machine.

Guarantees: reading changes nothing, starts no process but `nvidia-smi`, and does not raise for values that a kernel or
container hides: these are None or empty.
"""

import contextlib
import math
import os
import re
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
    soft_limit,
    usable_cpus,
    user_id,
)


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
