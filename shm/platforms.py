"""What operating systems have: the only file that tells them apart.

Guarantees: it can be imported everywhere, and so can all modules that take from here what some system lacks. `missing`
tries what the pool of forked workers needs, because a sandbox may refuse calls that its kernel has.
Platforms: Linux has everything. macOS lacks memfd, pidfds, semaphores in shared memory, F_SETSIG and /proc. Windows
also lacks forks, process groups, most signals, and the modules fcntl, resource and termios.
"""

import contextlib
import ctypes
import errno
import faulthandler
import functools
import importlib
import io
import mmap
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _module(name: str) -> Any:
    """Return a module of the standard library, or None where it does not exist."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


class _NoLibrary:
    """Stands for a C library that cannot be loaded: each of its functions raises."""

    def __getattr__(self, name: str) -> Any:
        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSYS, f"this system has no {name}")

        setattr(self, name, refuse)
        return refuse


def _load_libc() -> Any:
    try:
        return ctypes.CDLL(None, use_errno=True)
    except (OSError, TypeError):  # Windows names no library of the process
        return _NoLibrary()


def _sched_yield() -> Callable[[], None]:
    with contextlib.suppress(AttributeError, OSError):
        os.sched_yield()
        return os.sched_yield
    return lambda: time.sleep(0)


def _seek_and_read(fd: int, count: int, offset: int) -> bytes:
    os.lseek(fd, offset, os.SEEK_SET)
    return os.read(fd, count)


#: Modules, None where they do not exist.
fcntl, resource, termios = map(_module, ("fcntl", "resource", "termios"))
libc = _load_libc()
#: Flag of the mapping of a descriptor; 0 where shared memory has none.
MAP_SHARED: int = getattr(mmap, "MAP_SHARED", 0)
IS_LINUX = sys.platform == "linux"
HAS_MEMFD = IS_LINUX and hasattr(os, "memfd_create")
HAS_DEV_SHM = IS_LINUX
#: Folder of programs' caches, in the user's folder.
CACHES = {"darwin": "Library/Caches"}.get(sys.platform, ".cache")
_SEMAPHORE_BYTES = 128  # at least those of a sem_t
F_SETSIG = 10  # fcntl.h of Linux; not in python's fcntl module
#: Flags of sockets. Without the first, sockets must not block by themselves; without the second there is no SIGPIPE, or
#: Python ignores it.
MSG_DONTWAIT = getattr(socket, "MSG_DONTWAIT", 0)
MSG_NOSIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
recv_fds: Callable[..., Any] = getattr(
    socket, "recv_fds", lambda sock, count, _: (sock.recv(count), [], 0, None)
)
#: Flag of a file that the system deletes when its last descriptor is closed; 0 where an open file can be deleted.
O_TEMPORARY: int = getattr(os, "O_TEMPORARY", 0)
O_BINARY: int = getattr(os, "O_BINARY", 0)
#: Signals for which programs install Python handlers, which may raise.
HANDLED_SIGNALS: tuple[int, ...] = tuple(
    getattr(signal, name)
    for name in (
        "SIGINT",
        "SIGTERM",
        "SIGALRM",
        "SIGHUP",
        "SIGUSR1",
        "SIGUSR2",
        "SIGQUIT",
    )
    if hasattr(signal, name)
)
#: Ends a process that does not cooperate.
SIGKILL: int = getattr(signal, "SIGKILL", signal.SIGTERM)
#: Makes a worker write its stacks; None where there is no such signal, or none can be sent or handled.
SIGUSR2: int | None = (
    getattr(signal, "SIGUSR2", None)
    if hasattr(faulthandler, "register") and hasattr(os, "kill")
    else None
)
_DEFAULT_SIGNALS = [
    getattr(signal, name) for name in ("SIGTERM", "SIGCHLD") if hasattr(signal, name)
]
# Of 1000: under memory pressure the kernel should kill a worker, not the learner.
_OOM_SCORE = "300"
LOG_LIMIT = 1 << 20  # bytes of a log before it is cut
_LOG_KEPT = 1 << 16  # bytes that are kept then
_BLOCKED = {number for number in (signal.SIGINT, SIGUSR2) if number is not None}
register_at_fork: Callable[..., None] = getattr(
    os, "register_at_fork", lambda **_: None
)
sched_yield = _sched_yield()
#: Reads bytes of a file: `(descriptor, number of bytes, offset)`.
pread: Callable[[int, int, int], bytes] = getattr(os, "pread", _seek_and_read)
#: Units of processor time in /proc, per second.
CLOCK_TICKS: int = getattr(os, "sysconf", lambda _: 100)("SC_CLK_TCK")
#: Returns the id of this process's user; None where users have no numbers.
user_id: Callable[[], int | None] = getattr(os, "getuid", lambda: None)


def cut_log(fd: int) -> None:
    """Drop all but the end of a large log: an env may print for days, also in one call.

    Its process calls this between calls, and its owner while it waits for one. Of what is printed meanwhile, up to
    `_LOG_KEPT` bytes may be lost.
    """
    with contextlib.suppress(OSError):  # it was closed
        size = os.fstat(fd).st_size
        if size > LOG_LIMIT:
            tail = pread(fd, _LOG_KEPT, size - _LOG_KEPT)
            os.ftruncate(fd, 0)
            # The process appends in any case.
            os.lseek(fd, 0, os.SEEK_SET)
            os.write(fd, tail)


def reserve(fd: int, nbytes: int) -> None:
    """Take the pages of a file in memory now, where that is possible.

    Raises:
        OSError: ENOSPC: there is not enough.
    """
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except AttributeError:
        return
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise


def usable_cpus() -> tuple[int, ...]:
    """Return the processors that this process may use."""
    with contextlib.suppress(AttributeError, OSError):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def visible_id() -> int:
    """Return the id of this process in /proc: in a new pid namespace, usually that outside of the namespace."""
    with contextlib.suppress(OSError):
        return int(os.readlink("/proc/self"))
    return os.getpid()


def parent_id() -> int:
    """Return the id of the process that started this one; 0 where that is unknown."""
    with contextlib.suppress(AttributeError, OSError):
        return os.getppid()
    return 0


def bytes_of_disk(folder: str) -> tuple[int | None, int | None]:
    """Return the size of a file system and what is free of it; None where that is unknown."""
    with contextlib.suppress(OSError, AttributeError):
        status = os.statvfs(folder)
        return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    return None, None


def open_descriptors() -> int:
    """Return how many files this process has open; 0 if unknown."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/fd"))
    return 0


