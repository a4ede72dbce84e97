"""What a batch costs besides the env, on this machine and now.

Envs that give the same arrays compute about as long, and end as often. A batch of N of them on W workers takes
`fixed + per_worker * W + per_env * N` seconds more than the slowest worker is busy: actions out, wake-ups, rows in, a
TensorDict of them. The three are fitted to a few settings. How much longer the same work takes while other workers
compute too (hyper-threads, caches, neighbours of a virtual machine) is measured with them. All settings are alive
together and take turns, so that what is compared was measured at one time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envherd.executor.batched import BatchedEnv
from envherd.executor.fixed import FixedParallelEnv
from envherd.executor.machine.machine import Machine
from envherd.executor.options import ExecutorOptions
from envherd.executor.serial import SerialEnv
from envherd.executor.sizing.driving import Driver, median_batch_s
from envherd.executor.sizing.modes import Mode
from envherd.shm.specs import EnvSpec
from envherd.workers.probing.echo import EchoFactory

#: Turns of each setting, seconds of a turn, and batches of it at least.
_TURNS, _TURN_S, _LEAST_BATCHES = 5, 0.06, 4
#: More turns of the two settings that say how workers crowd each other: a virtual machine's speed changes meanwhile.
_CROWD_TURNS = 10
#: Bytes of one batch at most while measuring; more would measure the memory of the machine.
_MOST_BATCH_BYTES = 256 * 2**20
#: Seconds that an env computes for at most: enough for all caches to be cold, as they are after a longer step. (After
#: 0.3 ms a batch of Melting Pot cost 1.5 ms besides the envs, where 2.7 were measured.)
_MOST_WORK_S = 1e-3
_LOOP = 20_000
#: How far turns usually are apart (their logarithms' standard deviation), and how many turns that counts for.
_USUAL_DEVIATION, _USUAL_COUNT = 0.1, 2
#: Seconds after which a worker has noted how long it was busy: it does so after it has answered.
_NOTED_S = 1e-3
#: Share of steps that end an episode, from which on resets are part of what a batch costs; rarer ones are not seen in
#: turns this short.
_ENDS_MATTER = 0.01


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Seconds of a batch besides the envs' own.

    Attributes:
        fixed_s: however few.
        per_worker_s: of each worker.
        per_env_s: of each env.
        exchange_factor: how much more it is when envs are sent and received, half of them at a time.
        serial_fixed_s, serial_per_env_s: the same for a `SerialEnv`, whose envs run in the caller's process.
        crowding: how many times as long the same work takes while `crowd` workers compute, 1.0 or more.
        crowding_error: standard error of its logarithm.
        crowd: so many of them.
        one_factor: how many times as fast as modelled the env itself was on one worker; see `comparing`.
        sync_factor: the same on `crowd` workers.
        mode_factors: the same of other modes than "sync", beside "sync".
        one_mode_factors: those on one worker; empty where that is so slow that it is never advised.
        are_of_steps: whether these are of steps alone: no env was reset meanwhile.
        others_share: of the machine, that others used while they were measured.
        modes_note: why they were not measured, in words.
    """

    fixed_s: float
    per_worker_s: float
    per_env_s: float
    serial_fixed_s: float
    serial_per_env_s: float
    exchange_factor: float = 1.0
    crowding: float = 1.0
    crowding_error: float = 0.0
    crowd: int = 1
    one_factor: float = 1.0
    sync_factor: float = 1.0
    mode_factors: Mapping[Mode, float] = field(default_factory=dict)
    one_mode_factors: Mapping[Mode, float] = field(default_factory=dict)
    are_of_steps: bool = False
    others_share: float = 0.0
    modes_note: str = ""

    def of(self, num_envs: float, num_workers: int) -> float:
        """Return seconds of a batch of `num_envs` on `num_workers` (0: a `SerialEnv`)."""
        if num_workers == 0:
            return self.serial_fixed_s + self.serial_per_env_s * num_envs
        return self.fixed_s + self.per_worker_s * num_workers + self.per_env_s * num_envs


