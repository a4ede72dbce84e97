"""Fork a worker whose copy takes the place of another worker.

Guarantees:
- The copy is a child of the helper, as every worker is: the helper reaps it, and knows how it ended.
- The copy never serves in the place of the worker that it was forked from: if it cannot take another, it ends.
- A process that is not safe to fork is not forked.
Platforms: Linux.
"""

import contextlib
import ctypes
import functools
import json
import os
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from envherd.workers import seeding

_ANSWER_BYTES = 4096  # a pipe takes this number at once (PIPE_BUF)
_MOST_NAMED = 8  # threads, so that an answer has room
_TASKS = Path("/proc/self/task")
#: Seconds for the end of threads that handlers of the fork end.
_THREADS_END_S = 0.1
#: Devices whose state a fork does not copy.
_DEVICES = ("/dev/nvidia", "/dev/dri", "/dev/kfd")
#: Library of an OpenGL context -> the function that returns the current one.
_CONTEXTS = {"libEGL.so": "eglGetCurrentContext", "libGLX.so": "glXGetCurrentContext"}


def branch(
    own: socket.socket,
    fds: Sequence[int],
    log_fd: int,
    become: Callable[[int], None],
) -> tuple[int, list[str]]:
    """Fork this worker; return 0 in the copy. Return the copy's pid here, or why there is none, in words for users.

    Args:
        own: the socket to the owner.
        fds: the copy's descriptors of its socket and of its log. They are closed here, and are the copy's there.
        log_fd: of this worker's log.
        become: is called in the copy with its socket, to leave everything of this worker. If it raises, the copy ends.
    """
    sock_fd, copys_log_fd = fds
    pid = -1
    why = reasons_against(own, sock_fd)
    if not why:
        pid, why = fork_orphan()
    if pid == 0:
        end_on_error(functools.partial(take_log, log_fd, copys_log_fd))
        end_on_error(functools.partial(become, sock_fd))
        return 0, []
    for fd in fds:
        os.close(fd)
    return pid, why


def reasons_against(own: socket.socket, given: int) -> list[str]:
    """Return why this process cannot be forked, in words for users; empty if it can, but for threads outside Python.

    Args:
        own: the socket to the owner.
        given: descriptor of the copy's socket. No other one may be open.
    """
    return [
        *(
            f"a thread {thread.name!r}"
            for thread in threading.enumerate()
            if thread is not threading.current_thread()
        ),
        *_children(),
        *_descriptors({own.fileno(), given}),
        *_contexts(),
    ]


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


def _contexts() -> Iterator[str]:
    maps = Path("/proc/self/maps").read_text()
    for library, name in _CONTEXTS.items():
        path = next(
            (line.split()[-1] for line in maps.splitlines() if f"/{library}" in line),
            None,
        )
        if path is not None:
            # Its file was replaced, or it lacks the function.
            with contextlib.suppress(OSError, AttributeError):
                current = getattr(ctypes.CDLL(path, os.RTLD_NOLOAD | os.RTLD_NOW), name)
                current.restype = ctypes.c_void_p
                if current():
                    yield f"an OpenGL context of {library}"


def fork_orphan() -> tuple[int, list[str]]:
    """Fork this process; return 0 in the copy. Return the copy's pid here, or why there is none, in words for users.

    The process forks twice, and the one in between ends at once: the kernel then makes the copy a child of the helper,
    which adopts orphans. The copy leads a new process group.
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
            end_on_error(functools.partial(seeding.restore_globals, generators))
            return 0, []
        os.close(write)
        write = -1  # so that a read after the other's death ends
        answer = os.read(read, _ANSWER_BYTES)
        # A handler of the env's has reaped it.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(between, 0)
    except OSError as error:
        return -1, [f"no fork: {error}"]
    finally:
        for fd in {read, write} - {-1}:
            os.close(fd)
    pid, why = json.loads(answer or '[-1, ["a fork that died"]]')
    return pid, why


def _fork() -> int:
    with warnings.catch_warnings():
        # Threads: see `reasons_against`.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _fork_again(write: int) -> None:
    """Fork, report the pid, and end; return only in the copy."""
    try:
        pid = -1
        why = _threads_of(os.getppid())
        if not why:
            try:
                pid = _fork()
            except OSError as error:
                why = [f"no fork: {error}"]
            if pid == 0:
                return
        if pid > 0:
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
        os.write(write, json.dumps([pid, why]).encode()[:_ANSWER_BYTES])
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    os._exit(0)


def _threads_of(pid: int) -> list[str]:
    """Return the threads of a process that has just been forked, in words for users; its first one is left out.

    Threads that survive a fork (those of OpenBLAS, for example) have ended: handlers of their library end them before
    the fork, and start new ones when they are needed.
    """
    end = time.monotonic() + _THREADS_END_S
    while True:
        found = []
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                name = (task / "comm").read_text().strip()
                if task.name != str(pid) and name != "jemalloc_bg_thd":
                    found.append(f"a thread {name!r} of a native library")
        if not found or time.monotonic() > end:
            return [*dict.fromkeys(found)][:_MOST_NAMED]
        time.sleep(0.001)


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
        try:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)
