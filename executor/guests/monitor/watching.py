"""Find and watch this user's running executors through read-only maps of their slabs, which does not slow them down.

Guarantees: no registry is written, so executors that have ended leave nothing behind. Executors of other users and of
other containers are not found.
Platforms: Linux.
"""

import contextlib
import mmap
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import numpy as np

from envherd.executor.guests.monitor.statistics import WorkerStatistics, read_workers
from envherd.executor.pools.base import WorkerFigures
from envherd.executor.pools.slab_plate import LABEL, SCHEMA, namespace
from envherd.executor.start.process_log import request_stacks
from envherd.shm import nameplate
from envherd.shm.interrupts import ignoring_refusals
from envherd.shm.nameplate import Plate
from envherd.shm.platforms import send_signal


def plates() -> list[Plate]:
    """Return the nameplates of this user's running executors, the oldest first."""
    return sorted(
        filter(_is_of_executor, nameplate.find(LABEL)),
        key=lambda one: one.content["made_at"],
    )


def _is_of_executor(plate: Plate) -> bool:
    """Return whether a nameplate is of its process, of this version and of this container."""
    expected = {"schema": SCHEMA, "pid": plate.pid, "namespace": namespace()}
    return all(plate.content.get(name) == value for name, value in expected.items())


class Watch:
    """Reads one executor; `look` compares it with the previous reading.

    Args:
        plate: of the executor; see `plates`.

    Attributes:
        pid: process that made it.
        command: the command line of that process.
        env: family of its envs.
        num_envs: number of envs.
        path: which calls are made in C; see `Statistics.path`. Empty if nobody has written it.
        workers: at the latest reading; their shares and rates are those of the time since the reading before it.
        span_s: seconds between these readings.

    Raises:
        OSError: the executor has ended.
    """

    def __init__(self, plate: Plate) -> None:
        content = plate.content
        # The system ends each argument with a zero byte.
        self.command = (
            Path(f"/proc/{plate.pid}/cmdline")
            .read_bytes()
            .rstrip(b"\0")
            .replace(b"\0", b" ")
            .decode(errors="replace")
        )
        self.path = content.get("path", "").strip()
        fd = os.open(plate.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_ino != plate.inode:
                raise OSError(f"the executor of process {plate.pid} has ended")
            self._map = mmap.mmap(
                fd,
                content["nbytes"],
                mmap.MAP_SHARED,
                mmap.PROT_READ,
            )
        finally:
            os.close(fd)
        self.pid = plate.pid
        self.env = content["env"]
        self._content = content
        self.num_envs = sum(map(len, content["blocks"]))
        self._words = {
            name: np.frombuffer(self._map, np.int64, length, offset)
            for name, (offset, length) in content["words"].items()
        }
        self._read_ns = time.monotonic_ns()
        self.workers = read_workers(self._words, content["blocks"], self._read_ns)
        self.span_s = 0.0

    def close(self) -> None:
        """Unmap the slab. Idempotent."""
        self._words = {}
        # An array over the map is still in use; the map is closed with it.
        with contextlib.suppress(BufferError):
            self._map.close()

    def look(self) -> Self:
        """Read the executor; return this object."""
        now_ns = time.monotonic_ns()
        self.span_s = max(1e-9, (now_ns - self._read_ns) / 1e9)
        self._read_ns = now_ns
        pairs = zip(
            self.workers,
            read_workers(self._words, self._content["blocks"], now_ns),
            strict=True,
        )
        self.workers = tuple(
            _between(*pair, self.span_s, gpu)
            for pair, gpu in zip(pairs, self._content["gpus"], strict=True)
        )
        return self

    @property
    def steps_per_s(self) -> float:
        """Env-steps per second of all workers."""
        return sum(worker.steps_per_s for worker in self.workers)

    def to_plain(self) -> dict[str, Any]:
        """Return it as documented in docs/reference/json.md."""
        return {
            "pid": self.pid,
            "command": self.command,
            "env": self.env,
            "path": self.path,
            "num_envs": self.num_envs,
            "running_s": time.time() - self._content["made_at"],
            "span_s": self.span_s,
            "steps_per_s": self.steps_per_s,
            "workers": [asdict(worker) for worker in self.workers],
        }


def _between(
    before: WorkerStatistics,
    now: WorkerStatistics,
    span_s: float,
    gpu: str | None,
) -> WorkerStatistics:
    busy_s = now.busy_s - before.busy_s
    if now.phase != "idle":  # the current command is not counted yet
        busy_s += min(span_s, now.phase_s)
    figures = (
        WorkerFigures.of(now.pid, gpu)
        # A worker in another pid namespace may have written an id that another process has here.
        if _log_path(now.pid) is not None
        else WorkerFigures(0, 0, 0.0, None, gpu)
    )
    return now.over(
        span_s,
        busy_s,
        now.reset_s - before.reset_s,
        now.env_steps - before.env_steps,
        figures,
    )


def stack_of(pid: int) -> str:
    """Return the present Python stacks of a worker's threads, also if it is stuck in C.

    On SIGUSR2 the worker writes them to its log, which takes it about 100 us.
    """
    path = _log_path(pid)
    if path is None:
        return "(the worker has ended, or belongs to another user)"
    with ignoring_refusals(), open(path, "rb") as file:
        return request_stacks(file.fileno(), lambda: send_signal(pid, signal.SIGUSR2))
    return "(the worker has ended)"


def _log_path(pid: int) -> str | None:
    """Return the path of a worker's log; None if the process is not a worker."""
    with ignoring_refusals():
        for fd in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{fd}"
            with ignoring_refusals():
                if os.readlink(path).startswith("/memfd:envherd-log-"):
                    return path
    return None
