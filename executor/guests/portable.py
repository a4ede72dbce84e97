"""The pool for every platform: workers that `multiprocessing` spawns, named shared memory, and sockets.

It differs from `WorkerPool` in how a worker is started and ended, in what memory is shared, and in how processes wake
each other. Rows, commands, messages and losses are the same code.

Guarantees: the data are those of the other pools. Workers end with this process (see
`workers.guests.portable.entry`), and the resource tracker of `multiprocessing` removes shared memory whose owner was
killed. The caller's script is not run again in the workers, so it needs no main guard.
"""

import contextlib
import functools
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import (
    connection,
    popen_spawn_posix,  # noqa: F401  # before a limit or a deleted folder prevents its import at the first start
    process,
    resource_tracker,  # noqa: F401  # likewise
    spawn,
)
from typing import Any

import numpy as np
import psutil

from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.worker_pool import WorkerPool
from envherd.executor.processes.crew import Crew
from envherd.executor.processes.error_messages import log
from envherd.executor.processes.worker_process import WorkerProcess
from envherd.executor.sending.blueprint import Blueprint
from envherd.shm import platforms
from envherd.shm.interrupts import ignoring_refusals, uninterrupted
from envherd.shm.segment import Segment
from envherd.shm.sync import Bell
from envherd.workers.guests.portable.entry import SocketBell, main
from envherd.workers.sending import surroundings
from envherd.workers.sending.importing import refuse_at_import

_CONTEXT = multiprocessing.get_context("spawn")
_NAME = "envherd-worker"
# Between attempts to send the rest of a message, and looks whether a killed process has ended.
_SOON_S = 0.001
# Between looks whether a process has ended, if one that it has started keeps its descriptors open.
_LOOK_S = 0.3
#: Held while `multiprocessing` prepares a start, while pipes are created that a fork must close, and by every fork: a
#: child could never acquire it otherwise.
_start_lock = threading.RLock()
_processes: "weakref.WeakSet[PortableProcess]" = weakref.WeakSet()


def _let_go_in_fork() -> None:
    """Close the copies of the pipes that end workers with this process, so that these still work."""
    _start_lock.release()
    for worker in list(_processes):
        worker.let_go()


platforms.register_at_fork(
    before=_start_lock.acquire,
    after_in_parent=_start_lock.release,
    after_in_child=_let_go_in_fork,
)


@functools.cache
def _log_lack(lacks: tuple[str, ...]) -> None:
    log.warning(
        "workers run in the portable pool, because this system lacks: %s",
        ", ".join(lacks),
    )


def _refuse(blueprint: Blueprint, options: ExecutorOptions) -> None:
    """Raise ValueError for options that need forked workers, or calls that this system lacks."""
    refused = {
        "affinity": options.affinity is not None
        and not hasattr(os, "sched_setaffinity"),
        "max_worker_memory": options.max_worker_memory is not None
        and "/proc" in platforms.missing(),
        "InPython": any(blueprint.interpreters),
    }
    for name, is_set in refused.items():
        if is_set:
            raise ValueError(
                f"ExecutorOptions failed: expected no {name} in the portable pool, got it. Use Linux and the start "
                f"method 'zygote' or 'spawn' for it."
            )