def measure_overhead(
    spec: EnvSpec,
    machine: Machine,
    options: ExecutorOptions,
    progress: Callable[[float], None],
    step_s: float = 0.0,
    end_share: float = 0.0,
) -> Overhead:
    """Run envs that look like one of `spec` in a few settings, and fit.

    Args:
        spec: of one env.
        machine: that may be used.
        options: of the executor; what concerns the factory (preload, info keys) is left out.
        progress: called with the share that is done.
        step_s: seconds of a processor that a step of the env takes.
        end_share: steps that end an episode, of all.
    """
    end_share = end_share if end_share >= _ENDS_MATTER else 0.0
    idle, plain = EchoFactory(spec.to_plain(), 0, end_share), _plain_options(options)
    busy = EchoFactory(idle.spec, iterations_in(min(step_s, _MOST_WORK_S)), end_share)
    wide = min(8, max(1, int(machine.cores)))
    many = 8 if _bytes_of(spec) * 8 * wide < _MOST_BATCH_BYTES else 4
    settings = sorted({(1, 1), (1, many), (wide, wide), (wide, many * wide)})
    with contextlib.ExitStack() as stack:

        def open_one(workers: int, envs: int, factory: EchoFactory) -> _Runner:
            env: BatchedEnv = (
                FixedParallelEnv(envs, factory, num_workers=workers, seed=0, options=plain)
                if workers
                else SerialEnv(envs, factory, seed=0, options=plain)
            )
            return _Runner(stack.enter_context(env), workers, envs, is_throttled=machine.is_throttled)

        runners = [open_one(workers, envs, busy) for workers, envs in settings]
        serial = [open_one(0, envs, busy) for envs in (1, many)]
        apart = open_one(wide, 4 * wide, idle)
        for turn in range(_TURNS):
            progress(turn / (_TURNS + 2))
            for runner in (*runners, *serial):
                runner.take_turn()
        alone, crowd = (next(r for r in runners if (r.workers, r.envs) == (w, many * w)) for w in (1, wide))
        progress(_TURNS / (_TURNS + 2))
        for _ in range(_CROWD_TURNS if wide > 1 else 0):
            alone.take_turn()
            crowd.take_turn()
        factor = _exchange_factor(apart.env)
    rows = np.array([[1.0, runner.workers, runner.envs] for runner in runners])
    fixed, per_worker, per_env = fit(rows, np.array([runner.overhead_s for runner in runners]))
    slope = max(0.0, (serial[1].overhead_s - serial[0].overhead_s) / (many - 1))
    middle, error = typical_log(np.array(crowd.step_s) / np.array(alone.step_s))
    return Overhead(
        fixed_s=fixed,
        per_worker_s=per_worker,
        per_env_s=per_env,
        serial_fixed_s=max(0.0, serial[0].overhead_s - slope),
        serial_per_env_s=slope,
        exchange_factor=factor,
        crowding=max(1.0, float(np.exp(middle))),
        crowding_error=error,
        crowd=wide,
    )


def typical_log(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Return the median of some values' logarithms, and its standard error."""
    logs = np.log(values)
    middle = float(np.median(logs))
    if len(logs) < 2:
        return middle, float("inf")
    # Of normally distributed values: deviation from the median absolute one; the median's error from the mean's. That
    # of a few may be small by chance, so that of others before counts for some values.
    deviation = 1.4826 * float(np.median(np.abs(logs - middle)))
    variance = (len(logs) * deviation**2 + _USUAL_COUNT * _USUAL_DEVIATION**2) / (len(logs) + _USUAL_COUNT)
    return middle, 1.2533 * (variance / len(logs)) ** 0.5


def iterations_in(seconds: float) -> int:
    """Return how many iterations of an empty loop take so long on a processor of one's own."""
    if seconds <= 0:
        return 0
    took = []
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(_LOOP):
            pass
        took.append(time.perf_counter() - began)
    return max(1, round(seconds / float(np.median(took)) * _LOOP))


class BusyTime:
    """How long each worker of a pool is busy in a span.

    Workers note it after they have answered: both ends wait until they have. (Without that it is a batch too much or
    too little, which in a span of seven batches is more than all that a batch costs besides the envs.)
    """

    def __init__(self, pool: Any) -> None:
        self._words: np.ndarray = pool.slab.words["busy_ns"]
        self.begin()

    def begin(self) -> None:
        """Begin the span, after a batch."""
        time.sleep(_NOTED_S)
        self._before = self._words.copy()

    def end(self) -> np.ndarray:
        """Return seconds of each worker since then, float `[workers]`, after a batch."""
        time.sleep(_NOTED_S)
        return np.asarray((self._words - self._before) / 1e9)


class _Runner:
    """One setting, which takes its turns.

    Args:
        env: running.
        workers, envs: it has.
        is_throttled: whether a quota stops it now and then. What is computed is divided by the quota in the model, so
            it is measured in batches that were not stopped: each by itself, and their median is taken.

    Attributes:
        step_s: of each turn, seconds that a worker is busy for an env's step.
    """

    def __init__(self, env: BatchedEnv, workers: int, envs: int, *, is_throttled: bool) -> None:
        self.env, self.workers, self.envs = env, workers, envs
        self.step_s: list[float] = []
        self._rest: list[float] = []
        self._span_s, self._least = (0.0, 1) if is_throttled else (_TURN_S, _LEAST_BATCHES)
        self._driver = Driver(env, "sync")
        self._busy = BusyTime(env.engine.pool)

    @property
    def overhead_s(self) -> float:
        """Seconds of a batch less what its busiest worker was busy with, median over turns."""
        return max(1e-7, float(np.median(self._rest)))

    def take_turn(self) -> None:
        """Run for a turn's time."""
        self._driver.run(0.0, least=3)
        end = time.perf_counter() + _TURN_S
        spans = [self._span()]
        while time.perf_counter() < end or len(spans) * self._least < _LEAST_BATCHES:
            spans.append(self._span())
        rest_s, step_s = np.median(spans, axis=0)
        self._rest.append(max(0.0, float(rest_s)))
        self.step_s.append(max(1e-9, float(step_s)))

    def _span(self) -> tuple[float, float]:
        """Return seconds of a batch less what its busiest worker was busy with, and of an env's step."""
        self._busy.begin()
        count, spent_s = 0, 0.0
        while count < self._least or spent_s < self._span_s:
            spent_s += self._driver.run(0.0)[1]
            count += 1
        busy_s = self._busy.end()
        return (spent_s - float(busy_s.max())) / count, float(busy_s.sum()) / (count * self.envs)


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


def _exchange_factor(env: BatchedEnv) -> float:
    """Return how much more the parent has to do for envs that are sent and received, half of them at a time."""
    together = median_batch_s(Driver(env, "sync"), _TURN_S * 2, 20)
    apart = Driver(env, "first-k")
    apart.run(0.0, least=5)
    halves = 2 * median_batch_s(apart, _TURN_S * 2, 20)
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
