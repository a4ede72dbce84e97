"""Predicted against measured: the chosen setting and those around it, run for real."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from envherd.executor.options import ExecutorOptions
from envherd.executor.parallel import ParallelEnv
from envherd.executor.sizing.driving import Driver
from envherd.executor.sizing.model import Prediction, Setting
from envherd.workers.processes import memory_of

#: Batches that are not counted, and batches at least that are.
_WARM_UP, _LEAST = 3, 5


@dataclass(frozen=True, kw_only=True)
class Check:
    """One setting, predicted and run.

    Attributes:
        setting, predicted: as decided.
        steps_per_s: env-steps per second that were made.
        memory_bytes: of workers, helper and shared memory after that.
        start_s: until the executor was ready and its envs reset.
        others_share: of the machine, that processes which are not ours used meanwhile; from 0.1 on, what was
            measured says more about them than about the setting.
    """

    setting: Setting
    predicted: Prediction
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
            "predicted_memory_bytes": self.predicted.memory_bytes,
            "measured_memory_bytes": self.memory_bytes,
            "predicted_start_s": self.predicted.start_s,
            "measured_start_s": self.start_s,
            "others_share": self.others_share,
        }


def check(
    setting: Setting,
    predicted: Prediction,
    make_env: Callable[..., Any],
    *,
    span_s: float = 2.0,
    policy_s: float = 0.0,
    options: ExecutorOptions | None = None,
) -> Check:
    """Run a setting for `span_s` seconds and return what it did beside what was predicted."""
    began = time.monotonic()
    with ParallelEnv(setting.num_envs, make_env, num_workers=setting.num_workers, seed=0, options=options) as env:
        driver = Driver(env, setting.mode, policy_s)
        start_s = time.monotonic() - began
        driver.run(span_s / 5, least=_WARM_UP)
        pids = [worker.pid for worker in env.statistics().workers]
        machine, own = _busy_s(), _own_cpu_s(pids)
        steps, seconds = driver.run(span_s, least=_LEAST)
        others_s = max(0.0, _busy_s() - machine - (_own_cpu_s(pids) - own))
        memory = pool_bytes(pids)
        driver.finish()
    return Check(
        setting=setting,
        predicted=predicted,
        steps_per_s=steps / seconds,
        memory_bytes=memory,
        start_s=start_s,
        others_share=min(1.0, others_s / seconds / (psutil.cpu_count() or 1)),
    )


def _busy_s() -> float:
    """Return processor seconds that the machine was not idle for."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _own_cpu_s(pids: list[int]) -> float:
    own = time.process_time()
    for pid in pids:
        times = psutil.Process(pid).cpu_times()
        own += times.user + times.system
    return own


def pool_bytes(pids: list[int]) -> int:
    """Return bytes of workers and of the helper that forked them, shared ones counted once."""
    helper = psutil.Process(pids[0]).ppid()
    return memory_of(helper)["pss"]
