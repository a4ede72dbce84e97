"""Predicted against measured: the chosen setting and those around it, run for real."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import psutil

from envherd.executor.fixed import FixedParallelEnv
from envherd.executor.options import ExecutorOptions
from envherd.executor.sizing.driving import Driver
from envherd.executor.sizing.measurement import Measurement
from envherd.executor.sizing.model import Model, Prediction, Setting
from envherd.executor.sizing.others import OthersShare
from envherd.workers.processes import memory_of

#: Batches that are not counted, and batches at least that are.
_WARM_UP, _LEAST = 3, 5
#: Whole episodes are run where resets take more than this share of a step's time, and where that takes no longer.
_RESETS_MATTER, _MOST_S = 0.05, 30.0
#: Where they do not all have one length: resets that are enough to compare, and seconds to wait for them at most.
_MANY_RESETS, _MOST_SPAN_S = 10, 15.0


@dataclass(frozen=True, kw_only=True)
class Check:
    """One setting, predicted and run.

    Attributes:
        setting, predicted: as decided.
        steps: env-steps that were made.
        resets: while they were made.
        steps_per_s: env-steps per second that were made.
        memory_bytes: of workers, helper and shared memory after that.
        start_s: until the executor was ready and its envs reset.
        others_share: of the machine, that processes which are not ours used meanwhile; from 0.1 on, what was
            measured says more about them than about the setting.
    """

    setting: Setting
    predicted: Prediction
    steps: int
    resets: int
    steps_per_s: float
    memory_bytes: int
    start_s: float
    others_share: float

    def to_plain(self) -> dict[str, Any]:
        """Return it as documented in docs/sizing.md."""
        return {
            **asdict(self.setting),
            "predicted_steps_per_s": self.predicted.steps_per_s,
            "measured_steps_per_s": self.steps_per_s,
            "steps": self.steps,
            "resets": self.resets,
            "predicted_memory_bytes": self.predicted.memory_bytes,
            "measured_memory_bytes": self.memory_bytes,
            "predicted_start_s": self.predicted.start_s,
            "measured_start_s": self.start_s,
            "others_share": self.others_share,
        }


class Trial:
    """One setting, running: it takes turns until it is closed.

    Args:
        setting, predicted: see `Check`.
        make_env: see `ParallelEnv`.
        policy_s: seconds of the policy for each batch.
        options: the executor's.
    """

    def __init__(
        self,
        setting: Setting,
        predicted: Prediction,
        make_env: Callable[..., Any],
        *,
        policy_s: float = 0.0,
        options: ExecutorOptions | None = None,
    ) -> None:
        self._setting, self._predicted = setting, predicted
        began = time.monotonic()
        self._env = FixedParallelEnv(
            setting.num_envs, make_env, num_workers=setting.num_workers, seed=0, options=options
        )
        try:
            self._driver = Driver(self._env, setting.mode, policy_s)
            self._start_s = time.monotonic() - began
            self._pids = [worker.pid for worker in self._env.statistics().workers]
            self._others = OthersShare(self._pids)
            self._resets: np.ndarray = self._env.engine.pool.slab.words["resets"]
        except BaseException:
            self._env.close()
            raise

    def turn(self, span_s: float, episode_steps: int = 1) -> Check:
        """Run for a while, a fifth of it unmeasured, and return what came of it; see `Driver.run`."""
        driver = self._driver
        driver.run(span_s / 5, least=_WARM_UP)
        resets = int(self._resets.sum())
        self._others.begin()
        steps, seconds = driver.run(span_s, _LEAST, episode_steps)
        others_share = self._others.end()
        return Check(
            setting=self._setting,
            predicted=self._predicted,
            steps=steps,
            resets=int(self._resets.sum()) - resets,
            steps_per_s=steps / seconds,
            memory_bytes=pool_bytes(self._pids),
            start_s=self._start_s,
            others_share=others_share,
        )

    def close(self) -> None:
        """Receive what is still out, and end."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._env.close)
            self._driver.finish()


def check(setting: Setting, predicted: Prediction, make_env: Callable[..., Any], **kwargs: Any) -> Check:
    """Run a setting and return what it did beside what was predicted.

    Args:
        setting: see `Check`.
        predicted: see `Check`.
        make_env: see `ParallelEnv`.
        **kwargs: `span_s` (2.0) and `episode_steps` (1), see `Driver.run`; the rest is `Trial`'s.
    """
    span_s, episode_steps = kwargs.pop("span_s", 2.0), kwargs.pop("episode_steps", 1)
    with contextlib.closing(Trial(setting, predicted, make_env, **kwargs)) as trial:
        return trial.turn(span_s, episode_steps)


def given_resets(one: Check, model: Model) -> Check:
    """Return a check that compares with what is predicted for as many resets as there were.

    How many there are in a few seconds is chance where episodes are long, and decides the speed where resets are.
    """
    measured = replace(model.measured, end_share=one.resets / one.steps)
    given = Model(measured, model.overhead, model.machine, policy_s=model.policy_s, num_frames=model.num_frames)
    return replace(one, predicted=given.predict(one.setting))


def whole_episodes(measured: Measurement, predicted: Prediction) -> int:
    """Return how many steps an episode has, where settings have to be compared over whole ones; 1 elsewhere."""
    is_short = measured.episode_steps * predicted.batch_s <= _MOST_S
    return measured.episode_steps if measured.has_one_length and _resets_matter(measured) and is_short else 1


def span_with_resets(measured: Measurement, predicted: Prediction, least_s: float) -> float:
    """Return for how many seconds to run a setting: long enough for some resets, where they matter."""
    if not _resets_matter(measured):
        return least_s
    needed_s = _MANY_RESETS / (measured.end_share * predicted.steps_per_s)
    return max(least_s, min(_MOST_SPAN_S, needed_s))


def _resets_matter(measured: Measurement) -> bool:
    return measured.end_share * measured.reset_s > _RESETS_MATTER * measured.step_s


def pool_bytes(pids: list[int]) -> int:
    """Return bytes of workers and of the helper that forked them, shared ones counted once."""
    helper = psutil.Process(pids[0]).ppid()
    return memory_of(helper)["pss"]
