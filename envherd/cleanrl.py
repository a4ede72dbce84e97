"""CleanRL's scripts on the executor: `from envherd.cleanrl import gym`."""

from envherd.executor.facades.cleanrl import Gym, OldVectorEnv, gym

__all__ = ["Gym", "OldVectorEnv", "gym"]
