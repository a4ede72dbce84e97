"""Statistics of an executor, as frozen values, and how they are read from the words of its slab.

Reading does not slow the workers down. `Watch` reads the words of executors of other processes in the same way.
"""

import contextlib
import math
import mmap
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from envherd.executor.pools.base import Pool, WorkerFigures
from envherd.executor.pools.worker_pool import PLATE_LABEL, PLATE_SCHEMA, namespace
from envherd.executor.processes.memory_log import MemoryLog
from envherd.executor.start.zygote import request_stacks
from envherd.shm import segment
from envherd.shm.interrupts import ignoring_refusals
from envherd.shm.platforms import send_signal
from envherd.shm.segment import Plate
from envherd.shm.slab import NUM_BINS, bin_middle
from envherd.shm.specs import EnvSpec
from envherd.workers.protocol import describe_phase

#: Of the bins of step times, in seconds.
_MIDDLES = np.array([bin_middle(index) for index in range(NUM_BINS)]) / 1e9


@dataclass(frozen=True)
class WorkerStatistics:
    """One worker process.

    Shares and rates are those of the time since the executor was ready; in `envherd top`, since its last reading.

    Attributes:
        worker_id: stays the same when the worker is replaced.
        pid: process id (of this process for a `SerialEnv`); 0 until it has started.
        env_ids: the envs it runs.
        generation: how often it was replaced.
        busy_s: seconds it spent on commands since it was started.
        busy_share: of the time, 0..1.
        uss_bytes: memory that would be freed if it ended, including that of processes started by its envs (except for a
            `SerialEnv`).
        pss_bytes: the same plus its part of shared memory.
        cpu_s: processor seconds, user and system, of the worker alone.
        env_steps: steps that its envs made.
        resets: of its envs.
        reset_share: of the time, spent on commands with a reset; estimated from samples.
        wait_share: of the time, spent waiting for commands.
        step_p50_s: median of sampled steps, to 10 %; None if there was none, as for a `SerialEnv`.
        step_p99_s: 99th percentile of sampled steps, likewise.
        phase: "idle", "step" or "reset", now.
        phase_env_id: the env that it works on, or None.
        phase_s: seconds for which it has been at work, or idle.
        growth_per_reset: bytes of private memory per reset of its envs, between the first and the latest call of
            `statistics()` since it was started; None if there was no reset between them. An env that leaks shows here.
        cpu: the processor that it runs on, or ran on last; None for a worker of another machine.
        gpu: that it was given (see `ExecutorOptions.gpus`), as `CUDA_VISIBLE_DEVICES` names it; None if none was.
        reset_s: of `busy_s`, on commands with a reset; estimated from samples.
        steps_per_s: `env.step` calls per second.
        env_errors: exceptions of its envs in steps and resets.
    """

    worker_id: int
    pid: int
    env_ids: tuple[int, ...]
    generation: int
    busy_s: float
    busy_share: float = 0.0
    uss_bytes: int = 0
    pss_bytes: int = 0
    cpu_s: float = 0.0
    env_steps: int = 0
    resets: int = 0
    reset_share: float = 0.0
    wait_share: float = 0.0
    step_p50_s: float | None = None
    step_p99_s: float | None = None
    phase: str = "idle"
    phase_env_id: int | None = None
    phase_s: float = 0.0
    growth_per_reset: float | None = None
    cpu: int | None = None
    gpu: str | None = None
    reset_s: float = 0.0
    steps_per_s: float = 0.0
    env_errors: int = 0

    def over(
        self,
        span_s: float,
        busy_s: float,
        reset_s: float,
        env_steps: int,
        figures: WorkerFigures,
    ) -> "WorkerStatistics":
        """Return these statistics with the shares and rates of a time, and with the figures of the process.

        Args:
            span_s: seconds of the time.
            busy_s: spent on commands in it.
            reset_s: spent on commands with a reset in it.
            env_steps: made in it.
            figures: of its process.
        """
        busy_share = min(1.0, max(0.0, busy_s / span_s))
        return replace(
            self,
            busy_share=busy_share,
            reset_share=min(busy_share, max(0.0, reset_s / span_s)),
            wait_share=1 - busy_share,
            steps_per_s=max(0, env_steps) / span_s,
            **figures._asdict(),
        )


@dataclass(frozen=True)
class Statistics:
    """Totals of an executor since it was created.

    Attributes:
        env_steps: steps that the envs made: `env.step` calls whose results were accepted.
        agent_steps: the same times the number of agents of each env (1 for single-agent envs).
        resets: resets that returned.
        episodes: episodes that ended (terminated or truncated by the env itself); of an env that is a batch, the
            steps in which any row ended.
        env_errors: exceptions raised by envs.
        worker_losses: workers that died or were killed for being late.
        interrupted: rows that were marked interrupted.
        recycled: workers that were replaced between episodes (see `ExecutorOptions.recycle_after`).
        steps_per_env: steps of each env.
        resets_per_env: resets of each env.
        errors_per_env: exceptions of each env in its steps and resets.
        wall_s: seconds since the executor was ready.
        workers: one entry for each worker.
        frames_lent: batches that the caller holds now and that were not copied (docs/batches.md, Memory).
        path: "steps in C", or "steps in Python, because ..." with the reasons, which docs/sizing.md explains.
    """

    env_steps: int
    agent_steps: int
    resets: int
    episodes: int
    env_errors: int
    worker_losses: int
    interrupted: int
    steps_per_env: tuple[int, ...]
    resets_per_env: tuple[int, ...]
    wall_s: float
    workers: tuple[WorkerStatistics, ...]
    recycled: int = 0
    frames_lent: int = 0
    path: str = ""
    errors_per_env: tuple[int, ...] = ()


