"""The portable pool next to vector envs that `multiprocessing` spawns too: batches per second, in alternating turns.

    python -m benchmarks.portable

All have 8 envs. Gymnasium's and Stable-Baselines3's have a process for each env, the executor has one for each core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

NUM_ENVS, NUM_TURNS, TURN_S = 8, 5, 1.0


class WaitingEnv(gym.Env[np.ndarray, int]):
    """Computes for some seconds in each step.

    Args:
        step_s: seconds.
    """

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed, options=options)
        return np.zeros(4, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
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


def contenders(make: Make) -> dict[str, tuple[Any, Callable[[], None]]]:
    """Return name -> vector env and the function that steps it."""
    from stable_baselines3.common.vec_env import (
        SubprocVecEnv,  # imported here: the other libraries' workers import this
    )

    from envherd.executor import ExecutorOptions
    from envherd.executor.facades.gymnasium import AsyncVectorEnv

    many = [make] * NUM_ENVS
    envs = {
        "envherd, portable": AsyncVectorEnv(many, options=ExecutorOptions(start_method="portable")),
        "envherd": AsyncVectorEnv(many),
        "Gymnasium AsyncVectorEnv": gym.vector.AsyncVectorEnv(many, context="spawn"),
        "SB3 SubprocVecEnv": SubprocVecEnv(many, start_method="spawn"),
    }
    return {name: (env, _stepped(env)) for name, env in envs.items()}


def measure(make: Make) -> None:
    """Print the median rate of each, and the portable pool's over it."""
    envs = contenders(make)
    rates: dict[str, list[float]] = {name: [] for name in envs}
    try:
        for _ in range(NUM_TURNS):
            for name, (_, step) in envs.items():
                count, began = 0, time.perf_counter()
                while (took := time.perf_counter() - began) < TURN_S:
                    step()
                    count += 1
                rates[name].append(count / took)
    finally:
        for env, _ in envs.values():
            env.close()
    medians = {name: statistics.median(own) for name, own in rates.items()}
    for name, rate in medians.items():
        print(f"{name:26} {rate:8.0f} batches/s  {medians['envherd, portable'] / rate:5.2f}")


if __name__ == "__main__":
    for step_s in (None, 200e-6):
        print("CartPole" if step_s is None else f"{step_s * 1e6:.0f} us a step")
        measure(Make(step_s))
