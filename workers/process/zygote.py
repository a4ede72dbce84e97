"""The zygote: a small process that imports the envs' packages, forks workers and reaps them.

The owner execs it (never forks it), so it holds none of the owner's memory, threads, locks or descriptors. Executors
share it, as `executor.start.zygote` decides; without any, it may wait for the next one. It has one thread, imports
the modules of its request, freezes the garbage collector (so that the pages of those modules stay shared) and forks a
worker for every request. If an import has started threads, forking would be unsafe: then it executes a fresh
interpreter for each worker, and reports this in its first answer. The background thread of jemalloc (pyarrow, which
RLlib imports) does not count: jemalloc expects forks, and a child does without the thread.

Guarantees: when the owner is gone, however it ended, the zygote kills the process group of every remaining worker (with
the processes that their envs had started) and exits. Ctrl-C does not reach it, and a terminal cannot stop it or its
workers: they stay in the owner's session, in process groups that are never in the foreground, and have no terminal.
(With a separate session and /proc/sys/kernel/sched_autogroup_enabled at 1, they would also be a separate scheduling
group, and an owner that yields while it waits would not yield to its workers: 8 CartPoles on two workers took 272 us a
batch in that case and 153 in the same session, 23 Nov 2026.)
Talks over one socket as workers do (`workers.messages`): requests and plain answers, which repeat the request's number.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from envherd.shm.platforms import (
    arm_lifeline,
    can_read,
    fcntl,
    send_signal,
    termios,
)
from envherd.workers.current import MARK, mark_of
from envherd.workers.messages import WorkerChannel
from envherd.workers.sending import surroundings

_LONGEST_REASON = 1000  # characters
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_ORPHANS_S = 1.0  # to kill what envs had started in separate sessions


def main(fd: int, log_fd: int) -> None:
    """Serve the owner at the other end of the socket `fd` until it is gone; SIGUSR2 writes stacks to `log_fd`."""
    faulthandler.register(signal.SIGUSR2, file=log_fd, all_threads=True)
    os.set_inheritable(log_fd, False)
    channel = WorkerChannel(socket.socket(fileno=fd))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _leave_terminal()
    # To kill and reap the orphans of dead workers.
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("envherd-helper")  # what `ps` and `top` show
    try:
        start, _ = channel.receive_message()
    except (EOFError, ConnectionError):
        return
    surroundings.enter(start["caller"])
    # Before the imports: a file that changes meanwhile makes this process too old for the next executor.
    began_ns = time.time_ns()
    environ = dict(os.environ)
    with _ended_with_owner(channel.sock):
        failed = _preload(start["preload"])
    gc.enable()
    num_threads = _num_threads()
    # Only before the first fork do all workers share the pages of what was imported.
    gc.collect()
    gc.freeze()
    answer = {
        "failed": failed,
        "num_threads": num_threads,
        "cpu_s": time.process_time(),
        # What imports have set: an executor that has set the same may use this process as well.
        "environ": {
            name: value
            for name, value in os.environ.items()
            if environ.get(name) != value
        },
    }
    _answer(channel, answer)
    Zygote(
        channel,
        log_fd,
        began_ns,
        must_exec=start["must_exec"] or num_threads > 1,
    ).serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the interpreter's own end takes long with torch


def _num_threads() -> int:
    """Return the number of threads, without the one that is prepared for a fork."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            names.append(Path(f"/proc/self/task/{task}/comm").read_text())
    return len(names) - names.count("jemalloc_bg_thd\n")


def _leave_terminal() -> None:
    """Give up the controlling terminal, as a new session would: it may stop background processes that write to it."""
    with contextlib.suppress(OSError):
        fd = os.open(
            "/dev/tty",
            os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC,
        )
        try:
            fcntl.ioctl(fd, termios.TIOCNOTTY)
        finally:
            os.close(fd)


@contextlib.contextmanager
def _ended_with_owner(sock: socket.socket) -> Iterator[None]:
    """Make the kernel kill this process if the owner ends during the imports, when nothing reads the socket."""
    fd = sock.fileno()
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    arm_lifeline(fd, os.getpid())
    if can_read(sock):  # the owner ended earlier
        os._exit(1)
    yield
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def _preload(names: list[str]) -> dict[str, str]:
    from envherd.workers.adapters.registry import install_import_hooks
    from envherd.workers.process import entry  # noqa: F401  # so that workers share it

    install_import_hooks()
    failed = {}
    for name in names:
        try:
            importlib.import_module(name)
        # Anything: the factory that needs the module will report why it cannot be imported.
        except BaseException as error:
            failed[name] = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
    return failed


