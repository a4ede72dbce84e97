"""Gymnasium's vector envs on the executor: `from envherd.gymnasium import AsyncVectorEnv`."""

from envherd.executor.facades import needing

with needing("envherd[gymnasium]", "gymnasium"):
    from gymnasium.vector import SyncVectorEnv

    from envherd.executor.facades.gymnasium.vector_env import (
        AsyncState,
        AsyncVectorEnv,
        installed,
        make_vec,
    )

__all__ = ["AsyncState", "AsyncVectorEnv", "SyncVectorEnv", "installed", "make_vec"]
