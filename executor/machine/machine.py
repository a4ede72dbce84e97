"""The resources that this process may really use, which are often less than those of the machine.

Guarantees: reading changes nothing, starts no process but `nvidia-smi`, and does not raise for values that a kernel or
container hides: these are None or empty. The readers are pure over `root`.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from envherd.executor.machine.cgroups import Cgroup, parse_cpu_list, read_cgroup
from envherd.executor.machine.gpus import Gpu, read_gpus
from envherd.shm.cgroups import read_word
from envherd.shm.platforms import bytes_of_disk, open_descriptors, usable_cpus, user_id

_ROOT = Path("/")
#: `/proc/self/limits` has these; resource's names for them.
_LIMIT_NAMES = {"Max open files": "nofile", "Max processes": "nproc", "Max address space": "as"}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The resources that a process may use. Sizes are bytes.

    Attributes:
        cpus: ids of the processors that affinity and cpuset allow.
        num_cpus: processors of the machine, allowed or not.
        physical_cores: cores among `cpus`, hyper-threads of one core counted once.
        cgroup: see `Cgroup`.
        memory_total: of the machine.
        memory_free: memory of the machine that is available without swapping, to any process (MemAvailable).
        shm_total, shm_free: of /dev/shm; None where there is none.
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
        return float(len(self.cpus)) if quota is None else min(float(len(self.cpus)), quota)

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
        rooms = [room for room in (self.cgroup.pids_room, self._nproc_left) if room is not None]
        return min(rooms, default=None)

    @property
    def _nproc_left(self) -> int | None:
        limit = self.limits.get("nproc")
        return None if limit is None or user_id() == 0 else max(0, limit - self.user_threads)


def read_machine(root: Path = _ROOT) -> Machine:
    """Read what this process may use.

    Args:
        root: folder that holds `proc`, `sys` and `dev`; a tree of files can represent another machine.
    """
    cgroup = read_cgroup(root)
    cpus = allowed_cpus(root, cgroup)
    memory = read_meminfo(root)
    shm_total, shm_free = _shm(root)
    is_live = root == _ROOT
    if is_live and not memory:  # without /proc
        there = psutil.virtual_memory()
        memory = {"MemTotal": there.total, "MemAvailable": there.available}
    online = parse_cpu_list(read_word(root / "sys/devices/system/cpu/online") or "")
    return Machine(
        cpus=cpus,
        num_cpus=len(online) or (os.cpu_count() or 1 if is_live else len(cpus)),
        physical_cores=_physical_cores(root, cpus),
        cgroup=cgroup,
        memory_total=memory.get("MemTotal", 0),
        memory_free=memory.get("MemAvailable", 0),
        shm_total=shm_total,
        shm_free=shm_free,
        limits=read_limits(root),
        open_files=open_descriptors() if is_live else 0,
        user_threads=_user_threads() if is_live else 0,
        load=float((read_word(root / "proc/loadavg") or "0").split()[0]),
        cpu_pressure=_cpu_pressure(root),
        gpus=read_gpus() if is_live else (),
    )


def usable_cores(root: Path = _ROOT) -> int:
    """Return how many cores this process may use: its affinity, or its cgroup's CPU quota if that is less."""
    cgroup = read_cgroup(root)
    allowed = len(allowed_cpus(root, cgroup))
    return allowed if cgroup.cpu_quota is None else max(1, min(allowed, math.ceil(cgroup.cpu_quota)))


def allowed_cpus(root: Path, cgroup: Cgroup) -> tuple[int, ...]:
    """Return the processors that affinity and cpuset allow."""
    if root == _ROOT:
        return usable_cpus()  # the kernel has restricted them to the cpuset
    for line in (read_word(root / "proc/self/status") or "").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            ids = parse_cpu_list(line.partition(":")[2])
            return ids if cgroup.cpus is None else tuple(i for i in ids if i in cgroup.cpus)
    return cgroup.cpus or tuple(range(os.cpu_count() or 1))


def read_meminfo(root: Path) -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes."""
    fields = {}
    for line in (read_word(root / "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        if rest.split():
            fields[name] = int(rest.split()[0]) * (1024 if rest.endswith("kB") else 1)
    return fields


def read_limits(root: Path) -> dict[str, int | None]:
    """Return the soft limits in /proc/self/limits; None for unlimited."""
    limits: dict[str, int | None] = {}
    for line in (read_word(root / "proc/self/limits") or "").splitlines():
        for prefix, name in _LIMIT_NAMES.items():
            if line.startswith(prefix):
                soft = line[len(prefix) :].split()[0]
                limits[name] = None if soft == "unlimited" else int(soft)
    return limits


def _physical_cores(root: Path, cpus: Iterable[int]) -> int:
    siblings = set()
    for cpu in cpus:
        text = read_word(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(parse_cpu_list(text) if text else (cpu,))
    return len(siblings)


def _shm(root: Path) -> tuple[int | None, int | None]:
    return bytes_of_disk(str(root / "dev/shm"))


def _cpu_pressure(root: Path) -> float | None:
    for line in (read_word(root / "proc/pressure/cpu") or "").splitlines():
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
