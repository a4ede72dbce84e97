"""What an executor has done so far, as plain frozen values."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from envherd.executor.monitor.loads import read_loads
from envherd.executor.monitor.memory_log import MemoryLog
from envherd.executor.pools.base import Pool
from envherd.shm.specs import EnvSpec


@dataclass(frozen=True)
class WorkerStatistics:
    """One worker process.

    Attributes:
        worker_id: its place; stays when it is replaced.
        pid: process id (of this process for a `SerialEnv`).
        env_ids: the envs it runs.
        generation: how often it was replaced.
        busy_s: seconds it spent on commands since it was started.
        busy_share: of the time since the executor was ready, 0..1.
        uss_bytes: memory that would be free if it ended, that of processes which its envs have started included (not
            for a `SerialEnv`).
        pss_bytes: the same plus its share of what it shares with others.
        cpu_s: processor seconds, user and system, of the worker alone.
        env_steps: `env.step` calls of its envs that returned.
        resets: of its envs.
        reset_share: of the time since the executor was ready, spent on commands with a reset; estimated from samples.
        wait_share: of that time, spent waiting for commands.
        step_p50_s, step_p99_s: of sampled steps, to 10 %; None if there was none, as for a `SerialEnv`.
        phase: "idle", "step" or "reset", now.
        phase_env_id: the env that it is at, or None.
        phase_s: seconds for which it has been at work, or idle.
        cpu: the processor that it runs on, or ran on last; None for a worker of another machine.
        stacked_share: of the looks at where it runs that found it running, the share that found it on one processor
            with another worker, or the caller, while another had none of them, 0..1; see `executor.placement`.
        moves: how often it was asked to move to another processor for that.
        growth_per_reset: bytes of private memory per reset of its envs, between the first and the latest call of
            `statistics()` since it was started; None if there was no reset between them. An env that leaks shows here.
    """

    worker_id: int
    pid: int
    env_ids: tuple[int, ...]
    generation: int
    busy_s: float
    busy_share: float
    uss_bytes: int
    pss_bytes: int
    cpu_s: float
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
    stacked_share: float = 0.0
    moves: int = 0


@dataclass(frozen=True)
class Statistics:
    """All of an executor since it was made.

    Attributes:
        env_steps: `env.step` calls that returned, over all envs.
        agent_steps: the same times the number of agents of each env (1 for single-agent envs).
        resets: resets that returned.
        episodes: episodes that ended (terminated or truncated by the env itself).
        env_errors: exceptions raised by envs.
        worker_losses: workers that died or were killed for being late.
        interrupted: rows that were marked interrupted.
        recycled: workers that were replaced between episodes (see `ExecutorOptions.recycle_after`).
        resets_ahead: with `ExecutorOptions.reset_ahead`, resets whose episode was ready when it was asked for.
        resets_missed: all others then: the first of each env, those with a seed or options of their own, those that
            had to wait for an episode that was still being prepared. 0 without it.
        steps_per_env: `env.step` calls of each env.
        resets_per_env: resets of each env.
        wall_s: seconds since the executor was ready.
        workers: one entry for each worker that serves envs.
        spares: one for each that prepares the next episode of an env instead, in the order of the envs.
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
    resets_ahead: int = 0
    resets_missed: int = 0
    spares: tuple[WorkerStatistics, ...] = ()


class Tally(NamedTuple):
    """What the caller's side has counted.

    Attributes:
        env_errors: exceptions of envs.
        interrupted: rows that a loss has ended.
        ready_at: monotonic seconds.
    """

    env_errors: int
    interrupted: int
    ready_at: float


def count(pool: Pool, memory: MemoryLog, tally: Tally) -> Statistics:
    """Read the counters of a pool, and the machine's view of its processes (kept in the log)."""
    figures = pool.figures()  # first: it brings the words of workers on other machines up to date
    words = {name: array.copy() for name, array in pool.slab.words.items()}
    wall_s = max(time.monotonic() - tally.ready_at, 1e-9)
    agents = np.array([num_agents(spec) for spec in pool.specs])
    steps = words["env_steps"]
    blocks = pool.blueprint.blocks
    workers = []
    for load, env_ids in zip(read_loads(words, blocks, time.monotonic_ns()), blocks, strict=True):
        pid = pool.pid_of(load.worker_id)
        uss, pss, cpu_s, cpu = figures[load.worker_id]
        generation = pool.generation_of(load.worker_id)
        memory.note(load.worker_id, generation, load.resets, uss)
        busy_share = min(1.0, load.busy_s / wall_s)
        workers.append(
            WorkerStatistics(
                worker_id=load.worker_id,
                pid=pid,
                env_ids=env_ids,
                generation=generation,
                busy_s=load.busy_s,
                busy_share=busy_share,
                uss_bytes=uss,
                pss_bytes=pss,
                cpu_s=cpu_s,
                env_steps=load.env_steps,
                resets=load.resets,
                reset_share=min(busy_share, load.reset_s / wall_s),
                wait_share=1 - busy_share,
                step_p50_s=load.step_p50_s,
                step_p99_s=load.step_p99_s,
                phase=load.phase,
                phase_env_id=load.phase_env_id,
                phase_s=load.phase_s,
                cpu=cpu,
                stacked_share=load.stacked_share,
                moves=load.moves,
                growth_per_reset=memory.growth_per_reset(load.worker_id),
            )
        )
    serving, spares = split(workers, pool.serving)
    return Statistics(
        env_steps=int(steps.sum()),
        agent_steps=int((steps * agents).sum()),
        resets=int(words["resets"].sum()),
        episodes=int(words["ends"].sum()),
        env_errors=tally.env_errors,
        worker_losses=pool.num_losses,
        interrupted=tally.interrupted,
        steps_per_env=tuple(steps.tolist()),
        resets_per_env=tuple(words["resets"].tolist()),
        wall_s=wall_s,
        workers=serving,
        recycled=pool.num_recycled,
        resets_ahead=pool.num_ahead,
        resets_missed=pool.num_missed,
        spares=spares,
    )


def split(
    workers: Sequence[WorkerStatistics], serving: Sequence[int]
) -> tuple[tuple[WorkerStatistics, ...], tuple[WorkerStatistics, ...]]:
    """Return the workers that serve, and the others, each in the order of their envs; what envs did is the former's."""
    others = sorted((one for one in workers if one.worker_id not in serving), key=lambda one: one.env_ids)
    return tuple(workers[i] for i in serving), tuple(replace(one, env_steps=0, resets=0) for one in others)


def num_agents(spec: EnvSpec) -> int:
    """Return how many agents act in an env: the rows of its groups, or 1."""
    inner = len(spec.batch_shape)
    return sum(math.prod(shape[inner:]) for key, shape in spec.groups if len(key) == 1) or 1
