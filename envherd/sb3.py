"""SB3's vectorised envs on the executor: `from envherd.sb3 import SubprocVecEnv`."""

from typing import TYPE_CHECKING

from envherd import moved
from envherd.executor.facades import needing

with needing("envherd[sb3]", "stable_baselines3", "gymnasium"):
    from stable_baselines3.common.vec_env import DummyVecEnv

    from envherd.executor.facades.sb3.vec_env import SubprocVecEnv, installed

__all__ = ["DummyVecEnv", "SubprocVecEnv", "installed"]

if not TYPE_CHECKING:  # to a type checker, unknown names remain unknown
    __getattr__ = moved.refuser(__name__, {"ExecutorVecEnv": "SubprocVecEnv"})