def flags() -> list[str]:
    """Return the command-line flags of this interpreter, for another one."""
    return subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001  # as `multiprocessing` does


def in_file(payload: bytes) -> BinaryIO:
    """Return a new anonymous file of these bytes, at its beginning."""
    file = open(os.memfd_create("envherd-request"), "w+b")  # noqa: SIM115  # the caller closes it
    file.write(payload)
    file.seek(0)
    return file


def _answer(channel: WorkerChannel, answer: dict[str, Any]) -> None:
    """Answer the latest request; the answer repeats the request's number."""
    channel.send_plain({"number": channel.number, **answer})


class Zygote:
    """Forks workers, records their exit codes, and kills remaining processes at the end."""

    def __init__(
        self,
        channel: WorkerChannel,
        log_fd: int,
        began_ns: int,
        *,
        must_exec: bool,
    ) -> None:
        self._channel = channel
        self._log_fd = log_fd
        self._began_ns = began_ns  # of the imports
        self._files = _files_of_modules()
        self._of_imports = set(_children())
        # Monotonic seconds; unless a request comes before.
        self._ends_at: float | None = None
        self._must_exec = must_exec
        self._statuses: dict[int, int] = {}
        self._alive: set[int] = set()
        # Inode -> pid, also of those that have ended since the last sweep.
        self._worker_of_log: dict[int, int] = {}
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def serve(self) -> None:
        """Answer requests until the owner is gone."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        poller = select.poll()
        poller.register(self._channel.sock, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        try:
            while True:
                timeout_ms = None
                if self._ends_at is not None:
                    timeout_ms = max(0.0, self._ends_at - time.monotonic()) * 1000
                is_over = not poller.poll(timeout_ms)
                self._reap()
                if is_over:
                    return
                while self._channel.has_received or can_read(self._channel.sock):
                    self._answer_one()
        except (EOFError, ConnectionError):
            return
        finally:
            self._kill_all()

    def _answer_one(self) -> None:
        """Answer the next request.

        Raises:
            EOFError, ConnectionError: the owner is gone.
        """
        request, fds = self._channel.receive_message()
        self._ends_at = None
        answer: dict[str, Any] = {}
        if request["op"] == "fork":
            try:
                answer["pid"] = self._fork(request["config"], *fds)
            # A limit on processes or memory: only this worker fails.
            except OSError as error:
                answer["error"] = f"fork: {error}"
        elif request["op"] == "adopt":
            answer["is_child"] = self._adopt(request["pid"], request["log"])
        elif request["op"] == "sweep":
            self._sweep(self._is_of_the_dead)
            # No other executor has joined meanwhile.
            if request["idle_s"] is not None and not self._alive:
                self._ends_at = time.monotonic() + request["idle_s"]
        elif request["op"] == "resume":
            answer["is_current"] = not self._has_changed()
        else:
            self._reap()
            answer["status"] = self._statuses.get(request["pid"])
        _answer(self._channel, answer)

    def _fork(
        self,
        config: dict[str, Any],
        sock_fd: int,
        lifeline_fd: int,
        log_fd: int,
    ) -> int:
        log = os.fstat(log_fd).st_ino
        try:
            pid = os.fork()
            if pid == 0:
                self._become_worker(config, sock_fd, lifeline_fd, log_fd)
        finally:
            for fd in (sock_fd, lifeline_fd, log_fd):
                os.close(fd)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # the worker does so too; the first of both has effect
        self._alive.add(pid)
        self._statuses.pop(pid, None)  # of an earlier worker with this id
        self._worker_of_log[log] = pid
        return pid

    def _adopt(self, pid: int, log: int) -> bool:
        """Treat a worker's copy, which the kernel has made a child of this process, as a worker."""
        if pid not in _children():
            return False
        self._alive.add(pid)
        self._statuses.pop(pid, None)
        self._worker_of_log[log] = pid
        return True

    def _become_worker(
        self,
        config: dict[str, Any],
        sock_fd: int,
        lifeline_fd: int,
        log_fd: int,
    ) -> None:
        try:
            signal.set_wakeup_fd(-1)
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._channel.close()
            # The handler of SIGUSR2 writes to that descriptor, which becomes the worker's own log.
            os.dup2(log_fd, self._log_fd, inheritable=False)
            python = config.get("python")
            if self._must_exec or python:
                surroundings.enter_before_exec(config["caller"])
                # A program that has just been executed has no handler yet, and the signal would end it.
                signal.signal(signal.SIGUSR2, signal.SIG_IGN)
                file = in_file(json.dumps(config).encode())
                # Before `entry` does so, because imports print as well.
                if config.get("output") == "capture":
                    os.dup2(log_fd, 1)
                    os.dup2(log_fd, 2)
                fds = [sock_fd, lifeline_fd, log_fd, file.fileno()]
                for fd in fds:
                    os.set_inheritable(fd, True)
                command = [sys.executable, *flags()]
                if python:
                    # Before a command in front of the interpreter forks: the owner ends all its processes by the group.
                    os.setpgid(0, 0)
                    command = python["command"]
                os.execv(command[0], [*command, "-c", _EXEC, *map(str, fds)])
            from envherd.workers.process import entry

            entry.main(sock_fd, lifeline_fd, log_fd, config)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(1)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass
        with contextlib.suppress(ChildProcessError):
            while (
                ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            ) is not None:
                pid = ended.si_pid
                if pid in self._alive:
                    with contextlib.suppress(OSError):
                        # The envs' processes, before `waitpid` frees the id of the group for others.
                        send_signal(pid, signal.SIGKILL, is_group=True)
                status = os.waitpid(pid, 0)[1]
                if pid in self._alive:
                    self._alive.discard(pid)
                    self._statuses[pid] = os.waitstatus_to_exitcode(status)

    def _kill_all(self) -> None:
        """Kill the workers with their process groups, then processes outside these, which this process adopts."""
        for pid in self._alive:
            with contextlib.suppress(OSError):
                send_signal(pid, signal.SIGKILL, is_group=True)
        self._alive.clear()
        self._sweep(lambda _: True)

    def _sweep(self, is_left: Callable[[int], bool]) -> None:
        """Kill remaining adopted processes, and wait for their end."""
        end = time.monotonic() + _ORPHANS_S
        killed: set[int] = set()
        self._reap()
        while time.monotonic() < end:
            adopted = set(_children()) - self._alive
            killed = {pid for pid in adopted if pid in killed or is_left(pid)}
            if not killed:
                self._worker_of_log = {
                    log: pid
                    for log, pid in self._worker_of_log.items()
                    if pid in self._alive
                }
                return
            for pid in killed:
                with contextlib.suppress(OSError):
                    send_signal(pid, signal.SIGKILL)
            time.sleep(0.001)
            self._reap()

    def _has_changed(self) -> bool:
        """Return whether the file of an imported module was written or removed since the imports began."""
        try:
            return any(
                os.stat(file).st_ctime_ns >= self._began_ns for file in self._files
            )
        except OSError:
            return True

    def _is_of_the_dead(self, pid: int) -> bool:
        """Return whether an ended worker's envs have started a process; False if that is unknown."""
        if not self._alive:
            return pid not in self._of_imports
        with contextlib.suppress(OSError):  # the process has ended
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            own = f"{MARK}={mark_of(os.getpid(), '')}".encode()
            workers = {
                int(variable[len(own) :])
                for variable in variables
                if variable.startswith(own)
            }
            # It has executed no other program, so it has the worker's descriptors.
            if not workers:
                inodes = {
                    os.stat(file).st_ino for file in Path(f"/proc/{pid}/fd").iterdir()
                }
                workers = {
                    worker
                    for inode, worker in self._worker_of_log.items()
                    if inode in inodes
                }
            return bool(workers) and workers.isdisjoint(self._alive)
        return False


