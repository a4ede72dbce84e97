"""SB3's vectorised envs on the executor: `from envherd.sb3 import SubprocVecEnv`."""

from envherd.executor.facades.sb3 import (
    DummyVecEnv,
    ExecutorVecEnv,
    SubprocVecEnv,
    installed,
)

__all__ = ["DummyVecEnv", "ExecutorVecEnv", "SubprocVecEnv", "installed"]
