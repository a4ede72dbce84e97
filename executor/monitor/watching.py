"""Find and watch this user's running executors through read-only maps of their slabs, which does not slow them down.

Guarantees: no registry is written, so executors that have ended leave nothing behind. Executors of other users and of
other containers are not found.
Platforms: Linux.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from envherd.executor.monitor.statistics import WorkerStatistics, read_workers
from envherd.executor.pools.base import WorkerFigures
from envherd.executor.pools.slab_plate import LABEL, SCHEMA, namespace
from envherd.shm import nameplate
from envherd.shm.interrupts import ignoring_refusals
from envherd.shm.nameplate import Plate

#: Seconds for a worker to have written its stack.
_STACK_WAIT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Listing:
    """A running executor.

    Attributes:
        pid: process that made it.
        made_at: seconds since the epoch.
        command: the command line of that process.
        env: family of its envs.
        blocks: env ids of each worker.
        gpus: of each worker, None where none was given.
        slab_path: where the slab can be opened.
        inode: of the slab; identifies it.
        path: which calls are made in C; see `Statistics.path`. Empty if nobody has written it.
        words: word -> (offset in bytes, length).
        nbytes: of the part of the slab that holds the words.
    """

    pid: int
    made_at: float
    command: str
    env: str
    blocks: tuple[tuple[int, ...], ...]
    gpus: tuple[str | None, ...]
    path: str
    slab_path: str
    inode: int
    words: Mapping[str, tuple[int, int]]
    nbytes: int

    @property
    def num_envs(self) -> int:
        """The number of envs; with resets ahead, two workers have each."""
        return len({env_id for block in self.blocks for env_id in block})


def listings() -> Iterator[Listing]:
    """Yield this user's running executors, the oldest first."""
    found = [listing for plate in nameplate.find(LABEL) if (listing := _listed(plate)) is not None]
    yield from sorted(found, key=lambda one: one.made_at)


def _listed(plate: Plate) -> Listing | None:
    """Return the listing in a nameplate; None if it is of another process, version or container."""
    content = plate.content
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError), ignoring_refusals():
        if content["schema"] != SCHEMA or content["pid"] != plate.pid or content["namespace"] != namespace():
            return None
        command = Path(f"/proc/{plate.pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ")
        return Listing(
            pid=plate.pid,
            made_at=float(content["made_at"]),
            command=command.decode(errors="replace"),
            env=str(content["env"]),
            blocks=tuple(tuple(map(int, block)) for block in content["blocks"]),
            gpus=tuple(None if gpu is None else str(gpu) for gpu in content["gpus"]),
            path=str(content.get("path", "")).strip(),
            slab_path=plate.path,
            inode=plate.inode,
            words={name: (int(offset), int(length)) for name, (offset, length) in content["words"].items()},
            nbytes=int(content["nbytes"]),
        )
    return None


class Watch:
    """Reads one executor; `look` compares it with the previous reading.

    Attributes:
        listing: of the executor.
        workers: at the latest reading; their shares and rates are those of the time since the reading before it.
        span_s: seconds between these readings.

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
        self._read_ns = time.monotonic_ns()
        self.workers = read_workers(self._words, listing.blocks, self._read_ns)
        self.span_s = 0.0

    def close(self) -> None:
        """Unmap the slab. Idempotent."""
        self._words = {}
        with contextlib.suppress(BufferError):
            self._map.close()

    def look(self) -> Self:
        """Read the executor; return this object."""
        now_ns = time.monotonic_ns()
        self.span_s, self._read_ns = max(1e-9, (now_ns - self._read_ns) / 1e9), now_ns
        pairs = zip(self.workers, read_workers(self._words, self.listing.blocks, now_ns), strict=True)
        both = zip(pairs, self.listing.gpus, strict=True)
        self.workers = tuple(_between(*pair, self.span_s, gpu) for pair, gpu in both)
        return self

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
            "workers": [asdict(worker) for worker in self.workers],
        }


def _between(before: WorkerStatistics, now: WorkerStatistics, span_s: float, gpu: str | None) -> WorkerStatistics:
    busy_s = now.busy_s - before.busy_s
    if now.phase != "idle":  # the current command is not counted yet
        busy_s += min(span_s, now.phase_s)
    figures = WorkerFigures.of(now.pid, gpu) if now.pid else WorkerFigures(0, 0, 0.0, None, gpu)
    return now.over(span_s, busy_s, now.reset_s - before.reset_s, now.env_steps - before.env_steps, figures)


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
