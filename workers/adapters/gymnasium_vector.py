"""The adapter of Gymnasium's vector envs, for factories that name its autoreset mode."""

from envherd.workers.adapters.gymnasium.vector import GymnasiumVectorAdapter

__all__ = ["GymnasiumVectorAdapter"]
