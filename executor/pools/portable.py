"""The pool for every platform: workers that `multiprocessing` spawns, named shared memory, and sockets.

It differs from `WorkerPool` in how a worker is started and ended, in what memory is shared, and in how processes wake
each other. Rows, commands, messages and losses are the same code.

Guarantees: the data are those of the other pools. Workers end with this process (see `workers.process.portable`), and
the resource tracker of `multiprocessing` removes shared memory whose owner was killed. The caller's script is not run
again in the workers, so it needs no main guard.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection, process, spawn
from typing import Any

import numpy as np
import psutil

from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.ahead_pool import AheadPool
from envherd.executor.pools.crew import Blueprint, Crew
from envherd.executor.pools.error_messages import log
from envherd.executor.pools.worker_pool import WorkerPool
from envherd.executor.pools.worker_process import WorkerProcess
from envherd.shm import platforms
from envherd.shm.interrupts import ignoring_refusals, uninterrupted
from envherd.shm.segment import Segment
from envherd.shm.socket_bells import Bell, SocketBell
from envherd.workers.errors import WorkerLost
from envherd.workers.importing import refuse_at_import
from envherd.workers.process.portable import main

_NAME = "envherd-worker"
_SOON_S = 0.001  # between attempts to send the rest of a message, and looks whether a process has ended
#: Held while `multiprocessing` prepares a start.
_start_lock = threading.Lock()


def make_pool(blueprint: Blueprint, options: ExecutorOptions) -> WorkerPool:
    """Return the pool for a start method on this system.

    Raises:
        ValueError: the options need what the portable pool does not have.
    """
    if not is_portable(options):
        return AheadPool(blueprint, options) if options.reset_ahead else WorkerPool(blueprint, options)
    if options.start_method != "portable":
        _log_lack(platforms.missing())
    _refuse(blueprint, options)
    return PortablePool(blueprint, options)


def is_portable(options: ExecutorOptions) -> bool:
    """Return whether the portable pool runs the workers on this system."""
    return options.start_method == "portable" or bool(platforms.missing())


@functools.cache
def _log_lack(lacks: tuple[str, ...]) -> None:
    log.warning("workers run in the portable pool, because this system lacks: %s", ", ".join(lacks))


def _refuse(blueprint: Blueprint, options: ExecutorOptions) -> None:
    """Raise ValueError for options that need forked workers, or calls that this system lacks."""
    refused = {
        "reset_ahead=True": options.reset_ahead,
        "affinity": options.affinity is not None and not platforms.can_pin(),
        "max_worker_memory": options.max_worker_memory is not None and "/proc" in platforms.missing(),
        "InPython": any(one is not None for one in blueprint.interpreters),
    }
    for name, is_set in refused.items():
        if is_set:
            raise ValueError(
                f"ExecutorOptions failed: expected no {name} in the portable pool, got it. Use Linux and the start "
                f"method 'zygote' or 'spawn' for it."
            )


def _prepare_without_script(prepare: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
    """Return `multiprocessing`'s preparation of a process; without the caller's script for a worker."""
    data = prepare(name)
    if name.startswith(_NAME):
        data = {key: value for key, value in data.items() if not key.startswith("init_main")}
    return data


def _start(one: process.BaseProcess) -> None:
    """Start a process that does not run the caller's script, and that Ctrl-C does not reach meanwhile."""
    with _start_lock, uninterrupted():
        prepare, let_in = spawn.get_preparation_data, platforms.without_signals()
        spawn.get_preparation_data = functools.partial(_prepare_without_script, prepare)
        own: dict[str, Any] = process.current_process()._config  # type: ignore[attr-defined]  # noqa: SLF001
        is_daemon = own.pop("daemon", None)  # `multiprocessing` refuses daemons' children, which might outlive them
        try:
            one.start()
        finally:
            if is_daemon is not None:
                own["daemon"] = is_daemon
            spawn.get_preparation_data = prepare
            let_in()


