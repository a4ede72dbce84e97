"""What a batch costs besides the env, on this machine and now: an env that does nothing gives the same arrays.

A batch of N envs on W workers takes `fixed + per_worker * W + per_env * N` seconds more than the slowest worker
is busy: actions out, wake-ups, rows in, a TensorDict of them. The three are fitted to a few settings, each run
for a fraction of a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from envherd.executor.batched import BatchedEnv
from envherd.executor.options import ExecutorOptions
from envherd.executor.parallel import ParallelEnv
from envherd.executor.serial import SerialEnv
from envherd.executor.sizing.driving import Driver, median_batch_s
from envherd.shm.specs import EnvSpec
from envherd.workers.echo import EchoFactory

#: Seconds for which a setting runs, and batches at least.
_SPAN_S, _LEAST_BATCHES = 0.15, 20
#: Bytes of one batch at most while measuring; more would measure the memory of the machine.
_MOST_BATCH_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Seconds of a batch besides the envs' own.

    Attributes:
        fixed_s: however few.
        per_worker_s: of each worker.
        per_env_s: of each env.
        exchange_factor: how much more it is when envs are sent and received, half of them at a time.
        serial_fixed_s, serial_per_env_s: the same for a `SerialEnv`, whose envs run in the caller's process.
    """

    fixed_s: float
    per_worker_s: float
    per_env_s: float
    serial_fixed_s: float
    serial_per_env_s: float
    exchange_factor: float = 1.0

    def of(self, num_envs: float, num_workers: int) -> float:
        """Return seconds of a batch of `num_envs` on `num_workers` (0: a `SerialEnv`)."""
        if num_workers == 0:
            return self.serial_fixed_s + self.serial_per_env_s * num_envs
        return self.fixed_s + self.per_worker_s * num_workers + self.per_env_s * num_envs


def measure_overhead(
    spec: EnvSpec, cores: float, options: ExecutorOptions, progress: Callable[[float], None]
) -> Overhead:
    """Run envs of `spec` that do nothing in a few settings, and fit.

    Args:
        spec: of one env.
        cores: that may be used.
        options: of the executor; what concerns the factory (preload, info keys) is left out.
        progress: called with the share that is done.
    """
    factory = EchoFactory(spec.to_plain())
    plain = _plain_options(options)
    wide = min(8, max(1, int(cores)))
    many = 16 if _bytes_of(spec) * 16 < _MOST_BATCH_BYTES else 4
    settings = sorted({(1, 1), (1, many), (wide, wide), (wide, many * wide)})
    rows, times, factor = [], [], 1.0
    for index, (workers, envs) in enumerate(settings):
        progress(index / (len(settings) + 2))
        with ParallelEnv(envs, factory, num_workers=workers, seed=0, options=plain) as env:
            rows.append([1.0, float(workers), float(envs)])
            times.append(_overhead_of(env))
            if (workers, envs) == settings[-1]:
                factor = _exchange_factor(env)
    fixed, per_worker, per_env = fit(np.array(rows), np.array(times))
    serial: list[float] = []
    for envs in (1, many):
        progress((len(settings) + len(serial)) / (len(settings) + 2))
        with SerialEnv(envs, factory, seed=0, options=plain) as env:
            serial.append(_overhead_of(env))
    slope = max(0.0, (serial[1] - serial[0]) / (many - 1))
    return Overhead(
        fixed_s=fixed,
        per_worker_s=per_worker,
        per_env_s=per_env,
        serial_fixed_s=max(0.0, serial[0] - slope),
        serial_per_env_s=slope,
        exchange_factor=factor,
    )


def fit(rows: np.ndarray, times: np.ndarray) -> tuple[float, float, float]:
    """Return coefficients, none negative, that fit the times with the least relative error.

    Args:
        rows: `[settings, 3]`: 1, workers, envs.
        times: seconds of each setting.
    """
    active = [0, 1, 2]
    scale = 1 / np.maximum(times, 1e-9)
    while active:
        found = np.linalg.lstsq(rows[:, active] * scale[:, None], times * scale, rcond=None)[0]
        if (found >= 0).all():
            break
        active.pop(int(found.argmin()))
    full = np.zeros(3)
    full[active] = found if active else 0.0
    return float(full[0]), float(full[1]), float(full[2])


def _overhead_of(env: BatchedEnv) -> float:
    """Return median seconds of a batch less what its busiest worker was busy with."""
    words: Any = env.engine.pool.slab.words["busy_ns"]
    driver = Driver(env, "sync")
    driver.run(0.0, least=5)
    times: list[float] = []
    end = time.perf_counter() + _SPAN_S
    busy = words.copy()
    while time.perf_counter() < end or len(times) < _LEAST_BATCHES:
        _, seconds = driver.run(0.0)
        before, busy = busy, words.copy()
        times.append(max(0.0, seconds - float((busy - before).max()) / 1e9))
    return max(1e-7, float(np.median(times)))


def _exchange_factor(env: BatchedEnv) -> float:
    """Return how much more the parent has to do for envs that are sent and received, half of them at a time."""
    together = median_batch_s(Driver(env, "sync"), _SPAN_S, _LEAST_BATCHES)
    apart = Driver(env, "first-k")
    apart.run(0.0, least=5)
    halves = 2 * median_batch_s(apart, _SPAN_S, _LEAST_BATCHES)
    apart.finish()
    return max(1.0, halves / together)


def _plain_options(options: ExecutorOptions) -> ExecutorOptions:
    return ExecutorOptions(
        worker_threads=options.worker_threads,
        affinity=options.affinity,
        nice=options.nice,
        ring_frames=options.ring_frames,
        check_actions=options.check_actions,
    )


def _bytes_of(spec: EnvSpec) -> int:
    leaves = (leaf for leaf in spec.leaves() if not leaf.is_side)
    return sum(int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in leaves)
