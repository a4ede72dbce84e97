"""Scale measurements to other numbers of envs and workers, and to another machine. Pure arithmetic.

A batch's time consists of the workers' busy time and of the caller's time. The first is divided among the workers that
have processors; the second is constant (Amdahl's law). The model assumes cores as fast as this machine's, and enough
memory and cache for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from envherd.executor.machine.machine import Machine
from envherd.executor.sizing.choosing import choose
from envherd.executor.sizing.limits import Limits
from envherd.executor.sizing.measurement import Measurement
from envherd.executor.sizing.search import Run
from envherd.executor.sizing.settings import WAITS, Goal, Setting, ladder, smaller


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted performance of a setting.

    Attributes:
        steps_per_s: env-steps per second, including the policy: measured, or scaled from a measurement.
        batch_s: seconds of one step of all envs.
        policy_s: of these, the policy's.
        memory_bytes: of workers, helper and shared memory.
        start_s: until the executor is ready and its first reset is done.
        is_scaled: whether it was scaled from other settings or another machine.
    """

    steps_per_s: float
    batch_s: float
    policy_s: float
    memory_bytes: int
    start_s: float
    is_scaled: bool


class Scale:
    """Predicts settings on a machine from runs on the same machine or another.

    Args:
        measured: of the env.
        runs: of the search.
        here: the machine on which they were made.
        limits: of the planned machine.
        policy_s: seconds of the policy for each batch.
    """

    def __init__(
        self, measured: Measurement, runs: Iterable[Run], here: Machine, limits: Limits, policy_s: float = 0.0
    ) -> None:
        self._waits = measured.waits_share > WAITS
        self._runs = [one for one in runs if one.refusal is None]
        self._here, self._limits, self._policy_s = here, limits, policy_s

    def predict(self, setting: Setting) -> Prediction | None:
        """Return the prediction of a setting; None if no similar setting was run."""
        there = self._limits.machine
        base = self.base(setting)
        if base is None:
            return None
        is_same = base.setting == setting and there.cores == self._here.cores
        rate = base.steps_per_s if is_same else self._scaled(base, setting)
        return Prediction(
            steps_per_s=rate,
            batch_s=setting.num_envs / rate,
            policy_s=self._policy_s,
            memory_bytes=self._limits.memory_bytes(setting),
            start_s=base.start_s if is_same else self._limits.start_s(setting),
            is_scaled=not is_same,
        )

    def base(self, setting: Setting) -> Run | None:
        """Return the run most similar to a setting: first by envs per worker, then by workers per core."""
        share = setting.num_workers / self._limits.machine.cores

        def distance(run: Run) -> tuple[bool, float, float]:
            own = run.setting.num_workers / self._here.cores
            of_workers = abs(math.log(share / own)) if setting.num_workers else 0.0
            of_envs = abs(math.log(setting.most_per_worker / run.setting.most_per_worker))
            return of_envs > 0, of_workers, of_envs

        kind = (setting.num_workers > 0, setting.mode, setting.reset_ahead)
        like = [
            run
            for run in self._runs
            if (run.setting.num_workers > 0, run.setting.mode, run.setting.reset_ahead) == kind
        ]
        return min(like, key=distance, default=None)

    def _scaled(self, base: Run, setting: Setting) -> float:
        if not setting.num_workers:
            return base.steps_per_s
        here = self._at_work(base.setting.num_workers, self._here.cores)
        there = self._at_work(setting.num_workers, self._limits.machine.cores)
        time_s = 1 / base.steps_per_s
        return 1 / (time_s * (1 - base.busy_share) + time_s * base.busy_share * here / there)

    def _at_work(self, num_workers: int, cores: float) -> float:
        return num_workers if self._waits else min(num_workers, cores)


def plan(scale: Scale, limits: Limits, goal: Goal) -> tuple[Setting, dict[Setting, Prediction]]:
    """Return the choice for a machine on which nothing was run, and the prediction of each setting there.

    Raises:
        DoesNotFit: one env, or the wanted number of envs, does not fit.
    """
    predicted: dict[Setting, Prediction] = {}

    def has_run(fewer: Setting) -> bool:
        """Return whether as few envs per worker were run: a batch's cost is not scaled to fewer."""
        base = scale.base(fewer)
        return base is not None and base.setting.most_per_worker == fewer.most_per_worker

    wanted = list(ladder(limits.measured, limits.machine.cores, goal))
    for setting in wanted:
        fitting = limits.fitted(setting)
        fewer = [one for one in smaller(fitting) if has_run(one)] if fitting and goal.num_envs is None else []
        for one in (fitting, *fewer):
            if one is not None and (made := scale.predict(one)) is not None:
                predicted[one] = made
    if not predicted:
        refusals = (limits.refusal(replace(one, num_envs=max(1, one.num_workers))) for one in wanted)
        raise limits.does_not_fit(next(one for one in refusals if one is not None))
    rates = {setting: made.steps_per_s for setting, made in predicted.items()}
    return choose([rates], goal.target_steps_per_s), predicted