def _files_of_modules() -> list[str]:
    """Return the files of all modules; some modules name a file that does not exist."""
    named = {
        getattr(module, "__dict__", {}).get("__file__")
        for module in list(sys.modules.values())
    }
    return [file for file in named if isinstance(file, str) and os.path.exists(file)]


def _children() -> list[int]:
    """Return the pids of this process's children, adopted ones too."""
    with contextlib.suppress(OSError):
        return [
            int(pid)
            for pid in Path(f"/proc/self/task/{os.getpid()}/children")
            .read_text()
            .split()
        ]
    return []


#: Without the current folder in the path, as the helper's own first lines. Another interpreter gets this package alone
#: from here.
_EXEC = """
import sys
sys.path[:] = filter(None, sys.path)
import importlib.util, json
*fds, config_fd = map(int, sys.argv[1:])
with open(config_fd) as file:
    config = json.load(file)
python = config.get("python")
if python is None:
    sys.path[:] = config["caller"]["path"]
else:
    sys.path += python["path"]
    package = python["package"]
    spec = importlib.util.spec_from_file_location(
        "envherd", package + "/__init__.py", submodule_search_locations=[package]
    )
    sys.modules["envherd"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["envherd"])
    from envherd.workers.guests import interpreters
    interpreters.enter(python["executable"])
from envherd.workers.process.entry import main
main(*fds, config)
"""
