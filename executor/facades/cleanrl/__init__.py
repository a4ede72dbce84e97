"""CleanRL's scripts on the executor and on Gymnasium 1: `from envherd.cleanrl import gym`."""

from typing import TYPE_CHECKING

from envherd.executor.facades import lazy_names

if TYPE_CHECKING:
    from envherd.executor.facades.cleanrl.gym_029 import Gym, OldVectorEnv, gym

__all__ = ["Gym", "OldVectorEnv", "gym"]

__getattr__ = lazy_names(
    __name__, dict.fromkeys(__all__, "gym_029"), "envherd[gymnasium]", "gymnasium"
)
