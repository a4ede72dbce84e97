"""What a setting would do, predicted: env-steps per second, memory, start-up. Pure arithmetic.

A synchronous batch is the executor's own time, then the policy's, then the slowest worker: a worker steps its
envs one after the other, so its time is a sum of as many step times as it has envs, resets among them, and the
batch waits for the largest of these sums. All processors together cannot do more than they can, whatever the
workers' number. With first-K no batch waits; with two groups the policy acts on one while the other steps. All that is
multiplied by how much of it came true when the env itself was run (`Overhead.sync_factor`, `mode_factors`); where no
env was reset then, resets take as long as they did in the probe.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from envherd.executor.machine.machine import Machine
from envherd.executor.sizing.measurement import Measurement, slab_bytes
from envherd.executor.sizing.modes import Mode
from envherd.executor.sizing.overhead import Overhead

#: What a second hyper-thread adds to a core that computes, where a machine has such.
SMT_GAIN = 0.3
#: Random sums that stand for a worker's time, and envs of a worker at most.
_DRAWS, MOST_PER_WORKER = 4000, 64
#: Descriptors the executor keeps open, of its own and for each worker.
FILES_FIXED, FILES_PER_WORKER = 6, 3


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How to run: so many envs on so many workers (0: in the caller's process), in one of the modes."""

    num_envs: int
    num_workers: int
    mode: Mode = "sync"

    @property
    def most_per_worker(self) -> int:
        """Envs of the worker that has most."""
        return -(-self.num_envs // max(1, self.num_workers))


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a setting would do.

    Attributes:
        steps_per_s: env-steps per second, policy included.
        batch_s: seconds of a batch of all envs.
        overhead_s: of these, the executor's own.
        policy_s: of these, the policy's.
        slowest_s: of these, until the slowest worker has its rows.
        mean_s: until an average worker has.
        compute_s: that the processors need for the envs' work if nothing is lost.
        memory_bytes: of workers, helper and shared memory.
        start_s: until the executor is ready, and its first reset done.
    """

    steps_per_s: float
    batch_s: float
    overhead_s: float
    policy_s: float
    slowest_s: float
    mean_s: float
    compute_s: float
    memory_bytes: int
    start_s: float


class Model:
    """Predicts settings of one env on one machine.

    Args:
        measured: of the env.
        overhead: of the executor.
        machine: what may be used.
        policy_s: seconds that the policy takes for a batch, however large.
        num_frames: of the executor's ring.
    """

    def __init__(
        self, measured: Measurement, overhead: Overhead, machine: Machine, *, policy_s: float = 0.0, num_frames: int = 4
    ) -> None:
        self.measured = measured
        self.overhead = overhead
        self.machine = machine
        self.policy_s = policy_s
        self.num_frames = num_frames
        one, more_envs, more_workers = (
            slab_bytes(measured.spec, envs, workers, num_frames) for envs, workers in ((64, 1), (128, 1), (64, 64))
        )
        self._slab_per_env = (more_envs - one) / 64
        self._slab_per_worker = (more_workers - one) / 63
        self._slab_fixed = max(0.0, one - 64 * self._slab_per_env - self._slab_per_worker)
        self._known: dict[Setting, Prediction] = {}
        self._sums = self._sorted_sums()
        self.busy_per_step_s = self.busy_s(1)
        self._stepping: Model | None = None
        if overhead.are_of_steps and measured.end_share > 0:
            self._stepping = self._without_resets()

    def _without_resets(self) -> Model:
        """Return the model of the same env if its episodes never ended."""
        steps = replace(self.measured, end_share=0.0, episode_steps=0)
        plain = replace(self.overhead, are_of_steps=False)
        return Model(steps, plain, self.machine, policy_s=self.policy_s, num_frames=self.num_frames)

    @property
    def cores(self) -> float:
        """Processors' worth of computing: the quota's; hyper-threads for what they add, unless that was measured."""
        machine = self.machine
        logical = len(machine.cpus)
        worth = machine.physical_cores + SMT_GAIN * (logical - machine.physical_cores)
        if self.overhead.crowd >= logical:  # then it is in `crowding_of`
            worth = float(logical)
        quota = machine.cgroup.cpu_quota
        return worth if quota is None else min(worth, quota)

    def busy_s(self, per_worker: int) -> float:
        """Return the mean seconds that an env's step, its share of resets too, takes a worker of so many envs."""
        measured = self.measured
        return measured.step_s * self._slowed(per_worker) + measured.end_share * measured.reset_s

    def cpu_s(self, per_worker: int) -> float:
        """Return the processor seconds of the same."""
        measured = self.measured
        return measured.cpu_per_step_s * self._slowed(per_worker) + measured.end_share * measured.reset_cpu_s

    def _slowed(self, per_worker: int) -> float:
        """Return how many times as long as in a loop a step takes in a worker of so many envs."""
        one = self.measured
        neighbours = min(1.0, max(0, per_worker - 1) / max(1, one.together_envs - 1))
        return one.paused_factor + (one.together_factor - one.paused_factor) * neighbours

    def crowding_of(self, num_workers: int) -> float:
        """Return how many times as long a step takes while so many workers compute; what waits does not wait longer."""
        overhead = self.overhead
        if overhead.crowd <= 1 or num_workers <= 1:
            return 1.0
        share = min(1.0, self.cpu_s(1) / max(1e-12, self.busy_per_step_s))
        crowd = (min(num_workers, overhead.crowd, len(self.machine.cpus)) - 1) / (overhead.crowd - 1)
        return 1.0 + (overhead.crowding - 1.0) * crowd * share

    def slowest_s(self, num_envs: int, num_workers: int) -> float:
        """Return the expected seconds until the slowest of the workers has stepped its envs once."""
        per_worker = min(-(-num_envs // num_workers), MOST_PER_WORKER)
        sums = self._sums[per_worker - 1]
        ranks = np.linspace(0, 1, len(sums) + 1) ** num_workers
        slowest_s = float((sums * np.diff(ranks)).sum())
        if self.measured.has_one_length:  # envs that are stepped together end together
            slowest_s += per_worker * self.measured.end_share * self.measured.reset_s
        return slowest_s * self.crowding_of(num_workers)

    def predict(self, setting: Setting) -> Prediction:
        """Return what a setting would do."""
        if setting not in self._known:
            self._known[setting] = self._predict(setting)
        return self._known[setting]

    def _predict(self, setting: Setting) -> Prediction:
        factor = self._factor(setting)
        batch_s, slowest_s = self.times(setting, factor)
        if self._stepping is not None:
            # Steps by the factor, and what resets add as modelled.
            with_resets, without = self.times(setting, 1.0), self._stepping.times(setting, 1.0)
            true = self._stepping.times(setting, factor)
            batch_s, slowest_s = (
                one + max(0.0, more - less) for one, more, less in zip(true, with_resets, without, strict=True)
            )
        own = self.overhead.of(setting.num_envs, setting.num_workers) / factor
        return self._prediction(setting, setting.num_envs / batch_s, own, slowest_s)

    def ahead_steps_per_s(self, num_envs: int) -> float:
        """Return env-steps per second of synchronous batches with `reset_ahead`, a worker and a spare for each env.

        A batch waits for steps only; but an episode lasts as long as it takes to reset the env for the next one, and
        the processors make both.
        """
        setting, measured = Setting(num_envs=num_envs, num_workers=num_envs), self.measured
        steps_s = self._without_resets().predict(setting).batch_s
        reset_s = measured.end_share * measured.reset_s * self.crowding_of(2 * num_envs)
        least_s = self._least_s(setting, num_envs, self.overhead.of(num_envs, num_envs)) / self._factor(setting)
        return num_envs / max(steps_s, reset_s, least_s)

    def times(self, setting: Setting, factor: float) -> tuple[float, float]:
        """Return the seconds of a batch of all envs, and of these until the slowest worker has its rows.

        Args:
            setting: how they are run.
            factor: how many times as fast as modelled they are.
        """
        envs, workers = setting.num_envs, setting.num_workers
        own = self.overhead.of(envs, workers)
        if workers == 0:
            work_s = envs * self.busy_s(envs)
            return max(own + self.policy_s + work_s, self._least_s(setting, envs, own)), work_s
        slowest_s = self._until_done(setting, envs) / factor
        if setting.mode == "two-groups":
            return envs / self._two_groups(setting, factor), slowest_s
        if setting.mode == "first-k":
            return envs / self._first_k(setting, factor), slowest_s
        least_s = self._least_s(setting, envs, own) / factor
        return max(own / factor + self.policy_s + slowest_s, least_s), slowest_s

    def _factor(self, setting: Setting) -> float:
        """Return how many times as fast as modelled a setting is, by what was measured with the env itself."""
        overhead = self.overhead
        if setting.num_workers == 0:
            return 1.0
        like = min(1.0, (setting.num_workers - 1) / (overhead.crowd - 1)) if overhead.crowd > 1 else 1.0
        sync = overhead.one_factor ** (1 - like) * overhead.sync_factor**like
        mode = overhead.mode_factors.get(setting.mode, 1.0)
        # What several workers gain (none waits for the slowest) one does not.
        of_one = overhead.one_mode_factors.get(setting.mode, min(1.0, mode))
        return float(sync * of_one ** (1 - like) * mode**like)

    def _until_done(self, setting: Setting, count: int) -> float:
        """Return seconds of the envs' part of a batch of `count`: the slowest worker's, or what processors can do."""
        return max(self.slowest_s(count, min(setting.num_workers, count)), self._least_s(setting, count, 0.0))

    def _least_s(self, setting: Setting, count: int, own: float) -> float:
        """Return the seconds that all processors together need for `count` envs, and for the executor's own work.

        The policy is taken to run on a GPU.
        """
        crowding = self.crowding_of(max(1, setting.num_workers))
        return (own + count * self.cpu_s(setting.most_per_worker) * crowding) / self.cores

    def _two_groups(self, setting: Setting, factor: float) -> float:
        half = max(1, setting.num_envs // 2)
        own = self.overhead.of(half, setting.num_workers) * self.overhead.exchange_factor
        least_s = self._least_s(setting, half, own) / factor
        parent_s = own / factor + self.policy_s
        group_s = self._until_done(setting, half) / factor
        period_s = max(2 * parent_s, 2 * group_s, parent_s + group_s, 2 * least_s)
        return 2 * half / period_s

    def _first_k(self, setting: Setting, factor: float) -> float:
        envs, workers = setting.num_envs, setting.num_workers
        count = max(1, envs // 2)
        own = self.overhead.of(count, workers) * self.overhead.exchange_factor
        parent_s = own / factor + self.policy_s
        busy_s = self.busy_s(setting.most_per_worker) * self.crowding_of(workers) / factor
        rates = (
            workers / busy_s,
            count / parent_s,
            envs / (setting_cycle(busy_s, envs, workers) + parent_s),
            count / (self._least_s(setting, count, own) / factor),
        )
        return min(rates)

    def _prediction(self, setting: Setting, rate: float, own: float, slowest_s: float) -> Prediction:
        workers = max(1, setting.num_workers)
        return Prediction(
            steps_per_s=rate,
            batch_s=setting.num_envs / rate,
            overhead_s=own,
            policy_s=self.policy_s,
            slowest_s=slowest_s,
            mean_s=setting.num_envs / workers * self.busy_s(setting.most_per_worker),
            compute_s=setting.num_envs * self.cpu_s(setting.most_per_worker) / self.cores,
            memory_bytes=self.memory_bytes(setting.num_envs, setting.num_workers),
            start_s=self.start_s(setting),
        )

    def memory_bytes(self, num_envs: int, num_workers: int) -> int:
        """Return bytes of workers, helper and shared memory; nothing of the learner's."""
        measured = self.measured
        slab = int(self._slab_fixed + self._slab_per_env * num_envs + self._slab_per_worker * num_workers)
        if num_workers == 0:
            return measured.first_env_bytes + (num_envs - 1) * measured.further_env_bytes + slab
        first = num_workers * (measured.worker_bytes + measured.first_env_bytes)
        return measured.shared_bytes + first + (num_envs - num_workers) * measured.further_env_bytes + slab

    def start_s(self, setting: Setting) -> float:
        """Return seconds until the executor is ready and its envs are reset."""
        measured = self.measured
        rest = setting.most_per_worker - 1
        one = measured.build_s + measured.first_reset_s + rest * (measured.build_further_s + measured.reset_s)
        return measured.start_s + one * max(1.0, setting.num_workers / self.cores)

    def _sorted_sums(self) -> np.ndarray:
        """Return times of a worker that steps 1, 2, ... envs once each: `[MOST_PER_WORKER, draws]`, each row sorted."""
        measured = self.measured
        rng = np.random.default_rng(0)
        shape = (_DRAWS, MOST_PER_WORKER)
        sums = rng.choice(measured.step_samples, shape).cumsum(1)
        sums *= [self._slowed(count) for count in range(1, MOST_PER_WORKER + 1)]
        if measured.end_share > 0 and not measured.has_one_length:
            resets = measured.reset_samples if len(measured.reset_samples) else np.array([measured.first_reset_s])
            sums += ((rng.random(shape) < measured.end_share) * rng.choice(resets, shape)).cumsum(1)
        return np.sort(sums.T, axis=1)


def setting_cycle(busy_s: float, envs: int, workers: int) -> float:
    """Return seconds that a step takes an env of a busy worker: its neighbours are stepped before it."""
    return busy_s * max(1.0, envs / workers / 2)