def soft_limit(name: str) -> int | None:
    """Return a limit of this process, such as "NOFILE" of its open files; None without one, or if it is unknown."""
    with contextlib.suppress(AttributeError, OSError):
        limit: int = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
        if limit != resource.RLIM_INFINITY:
            return limit
    return None


def has_display() -> bool:
    """Return whether OpenGL finds a display by itself."""
    return not IS_LINUX or "DISPLAY" in os.environ


def detach(log_fd: int, *, is_captured: bool, is_leader: bool = True) -> None:
    """Cut a worker off from its parent's surroundings: the terminal, Ctrl-C, signals that it ignored, and its input.

    Args:
        log_fd: of the worker's log.
        is_captured: send the output there.
        is_leader: whether it has its own process group; else that of the command that started it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if is_leader:
        with contextlib.suppress(AttributeError, OSError):
            os.setpgid(0, 0)
    for number in _DEFAULT_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    # It is 0 itself if that was closed.
    if null:
        os.close(null)
    if is_captured:
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
    for name, text in (("oom_score_adj", _OOM_SCORE), ("comm", "envherd-worker")):
        with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal. Platforms: Linux.

    Raises:
        OSError: there is no such process.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    # A set of bits in hexadecimal, the lowest of which is for signal 1.
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (number - 1) & 1)


def send_signal(
    pid: int,
    number: int,
    *,
    is_group: bool = False,
    pidfd: int | None = None,
) -> None:
    """Send a signal to another process, or to a process group that this process is not in.

    The program sends every signal with this function: the system takes 0 for the caller's process group, and both -1
    and group 1 for all processes.

    Args:
        pid: of the process, or of the group.
        number: of the signal.
        is_group: send it to the group.
        pidfd: of the process, to send it by.

    Raises:
        ProcessLookupError: there is no such process or group, or `pid` is not that of another one.
        OSError: the system refuses it, or has no groups.
    """
    if (
        pid <= 1
        or pid == os.getpid()
        or (is_group and pid == getattr(os, "getpgrp", os.getpid)())
    ):
        raise ProcessLookupError(
            errno.ESRCH,
            f"a signal failed: expected the id of another process, got {pid}",
        )
    if pidfd is not None:
        signal.pidfd_send_signal(pidfd, number)
    elif not is_group:
        os.kill(pid, number)
    elif hasattr(os, "killpg"):
        os.killpg(pid, number)
    else:
        raise OSError(errno.ENOSYS, "this system has no process groups")


def kill_rest_of_group(pid: int) -> None:
    """Kill the processes that are left of the group of a worker which was reaped.

    A process with that id is another one, and shows that the group has ended: no new process gets the id of a group.

    Raises:
        OSError: there is none, or the system refuses it.
    """
    # Signal 0 reaches nobody, and only finds out whether the process exists.
    try:
        send_signal(pid, 0)
    except ProcessLookupError:
        send_signal(pid, SIGKILL, is_group=True)


def end_own_group() -> None:
    """Kill this process with its group, which is that of a worker; do nothing unless `detach` has made that group."""
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid() > 1:
        os.killpg(os.getpid(), SIGKILL)


def has_ended(popen: Any) -> bool:
    """Return whether a process that `multiprocessing` has started has ended; never blocks.

    Its `returncode` remains None if it was not reaped here: the kernel does that in a program that ignores SIGCHLD, and
    a program can do it in a handler. `multiprocessing` itself never notices such an end.
    """
    if not hasattr(os, "WNOHANG"):  # the handle of a process is the only source
        return popen.poll() is not None
    if popen.returncode is None:
        try:
            pid, status = os.waitpid(popen.pid, os.WNOHANG)
        except ChildProcessError:
            return True
        if not pid:
            return False
        popen.returncode = os.waitstatus_to_exitcode(status)
    return True


def open_standard_descriptors() -> None:
    """Open descriptors 0, 1 and 2 on the null device where they are closed, as in some daemons and shells (`>&-`).

    Otherwise the next socket or shared memory would get one of them. What a library then prints would go there, and a
    new process would take it for its input or output.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # Gets the lowest number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def arm_lifeline(fd: int, pid: int) -> None:
    """Ask the kernel to kill this process, or with its id negated its group, when the other end of a pipe is closed.

    A message through the pipe kills, too: without `SIGUSR2` the pipe carries the requests for stacks.

    Raises:
        OSError, AttributeError: this system cannot do so, or this process does not lead its group.
    """
    if not IS_LINUX or SIGUSR2 is None:
        raise OSError(errno.ENOSYS, "this system has no F_SETSIG")
    if pid not in (os.getpid(), -os.getpgrp()) or abs(pid) != os.getpid():
        raise ProcessLookupError(
            errno.ESRCH,
            f"a lifeline failed: expected the id of this process, got {pid}",
        )
    # The owner and the signal before O_ASYNC: what comes in between would send SIGIO, or a signal to nobody.
    fcntl.fcntl(fd, fcntl.F_SETOWN, pid)
    fcntl.fcntl(fd, F_SETSIG, SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)


