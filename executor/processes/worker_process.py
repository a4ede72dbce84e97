"""Worker processes: how they start, how they are watched, how they end.

Guarantee: a worker and its envs' processes end with this process, however it ends (`workers.process.entry` has how).
Assumes: Linux (pidfd, memfd, /proc).
"""

import contextlib
import math
import os
import select
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any, Literal

import psutil

from envherd.executor.machine.machine import count_oom_kills
from envherd.executor.options import ExecutorOptions
from envherd.executor.start.zygote import (
    Helper,
    read_log,
    request_stacks,
    without_own_frames,
)
from envherd.shm import platforms
from envherd.shm.interrupts import (
    close_descriptors,
    ignoring_refusals,
    uninterrupted,
)
from envherd.workers.current import WorkerInfo
from envherd.workers.errors import WorkerLost
from envherd.workers.messages import Channel

_LAST_LINES = 60
#: A shell, and programs such as bwrap, end with this and the number of the signal that has ended what they ran.
_AFTER_A_SIGNAL = 128


class WorkerProcess:
    """One worker process, seen from its owner.

    Args:
        info: its ids, as its pool counts them.
        on_row_frame: called with each of its messages that belong to rows.
        zygote: its parent; None if this process is.

    Attributes:
        info: as given.
        worker_id: stays the same when the worker is replaced.
        generation: 0 for the first process of that id, then 1, ...
        pid: its process id and process group; 0 before its start.
        channel: the parent's end of its socket.
        gpu: that it was given, as `CUDA_VISIBLE_DEVICES` names it; None if it was given none.
        root_seed: with which it builds its envs; -1 before its start, which is no seed.
        is_attached: whether it has the slab, and reads mail.
        wake: makes it look for mail; does nothing until it has the slab.
        on_row_frame: as given.
    """

    gpu: str | None = None
    root_seed = -1
    is_attached = False
    wake: Callable[[], None] = staticmethod(lambda: None)
    pid = 0
    pidfd = log_fd = -1

    def __init__(
        self,
        info: WorkerInfo,
        on_row_frame: Callable[[dict[str, Any]], None],
        zygote: Helper | None = None,
    ) -> None:
        self.info = info
        self.on_row_frame = on_row_frame
        self.worker_id = info.worker_id
        self.generation = info.generation
        self._zygote = zygote
        self._exit_code: int | None = None
        self._own_kills, self._all_kills = count_oom_kills()
        ours, self._theirs = socket.socketpair()
        self.channel = Channel(ours)

    def open_log(self) -> None:
        """Open the worker's log; from then on `release` must be called, also after an error or an interrupt."""
        with uninterrupted():
            self._open_log()
            self._log_stat = os.fstat(self.log_fd)

    def _open_log(self) -> None:
        self.log_fd = os.memfd_create(f"envherd-log-{self.worker_id}", os.MFD_CLOEXEC)

    def start(self, fork: Callable[[int, int], int]) -> None:
        """Start the process, whose log is open; after an error it must be released.

        Args:
            fork: takes the worker's descriptors of its socket and of its log, and returns its pid.

        Raises:
            WorkerLost: the process has ended already.
        """
        with (
            self._theirs,
            open(f"/proc/self/fd/{self.log_fd}", "a+b", buffering=0) as log,
        ):
            pid = fork(self._theirs.fileno(), log.fileno())
            try:
                self.pidfd = os.pidfd_open(pid)
            # It has ended, and the helper has reaped it.
            except ProcessLookupError:
                message = f"starting worker {self.worker_id} failed: its process (pid {pid}) ended at once."
                raise WorkerLost(
                    message,
                    remote_traceback=self.log() or None,
                    pid=pid,
                ) from None
            self.pid = pid

    def has_exited(self) -> bool:
        """Return whether the process has ended; never blocks."""
        return self.wait_exit(0.0)

    def is_alive(self) -> bool:
        """Return whether the process runs, under the name that `multiprocessing` gives this question."""
        return not self.has_exited()

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal; None if the process lives or its exit code is unknown."""
        if self._exit_code is None and self._zygote is not None:
            self._exit_code = self._zygote.exit_code(self.pid)
        return self._exit_code

    def exit_description(self) -> str:
        """Return how the process ended, for messages."""
        return describe_exit(self.exit_code())

    def killed_for_memory(self) -> Literal["group", "machine", "nobody", "unknown"]:
        """Return where the kernel has killed processes for lack of memory since this process started.

        Returns:
            "group": a process of this one's control group, for that group's limit. "machine": some process.
        """
        own, everywhere = count_oom_kills()
        if own > self._own_kills:
            return "group"
        if everywhere is None or self._all_kills is None:
            return "unknown"
        return "machine" if everywhere > self._all_kills else "nobody"

    def last_lines(self, count: int = _LAST_LINES) -> str:
        """Return the last lines of the worker's output, without frames of this package."""
        return "\n".join(without_own_frames(self.log()).splitlines()[-count:])

    def log(self) -> str:
        """Return the kept part of the worker's output; empty if another thread releases it meanwhile."""
        with ignoring_refusals():
            return read_log(self.log_fd)
        return ""

    def cut_log(self) -> None:
        """Drop all but the end of a large log; see `platforms.cut_log`."""
        with ignoring_refusals():
            if os.fstat(self.log_fd).st_size <= platforms.LOG_LIMIT:
                return
            # Another thread may close the descriptor, whose number another file then gets.
            log = os.dup(self.log_fd)
            try:
                if os.path.samestat(os.fstat(log), self._log_stat):
                    platforms.cut_log(log)
            finally:
                os.close(log)

    def stack(self) -> str:
        """Return the present Python stacks of the worker's threads, also if it is stuck in C."""
        with ignoring_refusals():
            return request_stacks(self.log_fd, self._request_stacks)
        return "(the worker has gone)"

    def _request_stacks(self) -> None:
        if platforms.catches(self.pid, signal.SIGUSR2):
            platforms.send_signal(self.pid, signal.SIGUSR2, pidfd=self.pidfd)
            return
        # A command in front of the interpreter has started it as another process.
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            for child in psutil.Process(self.pid).children(recursive=True):
                if platforms.catches(child.pid, signal.SIGUSR2):
                    platforms.send_signal(child.pid, signal.SIGUSR2)
                    return

    def kill(self) -> None:
        """Kill the worker and its envs' processes; safe if it is dead."""
        with ignoring_refusals():
            # Its id may be another's once it was reaped.
            if not self.has_exited():
                platforms.send_signal(self.pid, signal.SIGKILL, is_group=True)

    @staticmethod
    def wait_for_any(
        workers: "Sequence[WorkerProcess]",
        timeout_s: float = math.inf,
    ) -> bool:
        """Wait until a worker has written, has ended, or can be sent the rest of a message; False after `timeout_s`."""
        poller = select.poll()
        for worker in workers:
            poller.register(worker.pidfd, select.POLLIN)
            poller.register(worker.channel.sock, select.POLLIN)
            if worker.channel.has_unsent:
                poller.modify(worker.channel.sock, select.POLLIN | select.POLLOUT)
        if timeout_s == math.inf:
            return bool(poller.poll())
        return bool(poller.poll(max(0.0, timeout_s) * 1000 + 1))

    def wait_exit(self, timeout_s: float) -> bool:
        """Wait for the process to end, up to `timeout_s`; return whether it has."""
        if self.pidfd < 0:
            return True
        return platforms.can_read(self.pidfd, max(0, int(timeout_s * 1000)))

    def release(self) -> None:
        """Close this process's descriptors of it. Idempotent."""
        # It keeps its place if no successor can be started, and must get no mail then.
        self.is_attached = False
        self.channel.close()
        self._theirs.close()
        close_descriptors(self, "pidfd", "log_fd")


def describe_exit(code: int | None) -> str:
    """Return `SIGKILL(-9)`, `exit code 3`, ... for messages."""
    if code is None:
        return "an unknown cause"
    if code - _AFTER_A_SIGNAL in signal.valid_signals():
        return f"exit code {code}, which stands for {describe_exit(_AFTER_A_SIGNAL - code)}"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"{signal.Signals(-code).name}({code})"
    except ValueError:
        return f"signal {-code}"


def worker_config(options: ExecutorOptions, worker_id: int) -> dict[str, Any]:
    """Return the settings that a worker process needs before its first message."""
    affinity = None
    if options.affinity:
        affinity = [options.affinity[worker_id % len(options.affinity)]]
    return {"output": options.worker_output, "affinity": affinity}
