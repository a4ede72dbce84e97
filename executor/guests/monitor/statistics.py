"""Statistics of an executor, as frozen values, and how they are read from the words of its slab.

Reading does not slow the workers down. `watching` reads the words of executors of other processes in the same way.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from envherd.executor.pools.base import Pool, WorkerFigures
from envherd.executor.processes.memory_log import MemoryLog
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