def without_signals() -> Callable[[], object]:
    """Block Ctrl-C and SIGUSR2 in this thread and in processes that it starts; return the function that ends this."""
    with contextlib.suppress(AttributeError, OSError):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        return lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return lambda: None


def let_signals_in() -> None:
    """Undo `without_signals` in a process that was started meanwhile."""
    with contextlib.suppress(AttributeError, OSError):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)


def can_read(file: Any, timeout_ms: float = 0) -> bool:
    """Return whether a file or descriptor can be read, or its other end has closed; wait for that. Platforms: Linux."""
    poller = select.poll()
    poller.register(file, select.POLLIN)
    return bool(poller.poll(timeout_ms))


def listen_for_stack_requests(log_fd: int) -> None:
    """Make SIGUSR2 write the stacks of all threads to a log, also if it had another handler."""
    if SIGUSR2 is not None:
        faulthandler.unregister(SIGUSR2)
        faulthandler.register(SIGUSR2, file=log_fd, all_threads=True)


def request_stacks(pid: int) -> bool:
    """Make a process that listens for requests write its stacks; False where there is no such signal."""
    if SIGUSR2 is not None:
        send_signal(pid, SIGUSR2)
    return SIGUSR2 is not None


def waiter(sock: socket.socket) -> Callable[[float | None], object]:
    """Return a function that waits until a socket can be read, at most some seconds (None: without a limit)."""
    if not hasattr(select, "poll"):
        return lambda timeout_s: select.select([sock], [], [], timeout_s)
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return lambda timeout_s: poller.poll(
        None if timeout_s is None else -(-timeout_s * 1000 // 1)
    )


def _try_semaphore() -> None:
    _ = importlib.import_module("_multiprocessing").SemLock
    semaphore = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
    if libc.sem_init(semaphore, 1, 0):
        raise OSError(ctypes.get_errno(), "sem_init failed")


def _try_lifeline() -> None:
    read, write = os.pipe()
    try:
        fcntl.fcntl(read, F_SETSIG, SIGKILL)
        fcntl.fcntl(
            read,
            fcntl.F_SETFL,
            fcntl.fcntl(read, fcntl.F_GETFL) | os.O_NONBLOCK,
        )
    finally:
        os.close(read)
        os.close(write)


def _try_waitid() -> None:
    with contextlib.suppress(ChildProcessError):  # there is none
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def require(what: str, need: str = "") -> None:
    """Refuse something that needs a part of what Linux has, or all of it.

    Args:
        what: the operation.
        need: as `missing` names it; empty for all.

    Raises:
        ValueError: this system lacks it.
    """
    if lacks := [one for one in missing() if need in ("", one)]:
        text = f"{what} failed: expected Linux, got a system that lacks: {', '.join(lacks)}."
        # A ValueError and an OSError, which commands print.
        raise io.UnsupportedOperation(text)


#: What the pool of forked workers needs -> a function that raises if it is not there.
_NEEDS: dict[str, Callable[[], None]] = {
    "memfd_create": lambda: os.close(os.memfd_create("envherd-probe", os.MFD_CLOEXEC)),
    "pidfd_open": lambda: os.close(os.pidfd_open(os.getpid())),
    "process-shared semaphores": _try_semaphore,
    "F_SETSIG": _try_lifeline,
    "waitid": _try_waitid,
    "/proc": lambda: os.close(os.open("/proc/self/stat", os.O_RDONLY)),
}


#: The names that it needs; what these do cannot be tried without harm.
_NAMES: dict[Any, str] = {
    os: "fork kill setpgid killpg pread getsid getpriority set_blocking O_ASYNC O_CLOEXEC O_NOCTTY O_NONBLOCK",
    signal: "SIGKILL SIGUSR2 SIGCHLD pidfd_send_signal set_wakeup_fd",
    select: "poll",
    socket: "AF_UNIX SCM_RIGHTS MSG_DONTWAIT MSG_NOSIGNAL recv_fds",
    fcntl: "F_SETOWN F_DUPFD_CLOEXEC F_ADD_SEALS F_SEAL_SHRINK F_SEAL_GROW F_SEAL_SEAL",
    mmap: "MAP_SHARED MAP_PRIVATE PROT_READ PROT_WRITE",
    faulthandler: "register",
    termios: "TIOCNOTTY",
    libc: "mmap munmap sem_init",
}


@functools.cache
def missing() -> tuple[str, ...]:
    """Return what the pool of forked workers needs and this system lacks or refuses; empty if it has everything.

    Raises:
        OSError: EMFILE: this process has no descriptor left to try it.
    """
    if not IS_LINUX:
        return tuple(_NEEDS)
    lacking = []
    for name, attempt in _NEEDS.items():
        try:
            attempt()
        except (AttributeError, OSError) as error:
            # Nothing is cached: the system has it once this process closes files.
            if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
                raise OSError(
                    errno.EMFILE,
                    f"trying {name} failed: too many open files. Raise the limit (ulimit -n), or close some",
                ) from error
            lacking.append(name)
    for module, names in _NAMES.items():
        lacking += [name for name in names.split() if not hasattr(module, name)]
    return tuple(lacking)
