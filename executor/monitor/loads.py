"""Read workers' activity from their words in the slab; reading does not slow them down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from envherd.shm.slab import NUM_BINS, bin_middle
from envherd.workers.protocol import describe_phase

_MIDDLES = np.array([bin_middle(index) for index in range(NUM_BINS)]) / 1e9


@dataclass(frozen=True)
class Load:
    """One worker's words, and those of its envs. If two workers have the same env, both show its counts.

    Attributes:
        worker_id: stays the same when the worker is replaced.
        pid: of its process; 0 until that has started.
        restarts: earlier processes with this worker id.
        env_steps: `env.step` calls of its envs that returned.
        resets: of its envs.
        ends: episodes of its envs that ended.
        busy_s: seconds spent on commands.
        reset_s: of these, on commands with a reset; estimated from samples.
        step_p50_s, step_p99_s: of sampled steps, to 10 %; None if there was none.
        phase: "idle", "step" or "reset".
        phase_env_id: the env that it works on, or None.
        phase_s: seconds since it began its present round of commands, or since it became idle.
    """

    worker_id: int
    pid: int
    restarts: int
    env_steps: int
    resets: int
    ends: int
    busy_s: float
    reset_s: float
    step_p50_s: float | None
    step_p99_s: float | None
    phase: str
    phase_env_id: int | None
    phase_s: float


def read_loads(words: Mapping[str, np.ndarray], blocks: Sequence[Sequence[int]], now_ns: int) -> tuple[Load, ...]:
    """Return every worker's load.

    Args:
        words: of a slab.
        blocks: env ids of each worker.
        now_ns: of the monotonic clock.
    """
    loads = []
    for worker_id, env_ids in enumerate(blocks):
        ids = list(env_ids)
        bins = words["step_bins"][worker_id * NUM_BINS : (worker_id + 1) * NUM_BINS].copy()
        phase, env_id = describe_phase(int(words["phase"][worker_id]))
        since_ns = int(words["since_ns"][worker_id])
        loads.append(
            Load(
                worker_id=worker_id,
                pid=int(words["pid"][worker_id]),
                restarts=max(0, int(words["starts"][worker_id]) - 1),
                env_steps=int(words["env_steps"][ids].sum()),
                resets=int(words["resets"][ids].sum()),
                ends=int(words["ends"][ids].sum()),
                busy_s=float(words["busy_ns"][worker_id]) / 1e9,
                reset_s=float(words["reset_ns"][worker_id]) / 1e9,
                step_p50_s=quantile(bins, 0.5),
                step_p99_s=quantile(bins, 0.99),
                phase=phase,
                phase_env_id=env_id,
                phase_s=max(0.0, (now_ns - since_ns) / 1e9) if since_ns else 0.0,
            )
        )
    return tuple(loads)


def quantile(bins: np.ndarray, share: float) -> float | None:
    """Return a quantile of a histogram in seconds; None if it is empty."""
    total = int(bins.sum())
    if total == 0:
        return None
    index = int(np.searchsorted(bins.cumsum(), share * total))
    return float(_MIDDLES[min(index, NUM_BINS - 1)])
