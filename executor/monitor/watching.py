"""Watch executors of other processes through read-only maps of their slabs, which does not slow them down."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from envherd.executor.monitor.loads import Load, read_loads
from envherd.executor.monitor.running import Listing
from envherd.shm.interrupts import ignoring_refusals
from envherd.workers.processes import cpu_of, memory_of, resident_bytes

#: Seconds for a worker to have written its stack.
_STACK_WAIT_S = 1.0


@dataclass(frozen=True)
class WorkerView:
    """One worker between two samples.

    Attributes:
        load: of the second sample.
        steps_per_s: env-steps of its envs per second in between.
        busy_share, reset_share, wait_share: of the time in between; resets are part of busy, waiting is the rest.
        uss_bytes, rss_bytes: memory; 0 if it has ended.
        env_ids: its envs.
        cpu: the processor that it runs on, or ran on last; None if it has ended.
    """

    load: Load
    steps_per_s: float
    busy_share: float
    reset_share: float
    wait_share: float
    uss_bytes: int
    rss_bytes: int
    env_ids: tuple[int, ...]
    cpu: int | None

    def to_plain(self) -> dict[str, Any]:
        """Return it as documented in docs/sizing.md."""
        plain = {name: value for name, value in vars(self).items() if name != "load"}
        return {**asdict(self.load), **plain, "env_ids": list(self.env_ids)}


@dataclass(frozen=True)
class ExecutorView:
    """One executor between two samples."""

    listing: Listing
    workers: tuple[WorkerView, ...]
    span_s: float

    @property
    def steps_per_s(self) -> float:
        """Env-steps per second of all workers."""
        by_block = {worker.env_ids: worker.steps_per_s for worker in self.workers}  # two workers may have one env
        return sum(by_block.values())

    def to_plain(self) -> dict[str, Any]:
        """Return it as documented in docs/sizing.md."""
        return {
            "pid": self.listing.pid,
            "command": self.listing.command,
            "env": self.listing.env,
            "path": self.listing.path,
            "num_envs": self.listing.num_envs,
            "running_s": time.time() - self.listing.made_at,
            "span_s": self.span_s,
            "steps_per_s": self.steps_per_s,
            "workers": [worker.to_plain() for worker in self.workers],
        }


class Watch:
    """Samples one executor; `look` returns the changes since the previous call.

    Raises:
        OSError: the executor has ended.
    """

    def __init__(self, listing: Listing) -> None:
        self.listing = listing
        fd = os.open(listing.slab_path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_ino != listing.inode:
                raise OSError(f"the executor of process {listing.pid} has gone")
            self._map = mmap.mmap(fd, listing.nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)
        self._words = {
            name: np.frombuffer(self._map, np.int64, length, offset) for name, (offset, length) in listing.words.items()
        }
        self._loads = self._read()
        self._seen_ns = time.monotonic_ns()

    def close(self) -> None:
        """Unmap the slab. Idempotent."""
        self._words = {}
        with contextlib.suppress(BufferError):
            self._map.close()

    def look(self) -> ExecutorView:
        """Return the changes since the previous call."""
        now_ns = time.monotonic_ns()
        span_s = max(1e-9, (now_ns - self._seen_ns) / 1e9)
        before, self._loads, self._seen_ns = self._loads, self._read(), now_ns
        pairs = zip(before, self._loads, self.listing.blocks, strict=True)
        return ExecutorView(self.listing, tuple(_view(*pair, span_s) for pair in pairs), span_s)

    def _read(self) -> tuple[Load, ...]:
        return read_loads(self._words, self.listing.blocks, time.monotonic_ns())


def _view(before: Load, now: Load, env_ids: tuple[int, ...], span_s: float) -> WorkerView:
    busy_s = now.busy_s - before.busy_s
    if now.phase != "idle":  # the current command is not counted yet
        busy_s += min(span_s, now.phase_s)
    busy = min(1.0, max(0.0, busy_s / span_s))
    return WorkerView(
        load=now,
        steps_per_s=max(0, now.env_steps - before.env_steps) / span_s,
        busy_share=busy,
        reset_share=min(busy, max(0.0, (now.reset_s - before.reset_s) / span_s)),
        wait_share=1 - busy,
        uss_bytes=memory_of(now.pid)["uss"] if now.pid else 0,
        rss_bytes=resident_bytes(now.pid) if now.pid else 0,
        env_ids=env_ids,
        cpu=cpu_of(now.pid) if now.pid else None,
    )


def stack_of(pid: int) -> str:
    """Return the present Python stacks of a worker's threads, also if it is stuck in C.

    On SIGUSR2 the worker writes them to its log, which takes it about 100 us.
    """
    path = _log_path(pid)
    if path is None:
        return "(the worker has gone, or is another user's)"
    with ignoring_refusals():
        before = os.stat(path).st_size
        os.kill(pid, signal.SIGUSR2)
        end, size = time.monotonic() + _STACK_WAIT_S, before
        while time.monotonic() < end:
            time.sleep(0.01)
            last, size = size, os.stat(path).st_size
            if size > before and size == last:
                break
        with open(path, "rb") as file:
            file.seek(before)
            return file.read().decode(errors="replace") or "(the worker did not answer)"
    return "(the worker has gone)"


def _log_path(pid: int) -> str | None:
    """Return the path of a worker's log; None if the process is not a worker."""
    with ignoring_refusals():
        for fd in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{fd}"
            with ignoring_refusals():
                if os.readlink(path).startswith("/memfd:envherd-log-"):
                    return path
    return None
