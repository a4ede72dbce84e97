"""SB3's vectorised envs on the executor: `SubprocVecEnv`, `DummyVecEnv`, `installed`."""

from envherd.executor.facades.sb3.vec_env import (
    DummyVecEnv,
    ExecutorVecEnv,
    SubprocVecEnv,
    installed,
)

__all__ = ["DummyVecEnv", "ExecutorVecEnv", "SubprocVecEnv", "installed"]
