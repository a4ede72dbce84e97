"""CleanRL's scripts on the executor: `from envherd.cleanrl import gym`."""

from envherd.executor.facades import needing

with needing("envherd[gymnasium]", "gymnasium"):
    from envherd.executor.facades.cleanrl.gym_029 import Gym, OldVectorEnv, gym

__all__ = ["Gym", "OldVectorEnv", "gym"]
