"""SB3's vectorised envs on the executor: `SubprocVecEnv` and `DummyVecEnv`."""

from envherd.executor.facades.sb3.vec_env import DummyVecEnv, EnvAttributeError, ExecutorVecEnv, SubprocVecEnv

__all__ = ["DummyVecEnv", "EnvAttributeError", "ExecutorVecEnv", "SubprocVecEnv"]
