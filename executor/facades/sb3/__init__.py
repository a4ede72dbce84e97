"""SB3's vectorised envs on the executor: `SubprocVecEnv`, `DummyVecEnv`, `installed`."""

from typing import TYPE_CHECKING

from envherd.executor.facades import lazy_names

if TYPE_CHECKING:
    from envherd.executor.facades.sb3.vec_env import (
        DummyVecEnv,
        ExecutorVecEnv,
        SubprocVecEnv,
        installed,
    )

__all__ = ["DummyVecEnv", "ExecutorVecEnv", "SubprocVecEnv", "installed"]

__getattr__ = lazy_names(
    __name__,
    dict.fromkeys(__all__, "vec_env"),
    "envherd[sb3]",
    "stable_baselines3",
    "gymnasium",
)