class PortableProcess(WorkerProcess):
    """A spawned worker process, seen from its owner; see `WorkerProcess`.

    Args:
        worker_id: see `WorkerProcess`.
        generation: see `WorkerProcess`.
        config: see `worker_config`.
        bells: `go` and `done` of the worker.

    Attributes:
        sentinel: for `multiprocessing.connection.wait`: ready when the process has ended.
    """

    _has_ended = False
    _log_path: str | None = None

    def __init__(
        self, worker_id: int, generation: int, config: dict[str, Any], bells: tuple[SocketBell, SocketBell]
    ) -> None:
        context = multiprocessing.get_context("spawn")
        watched, self._watch = context.Pipe(duplex=False)
        super().__init__(worker_id, generation)
        self._process = context.Process(
            target=main,
            args=(self._theirs, (bells[0].reader, bells[1].writer), watched, self._log_path, config),
            name=f"{_NAME}-{worker_id}",
            daemon=True,
        )
        try:
            _start(self._process)
        except BaseException as error:
            self.release()
            if isinstance(error, BlockingIOError):  # at a limit
                raise WorkerLost(f"starting a worker failed: {error}.", phase="start") from error
            raise
        finally:
            self._theirs.close()
            watched.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.sentinel = self._process.sentinel

    def _open_log(self) -> int:
        fd, self._log_path = tempfile.mkstemp(prefix="envherd-log-")
        if platforms.O_TEMPORARY:
            os.close(fd)
            fd = os.open(self._log_path, os.O_RDWR | platforms.O_TEMPORARY | platforms.O_BINARY)
        return fd

    def has_exited(self) -> bool:
        """Return whether the process has ended; never blocks."""
        with uninterrupted():  # the system reports an end once, and `multiprocessing` would lose it
            if not self._has_ended and not self._process.is_alive():
                self._has_ended = True
                with ignoring_refusals():
                    platforms.kill_group(self.pid)  # what its envs had started
        return self._has_ended

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal; None if the process lives."""
        if self._exit_code is None and self.has_exited():
            self._exit_code = self._process.exitcode
        return self._exit_code

    def _request_stacks(self) -> None:
        if not platforms.request_stacks(self.pid):
            self._watch.send_bytes(b"\1")

    def kill(self) -> None:
        """Kill the worker and its envs' processes; safe if it is dead."""
        if self.has_exited():
            return
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.pid).children(recursive=True):
                child.kill()
        with ignoring_refusals():
            platforms.kill_group(self.pid)
        self._process.kill()

    def wait_exit(self, timeout_s: float) -> bool:
        """Wait for the process to end, up to `timeout_s`; return whether it has."""
        end = time.monotonic() + timeout_s
        while not self.has_exited() and (left_s := end - time.monotonic()) > 0:
            if connection.wait([self.sentinel], left_s):  # its end follows, or an env has closed all descriptors
                time.sleep(_SOON_S)
        return self.has_exited()

    @staticmethod
    def wait_for_any(workers: Sequence[WorkerProcess], timeout_s: float | None = None) -> bool:
        """Wait until a worker has written, has ended, or can be sent the rest of a message; False after `timeout_s`."""
        ready: list[Any] = [worker.channel.sock for worker in workers]
        ready += [worker.sentinel for worker in workers if isinstance(worker, PortableProcess)]
        is_sending = any(worker.channel.has_unsent for worker in workers)
        left_s = timeout_s if timeout_s is None else max(0.0, timeout_s)
        if is_sending and (left_s is None or left_s > _SOON_S):
            connection.wait(ready, _SOON_S)
            return True
        return bool(connection.wait(ready, left_s))

    def release(self) -> None:
        """Close this process's descriptors of it. Idempotent."""
        super().release()
        self._watch.close()
        with contextlib.suppress(AttributeError, ValueError):  # it was not created, it still runs, or it is closed
            self.exit_code()
            self._process.close()
        if self._log_path is not None:
            path, self._log_path = self._log_path, None
            with ignoring_refusals():  # the system has removed it
                os.unlink(path)


class PortableCrew(Crew):
    """The workers of a `PortablePool`, see `Crew`.

    Attributes:
        bells: doorbells of the workers, and the caller's.
    """

    def __init__(
        self, blueprint: Blueprint, options: ExecutorOptions, on_row_frame: Callable[[dict[str, Any]], None]
    ) -> None:
        super().__init__(blueprint, options, on_row_frame)
        with uninterrupted():
            self.bells = [SocketBell.create() for _ in blueprint.blocks], SocketBell.create()

    def _get_helper(self) -> None:
        """Refuse to start workers while the program is imported again."""
        refuse_at_import()

    def _start_process(self, worker_id: int, generation: int, config: dict[str, Any]) -> WorkerProcess:
        go, done = self.bells
        return PortableProcess(worker_id, generation, config, (go[worker_id], done))

    def _end(self) -> None:
        super()._end()
        go, done = self.bells
        for bell in (*go, done):
            bell.close()


class PortablePool(WorkerPool):
    """Worker processes on any platform; see the module and `WorkerPool`."""

    _create_segment = staticmethod(Segment.create_with_name)
    _lends = can_fork = False

    crew: PortableCrew

    def _make_crew(self) -> Crew:
        self.why_python = ["the pool is portable"]
        return PortableCrew(self.blueprint, self.options, self._take_frame)

    def _make_bells(self, buffer: np.ndarray) -> tuple[Sequence[Bell], Bell]:  # noqa: ARG002  # they are not in it
        return self.crew.bells

    def _make_caller(self) -> Any:
        """Return None: commands are given in Python."""
        return
