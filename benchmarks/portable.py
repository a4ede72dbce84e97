"""The portable pool next to vector envs that `multiprocessing` spawns too: batches per second, in alternating turns.

    python -m benchmarks.portable

All have 8 envs. Gymnasium's and Stable-Baselines3's have a process for each env, the executor has one for each core. On
a busy machine more processes get more of the processors, so compare the processor time too.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from envherd.workers.processes import cpu_ns, descendants

NUM_ENVS, NUM_TURNS, TURN_S = 8, 5, 1.0


class WaitingEnv(gym.Env[np.ndarray, int]):
    """Computes for some seconds in each step.

    Args:
        step_s: seconds.
    """

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space: Any = gym.spaces.Discrete(2)

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Begin an episode."""
        super().reset(seed=seed, options=options)
        return np.zeros(4, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Compute; episodes do not end."""
        del action
        end = time.perf_counter() + self._step_s
        while time.perf_counter() < end:
            pass
        return np.zeros(4, np.float32), 0.0, False, False, {}


class Make:
    """Builds one env; can be pickled.

    Args:
        step_s: seconds of a step; None for a CartPole.
    """

    def __init__(self, step_s: float | None) -> None:
        self._step_s = step_s

    def __call__(self) -> gym.Env[Any, Any]:
        return gym.make("CartPole-v1") if self._step_s is None else WaitingEnv(self._step_s)


def _stepped(env: Any) -> Callable[[], None]:
    """Return a function that steps a vector env of Gymnasium or Stable-Baselines3."""
    actions = np.arange(NUM_ENVS) % 2
    env.reset()
    return lambda: env.step(actions) and None


class Contender:
    """A vector env under measurement.

    Args:
        name: in the report.
        make: starts it.

    Attributes:
        rates: batches per second of each turn.
        cpu_us: processor time per batch, of its processes and of this one, in microseconds, of each turn.
    """

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        before = set(descendants(os.getpid()))
        self.name, self.env = name, make()
        self._pids = [os.getpid(), *(set(descendants(os.getpid())) - before)]
        self._step = _stepped(self.env)
        self.rates: list[float] = []
        self.cpu_us: list[float] = []

    def measure(self) -> None:
        """Step it for one turn."""
        count, began, cpu = 0, time.perf_counter(), sum(map(cpu_ns, self._pids))
        while (took := time.perf_counter() - began) < TURN_S:
            self._step()
            count += 1
        self.rates.append(count / took)
        self.cpu_us.append((sum(map(cpu_ns, self._pids)) - cpu) / 1e3 / count)


def contenders(make: Make) -> list[Contender]:
    """Return the vector envs, started."""
    from stable_baselines3.common.vec_env import (
        SubprocVecEnv,  # imported here: the other libraries' workers import this
    )

    from envherd.executor import ExecutorOptions
    from envherd.executor.facades.gymnasium import AsyncVectorEnv

    many = [make] * NUM_ENVS
    return [
        Contender("envherd, portable", lambda: AsyncVectorEnv(many, options=ExecutorOptions(start_method="portable"))),
        Contender("envherd", lambda: AsyncVectorEnv(many)),
        Contender("Gymnasium AsyncVectorEnv", lambda: gym.vector.AsyncVectorEnv(many, context="spawn")),
        Contender("SB3 SubprocVecEnv", lambda: SubprocVecEnv(many, start_method="spawn")),
    ]


def measure(make: Make) -> None:
    """Print the median rate and processor time of each, and the portable pool's advantage, with that of the turns."""
    envs = contenders(make)
    try:
        for _ in range(NUM_TURNS):
            for one in envs:
                one.measure()
    finally:
        for one in envs:
            one.env.close()
    first_rate, first_cpu = statistics.median(envs[0].rates), statistics.median(envs[0].cpu_us)
    for one in envs:
        rate, cpu = statistics.median(one.rates), statistics.median(one.cpu_us)
        ratios = [mine / its for mine, its in zip(envs[0].rates, one.rates, strict=True)]  # of the same turn
        print(
            f"{one.name:26} {rate:8.0f} batches/s ({first_rate / rate:4.2f}; {min(ratios):4.2f} to {max(ratios):4.2f})"
            f"  {cpu:8.0f} us of processor a batch ({cpu / first_cpu:4.2f})",
            flush=True,
        )


if __name__ == "__main__":
    for step_s in (None, 200e-6):
        print("CartPole" if step_s is None else f"{step_s * 1e6:.0f} us a step")
        measure(Make(step_s))
