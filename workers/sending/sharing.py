"""Objects that processes share: a worker gets the owner's memory, pipes and semaphores, not copies.

That is what `multiprocessing` does for a process that it spawns: it asks an object of the process that is being started
for each descriptor. Here, a worker opens the owner's descriptor through /proc when it unpickles the object, so one
pickle is good for all workers, and for those that replace them.

Guarantees: a worker opens the same file as the owner had, or raises.
Platforms: Linux; elsewhere nothing is shared, and `sharing` lets `multiprocessing` refuse its objects.
"""

import contextlib
import importlib
import os
import platform
import stat
from collections.abc import Iterator
from multiprocessing import context, reduction
from typing import Any, NamedTuple

from envherd.shm.platforms import fcntl

#: Modules of `multiprocessing` whose reducers must be asked for.
_MODULES = tuple(
    f"multiprocessing.{name}" for name in ("connection", "heap", "sharedctypes")
)


class OwnersDescriptor(NamedTuple):
    """A descriptor of another process; `multiprocessing` calls `detach` where it needs one.

    Attributes:
        host: where that process runs.
        pid: of that process.
        fd: its number there.
        device, inode: of the file.
        flags: with which it was opened.
    """

    host: str
    pid: int
    fd: int
    device: int
    inode: int
    flags: int

    def detach(self) -> int:
        """Open the file here.

        Raises:
            RuntimeError: the owner has closed it.
        """
        fd = -1
        with contextlib.suppress(OSError):
            if self.host == platform.node():
                fd = os.open(
                    f"/proc/{self.pid}/fd/{self.fd}",
                    self.flags | os.O_NONBLOCK | os.O_CLOEXEC,
                )
        if fd < 0 or not self._is_of(os.fstat(fd)):
            if fd >= 0:
                os.close(fd)
            raise RuntimeError(
                f"unpickling failed: expected an object that process {self.pid} shares, got none: that process has "
                f"released it, or has ended. Keep a reference to it as long as the executor is used."
            )
        os.set_blocking(fd, not self.flags & os.O_NONBLOCK)
        return fd

    def _is_of(self, status: os.stat_result) -> bool:
        """Return whether a status is that of the file."""
        return status.st_dev == self.device and status.st_ino == self.inode


def _share(fd: int) -> OwnersDescriptor:
    status = os.fstat(fd)
    if stat.S_ISSOCK(status.st_mode):
        raise TypeError("cannot pickle a socket")
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_NONBLOCK)
    return OwnersDescriptor(
        platform.node(),
        os.getpid(),
        fd,
        status.st_dev,
        status.st_ino,
        flags,
    )


class _Spawning:
    """Stands for a process that `multiprocessing` is starting."""

    DupFd = staticmethod(_share)

    @staticmethod
    def duplicate_for_child(fd: int) -> int:
        return fd


_SPAWNING: Any = _Spawning()


@contextlib.contextmanager
def sharing() -> Iterator[None]:
    """Make objects that `multiprocessing` can give to a spawned process picklable in this thread."""
    before = context.get_spawning_popen()
    if os.path.exists("/proc/self/fd"):
        context.set_spawning_popen(_SPAWNING)
    try:
        yield
    finally:
        context.set_spawning_popen(before)


def reduce_shared(obj: Any) -> Any:
    """Return how a worker gets an object that processes share, or None if it is no such object."""
    kind = type(obj)
    reduce: Any = reduction.ForkingPickler._extra_reducers.get(kind)  # type: ignore[attr-defined]  # noqa: SLF001
    if getattr(reduce, "__module__", "") in _MODULES and (
        hasattr(obj, "_wrapper") or kind.__module__ in _MODULES
    ):
        context.assert_spawning(obj)
        return reduce(obj)
    if (
        kind.__module__ != "torch.storage"
        or context.get_spawning_popen() is not _SPAWNING
    ):
        return None
    storage = getattr(obj, "_untyped_storage", obj)
    if storage.device.type != "cpu" or not storage.is_shared():
        return None
    reductions = importlib.import_module("torch.multiprocessing.reductions")
    if storage is not obj:
        return reductions.reduce_typed_storage(obj)
    # Its own `reduce_storage` may send the name of a file instead, for one process that opens it.
    fd, nbytes = storage._share_fd_cpu_()
    if fd < 0:
        return None
    return reductions.rebuild_storage_fd, (kind, _share(fd), nbytes)


def is_meant_to_be_shared(obj: Any) -> bool:
    """Return whether an object connects processes."""
    return any(
        "multiprocessing" in base.__module__.split(".") for base in type(obj).__mro__
    )
