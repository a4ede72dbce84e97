"""SB3's vectorised envs on the executor: `SubprocVecEnv`, `DummyVecEnv`, `installed`."""

from envherd.executor.facades import needing

with needing("envherd[sb3]", "stable_baselines3", "gymnasium"):
    from envherd.executor.facades.sb3.vec_env import (
        DummyVecEnv,
        ExecutorVecEnv,
        SubprocVecEnv,
        installed,
    )

__all__ = ["DummyVecEnv", "ExecutorVecEnv", "SubprocVecEnv", "installed"]