def read_workers(
    words: Mapping[str, np.ndarray],
    blocks: Sequence[Sequence[int]],
    now_ns: int,
) -> tuple[WorkerStatistics, ...]:
    """Return what the words of a slab say of each worker.

    Args:
        words: of a slab.
        blocks: env ids of each worker.
        now_ns: of the monotonic clock.
    """
    # Envs step meanwhile: one copy for all, so that two workers with one env show the same count.
    words = {name: np.array(array) for name, array in words.items()}
    workers = []
    for worker_id, env_ids in enumerate(blocks):
        ids = list(env_ids)
        bins = words["step_bins"][worker_id * NUM_BINS : (worker_id + 1) * NUM_BINS]
        phase, env_id = describe_phase(int(words["phase"][worker_id]))
        if "lessees" in words:  # of a lease pool: who has the env now
            phase = (
                words["lessees"].view("S64")[worker_id].decode(errors="ignore") or phase
            )
        since_ns = int(words["since_ns"][worker_id])
        workers.append(
            WorkerStatistics(
                worker_id=worker_id,
                pid=int(words["pid"][worker_id]),
                env_ids=tuple(ids),
                generation=max(0, int(words["starts"][worker_id]) - 1),
                busy_s=float(words["busy_ns"][worker_id]) / 1e9,
                reset_s=float(words["reset_ns"][worker_id]) / 1e9,
                env_steps=int(words["env_steps"][ids].sum()),
                resets=int(words["resets"][ids].sum()),
                env_errors=int(words["errors"][ids].sum()),
                step_p50_s=quantile(bins, 0.5),
                step_p99_s=quantile(bins, 0.99),
                phase=phase,
                phase_env_id=env_id,
                phase_s=max(0.0, (now_ns - since_ns) / 1e9) if since_ns else 0.0,
            )
        )
    return tuple(workers)


def quantile(bins: np.ndarray, share: float) -> float | None:
    """Return a quantile of a histogram in seconds; None if it is empty."""
    total = int(bins.sum())
    if total == 0:
        return None
    index = int(np.searchsorted(bins.cumsum(), share * total))
    return float(_MIDDLES[min(index, NUM_BINS - 1)])


def count(
    pool: Pool,
    memory: MemoryLog,
    ready_at: float,
    **of_caller: Any,
) -> Statistics:
    """Read the counters of a pool and the memory of its processes.

    Args:
        pool: of the executor.
        memory: where the memory is recorded.
        ready_at: monotonic seconds.
        **of_caller: the fields of `Statistics` that the pool does not know.
    """
    figures = pool.figures()
    words = {name: array.copy() for name, array in pool.slab.words.items()}
    wall_s = max(time.monotonic() - ready_at, 1e-9)
    steps = words["env_steps"]
    workers = []
    for one in read_workers(words, pool.blueprint.blocks, time.monotonic_ns()):
        worker_id = one.worker_id
        generation = pool.generation_of(one.worker_id)
        memory.note(worker_id, generation, one.resets, figures[worker_id].uss_bytes)
        workers.append(
            replace(
                one.over(
                    wall_s,
                    one.busy_s,
                    one.reset_s,
                    one.env_steps,
                    figures[worker_id],
                ),
                pid=pool.pid_of(worker_id),
                generation=generation,
                growth_per_reset=memory.growth_per_reset(worker_id),
            )
        )
    return Statistics(
        env_steps=int(steps.sum()),
        agent_steps=int((steps * [num_agents(spec) for spec in pool.specs]).sum()),
        resets=int(words["resets"].sum()),
        episodes=int(words["ends"].sum()),
        env_errors=int(words["errors"].sum()),
        worker_losses=pool.num_losses,
        steps_per_env=tuple(steps.tolist()),
        resets_per_env=tuple(words["resets"].tolist()),
        errors_per_env=tuple(words["errors"].tolist()),
        wall_s=wall_s,
        workers=tuple(workers),
        recycled=pool.num_recycled,
        **of_caller,
    )


def num_agents(spec: EnvSpec) -> int:
    """Return the number of agents of an env: the rows of its groups, or 1."""
    inner = len(spec.batch_shape)
    return (
        sum(math.prod(shape[inner:]) for key, shape in spec.groups if len(key) == 1)
        or 1
    )


# ---- watching ----------------------------------------------------------------------------------
# Find and watch this user's running executors through read-only maps of their slabs, which does not slow them down.
#
# Guarantees: no registry is written, so executors that have ended leave nothing behind. Executors of other users and of
# other containers are not found.
# Platforms: Linux.


def plates() -> list[Plate]:
    """Return the nameplates of this user's running executors, the oldest first."""
    return sorted(
        filter(_is_of_executor, segment.find_plates(PLATE_LABEL)),
        key=lambda one: one.content["made_at"],
    )


def _is_of_executor(plate: Plate) -> bool:
    """Return whether a nameplate is of its process, of this version and of this container."""
    expected = {"schema": PLATE_SCHEMA, "pid": plate.pid, "namespace": namespace()}
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
