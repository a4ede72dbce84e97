"""Fork a worker whose copy takes the place of another worker.

Guarantees:
- The copy is a child of the helper, as every worker is: the helper reaps it, and knows how it ended.
- The copy never serves in the place of the worker that it was forked from: if it cannot take another, it ends.
- A process that is not safe to fork is not forked.
Platforms: Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from envherd.workers import seeding

_PID = struct.Struct("<q")
_TASKS = Path("/proc/self/task")
#: Threads without a name of their own: the names of this process and of its helper, which threads inherit.
_UNNAMED = ("envherd-worker", "envherd-helper", "python")
#: Libraries whose idle threads a fork may lose: they start new ones in the copy.
_FORKABLE_POOLS = ("openblas", "libmkl", "libiomp")
#: Libraries whose threads the copy would wait for in vain.
_LOST_POOLS = ("libgomp", "libtbb")
#: Devices whose state a fork does not copy.
_DEVICES = ("/dev/nvidia", "/dev/dri", "/dev/kfd")
#: Library of an OpenGL context -> the function that returns the current one.
_CONTEXTS = {"libEGL.so": "eglGetCurrentContext", "libGLX.so": "glXGetCurrentContext"}


class Branched(BaseException):
    """Raised in the copy, to leave the loop of the worker that it was forked from."""


def reasons_against(own: socket.socket, given: int) -> list[str]:
    """Return why this process cannot be forked, in words for users; empty if it can.

    Args:
        own: the socket to the owner.
        given: descriptor of the copy's socket. No other one may be open.
    """
    maps = Path("/proc/self/maps").read_text()
    return [*_threads(maps), *_children(), *_descriptors({own.fileno(), given}), *_contexts(maps)]


def _threads(maps: str) -> Iterator[str]:
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    for thread in others:
        yield f"a thread {thread.name!r}"
    known = {thread.native_id for thread in others} | {threading.get_native_id()}
    for task in map(int, os.listdir(_TASKS)):
        if task not in known:
            with contextlib.suppress(OSError):  # it has ended
                name = (_TASKS / str(task) / "comm").read_text().strip()
                if name != "jemalloc_bg_thd" and not _is_idle_pool(name, maps):
                    yield f"a thread {name!r} of a native library"


def _is_idle_pool(name: str, maps: str) -> bool:
    """Return whether a thread without a name belongs to a pool that survives a fork."""
    if not name.startswith(_UNNAMED) or any(library in maps for library in _LOST_POOLS):
        return False
    return any(library in maps for library in _FORKABLE_POOLS)


def _children() -> Iterator[str]:
    for task in os.listdir(_TASKS):
        with contextlib.suppress(OSError):
            for pid in (_TASKS / task / "children").read_text().split():
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                yield f"a process {name!r} (pid {pid}) that the env has started"


def _descriptors(own: set[int]) -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of this list
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith(_DEVICES):
                yield f"the device {target}"
            elif target.startswith("socket:") and int(fd) not in own:
                yield f"an open socket (descriptor {fd})"


def _contexts(maps: str) -> Iterator[str]:
    for library, name in _CONTEXTS.items():
        path = next((line.split()[-1] for line in maps.splitlines() if f"/{library}" in line), None)
        if path is not None:
            current = getattr(ctypes.CDLL(path, os.RTLD_NOLOAD | os.RTLD_NOW), name)
            current.restype = ctypes.c_void_p
            if current():
                yield f"an OpenGL context of {library}"


def fork_orphan() -> int:
    """Fork this process; return 0 in the copy, and its pid here.

    The process forks twice, and the one in between ends at once: the kernel then makes the copy a child of the helper,
    which adopts orphans. The copy leads a process group of its own.

    Raises:
        OSError: a limit on processes or memory.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # an env may have replaced or closed it
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # or both processes would write what C has buffered
    generators = seeding.caller_state()  # a fork seeds `random` anew
    read, write = os.pipe()
    try:
        between = _fork()
        if between == 0:
            _fork_again(write)
            seeding.restore_caller(generators)
            return 0
        os.close(write)
        write = -1  # so that a read after the other's death ends
        data = os.read(read, _PID.size)
        with contextlib.suppress(ChildProcessError):  # a handler of the env's has reaped it
            os.waitpid(between, 0)
    finally:
        for fd in {read, write} - {-1}:
            os.close(fd)
    (pid,) = _PID.unpack(data) if data else (-errno.ECHILD,)
    if pid < 0:
        raise OSError(-pid, os.strerror(-pid))
    return int(pid)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads: see `reasons_against`
        return os.fork()


def _fork_again(write: int) -> None:
    """Fork, report the pid, and end; return only in the copy."""
    try:
        pid = _fork()
        if pid == 0:
            return
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        os.write(write, _PID.pack(pid))
    except OSError as error:
        os.write(write, _PID.pack(-(error.errno or errno.EAGAIN)))
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def take_log(old: int, new: int) -> None:
    """Make every descriptor of the log `old` one of the log `new`, which is closed."""
    of_old = os.fstat(old).st_ino
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if os.fstat(fd).st_ino == of_old:
                os.dup2(new, fd, inheritable=os.get_inheritable(fd))
    os.close(new)


def end_on_error(call: Callable[[], None]) -> None:
    """Make a call in the copy; end this process if it raises."""
    try:
        call()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