def _prepare(prepare: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
    """Return `multiprocessing`'s preparation of a process; for a worker without the caller's script and folder.

    A worker finds its folder in its settings. The caller's may have been deleted.
    """
    if not name.startswith(_NAME):
        return prepare(name)
    return {
        "name": name,
        "authkey": process.current_process().authkey,
        "sys_path": surroundings.import_path(),
        "sys_argv": sys.argv,
        "start_method": multiprocessing.get_start_method(allow_none=True),
        "orig_dir": process.ORIGINAL_DIR,  # type: ignore[attr-defined]
    }


def _launch(one: Any) -> Any:
    """Start a process that does not run the caller's script, and return its Popen; Ctrl-C does not reach it meanwhile.

    `multiprocessing` itself does not know of it, so the handler that it runs at the exit of a program, or of a fork of
    the program, does not end the process. A daemon of `multiprocessing` may start it.
    """
    with _start_lock, uninterrupted(), contextlib.ExitStack() as stack:
        prepare = spawn.get_preparation_data
        stack.callback(setattr, spawn, "get_preparation_data", prepare)
        # One line: a failure between the two parts would leave Ctrl-C blocked for good.
        stack.callback(platforms.without_signals())
        spawn.get_preparation_data = functools.partial(_prepare, prepare)
        return one._Popen(one)  # noqa: SLF001


class PortableProcess(WorkerProcess):
    """A spawned worker process, seen from its owner; see `WorkerProcess`.

    Args:
        *given: as of a `WorkerProcess`.

    Attributes:
        sentinel: for `multiprocessing.connection.wait`: ready when the process has ended.
    """

    _popen: Any = None
    _has_ended = False
    _log_path: str | None = None
    sentinel = -1

    def __init__(self, *given: Any) -> None:
        # A fork in between would have the pipe, and not find it among those that it closes.
        with _start_lock:
            self._watched, self._watch = _CONTEXT.Pipe(duplex=False)
            _processes.add(self)
        super().__init__(*given)

    def let_go(self) -> None:
        """Close the end of the pipe whose close ends the worker. Idempotent."""
        self._watch.close()

    def spawn(
        self,
        config: dict[str, Any],
        go: SocketBell,
        done: SocketBell,
    ) -> None:
        """Start the process; after an error it must be killed and released.

        Args:
            config: see `worker_config`.
            go: the doorbell of the worker.
            done: the caller's.
        """
        self._popen = _launch(
            _CONTEXT.Process(
                target=main,
                args=(
                    self._theirs,
                    (go.reader, done.writer),
                    self._watched,
                    self._log_path,
                    config,
                ),
                name=f"{_NAME}-{self.worker_id}",
                daemon=False,
            )
        )
        self.pid = self._popen.pid
        self.sentinel = self._popen.sentinel
        self._theirs.close()
        self._watched.close()

    def _open_log(self) -> None:
        self.log_fd, self._log_path = tempfile.mkstemp(prefix="envherd-log-")
        if platforms.O_TEMPORARY:
            os.close(vars(self).pop("log_fd"))
            self.log_fd = os.open(
                self._log_path,
                os.O_RDWR | platforms.O_TEMPORARY | platforms.O_BINARY,
            )

    def has_exited(self) -> bool:
        """Return whether the process has ended; never blocks."""
        if self._popen is None:
            return True
        with uninterrupted():  # the system reports an end once
            if not self._has_ended and platforms.has_ended(self._popen):
                self._has_ended = True
                with ignoring_refusals():
                    # What its envs had started.
                    platforms.kill_rest_of_group(self._popen.pid)
        return self._has_ended

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal; None if the process lives or its exit code is unknown."""
        if self._popen is None or not self.has_exited():
            return None
        return self._popen.returncode

    def exit_description(self) -> str:
        if self.has_exited() and self.exit_code() is None:
            return "an unknown exit code, because this program ignores SIGCHLD or reaps its children,"
        path = self._log_path
        # A worker removes the file before all else. Windows keeps it as long as it is open here.
        if path is None or platforms.O_TEMPORARY or not os.path.exists(path):
            return super().exit_description()
        program = os.fsdecode(spawn.get_executable())
        return f"{super().exit_description()} before it ran code of envherd (the interpreter is {program!r})"

    def _request_stacks(self) -> None:
        if not platforms.request_stacks(self.pid):
            self._watch.send_bytes(b"\1")

    def kill(self) -> None:
        """Kill the worker and its envs' processes; safe if it is dead."""
        if self.has_exited():
            return
        pid = self._popen.pid
        # EMFILE: its envs' processes end with its group.
        with contextlib.suppress(psutil.Error), ignoring_refusals():
            for child in psutil.Process(pid).children(recursive=True):
                with ignoring_refusals():
                    platforms.send_signal(child.pid, platforms.SIGKILL)
        for is_group in (True, False):  # it has no group before its code begins
            with ignoring_refusals():
                platforms.send_signal(pid, platforms.SIGKILL, is_group=is_group)
        self.let_go()  # ends it where signals are refused

    def wait_exit(self, timeout_s: float) -> bool:
        """Wait for the process to end, up to `timeout_s`; return whether it has."""
        end = time.monotonic() + timeout_s
        while not self.has_exited() and time.monotonic() < end:
            # The sentinel is no help: its envs' processes and envs that close descriptors have it.
            time.sleep(_SOON_S)
        return self.has_exited()

    @staticmethod
    def wait_for_any(
        workers: Sequence[WorkerProcess],
        timeout_s: float | None = None,
    ) -> bool:
        """Wait until a worker has written, has ended, or can be sent the rest of a message; False after `timeout_s`."""
        ready: list[Any] = [worker.channel.sock for worker in workers]
        ready += [
            worker.sentinel for worker in workers if isinstance(worker, PortableProcess)
        ]
        most_s = (
            _SOON_S if any(worker.channel.has_unsent for worker in workers) else _LOOK_S
        )
        if timeout_s is None or timeout_s > most_s:
            connection.wait(ready, most_s)
            return True
        return bool(connection.wait(ready, max(0.0, timeout_s)))

    def release(self) -> None:
        """Close this process's descriptors of it, and reap it if it was killed. Idempotent."""
        super().release()
        self.let_go()
        self._watched.close()
        if self._popen is not None:
            self.wait_exit(1.0)  # it was killed, or has ended
            self._popen.close()
        if self._log_path is not None:
            with ignoring_refusals():  # the worker has removed it, or the system
                os.unlink(self._log_path)
            self._log_path = None


class PortableCrew(Crew):
    """The workers of a `PortablePool`, see `Crew`.

    Attributes:
        go: doorbells of the workers.
        done: the caller's.
    """

    _process_type = PortableProcess

    def __init__(
        self,
        blueprint: Blueprint,
        options: ExecutorOptions,
        on_row_frame: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__(blueprint, options, on_row_frame)
        platforms.open_standard_descriptors()
        with uninterrupted():
            self.go = [SocketBell.create() for _ in blueprint.blocks]
            self.done = SocketBell.create()

    def _get_helper(self) -> None:
        """Refuse to start workers while the program is imported again."""
        refuse_at_import()

    def _start_process(self, worker: WorkerProcess, config: dict[str, Any]) -> None:
        assert isinstance(worker, PortableProcess)
        worker.spawn(config, self.go[worker.worker_id], self.done)

    def _end(self) -> None:
        super()._end()
        for bell in (*self.go, self.done):
            bell.close()


class PortablePool(WorkerPool):
    """Worker processes on any platform; see the module and `WorkerPool`.

    Raises:
        ValueError: the options need what it does not have.
    """

    _create_segment = staticmethod(Segment.create_with_name)
    _lends = _in_c = can_fork = False

    crew: PortableCrew

    def __init__(self, blueprint: Blueprint, options: ExecutorOptions) -> None:
        if options.start_method != "portable":
            _log_lack(platforms.missing())
        _refuse(blueprint, options)
        super().__init__(blueprint, options)

    def _make_crew(self) -> Crew:
        self.why_python = ["the pool is portable"]
        return PortableCrew(self.blueprint, self.options, self.outcome.take)

    def _make_bells(self, buffer: np.ndarray) -> tuple[Sequence[Bell], Bell]:  # noqa: ARG002  # they are not in it
        return self.crew.go, self.crew.done
