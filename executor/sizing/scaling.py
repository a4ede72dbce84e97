"""What a setting makes: as it was run, or else predicted from the probe, also for another machine. Pure arithmetic.

A batch's time consists of the envs' and of the caller's time. The first is divided among the workers that have
processors; the second is constant (Amdahl's law). The model assumes cores as fast as this machine's, enough memory and
cache for all, and steps of equal length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from envherd.executor.machine.machine import Machine
from envherd.executor.sizing.limits import Limits
from envherd.executor.sizing.measurement import Measurement
from envherd.executor.sizing.rule import settings_for
from envherd.executor.sizing.search import Run
from envherd.executor.sizing.settings import Goal, Setting

#: Seconds of a batch in addition to the envs', and of these for each env (CartPole, 2 processors: 27 us with 8 envs in
#: SerialEnv, about 150 us with 64 envs on 2 workers; 2026-11-27).
_BATCH_S, _ENV_S = 30e-6, 1e-6


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted performance of a setting.

    Attributes:
        steps_per_s: env-steps per second, including the policy: measured, or scaled from the probe.
        batch_s: seconds of one step of all envs.
        policy_s: of these, the policy's.
        memory_bytes: of workers, helper and shared memory.
        start_s: until the executor is ready and its first reset is done.
        is_scaled: whether it was scaled from the probe; otherwise the setting was run.
    """

    steps_per_s: float
    batch_s: float
    policy_s: float
    memory_bytes: int
    start_s: float
    is_scaled: bool


class Scale:
    """Predicts settings on a machine from a probe and runs on the same machine or another.

    Args:
        measured: of the env.
        runs: of the search; may be empty.
        here: the machine on which they were made.
        limits: of the planned machine.
        policy_s: seconds of the policy for each batch.
    """

    def __init__(
        self, measured: Measurement, runs: Iterable[Run], here: Machine, limits: Limits, policy_s: float = 0.0
    ) -> None:
        is_here = here.cores == limits.machine.cores  # with the other programs that disturb this machine
        self._measured, self._limits, self._policy_s = measured, limits, policy_s
        self._lost_share = measured.contention if is_here else 0.0
        self._ran = {run.setting: run for run in runs if run.refusal is None and is_here}

    def predict(self, setting: Setting) -> Prediction:
        """Return the prediction of a setting."""
        run = self._ran.get(setting)
        batch_s = self._batch_s(setting) if run is None else setting.num_envs / run.steps_per_s
        return Prediction(
            steps_per_s=setting.num_envs / batch_s,
            batch_s=batch_s,
            policy_s=self._policy_s,
            memory_bytes=self._limits.memory_bytes(setting),
            start_s=self._limits.start_s(setting) if run is None else run.start_s,
            is_scaled=run is None,
        )

    def _batch_s(self, setting: Setting) -> float:
        one, workers = self._measured, max(1, setting.num_workers)
        step_s = one.step_mean_s if setting.reset_ahead else one.whole_step_s
        # Envs that wait let more workers run at the same time; threads of envs let fewer.
        cores = self._limits.machine.cores * one.step_mean_s / max(one.cpu_per_step_s, 1e-9)
        shared = max(1.0, workers / cores)
        envs_s = setting.most_per_worker * step_s * shared
        caller_s = _BATCH_S + setting.num_envs * _ENV_S
        return self._policy_s + (caller_s + envs_s) / max(0.1, 1 - self._lost_share)


def plan(scale: Scale, limits: Limits, goal: Goal) -> tuple[Setting, dict[Setting, Prediction]]:
    """Return the rule's choice for a machine on which nothing was run, and the prediction of it.

    Raises:
        DoesNotFit: one env, or the wanted number of envs, does not fit.
    """
    wanted = settings_for(limits.measured, limits.machine.cores, goal)
    for setting in wanted:
        fitting = limits.fitted(setting)
        if fitting is not None:
            return fitting, {fitting: scale.predict(fitting)}
    refusal = limits.refusal(replace(wanted[0], num_envs=max(1, wanted[0].num_workers)))
    assert refusal is not None
    raise limits.does_not_fit(refusal)
