"""Gymnasium's vector envs on the executor: `AsyncVectorEnv`, `SyncVectorEnv`, `make_vec`, `installed`."""

from typing import TYPE_CHECKING

from envherd.executor.facades import lazy_names

if TYPE_CHECKING:
    from envherd.executor.facades.gymnasium.vector_env import (
        AsyncState,
        AsyncVectorEnv,
        SyncVectorEnv,
        installed,
        make_vec,
    )

__all__ = ["AsyncState", "AsyncVectorEnv", "SyncVectorEnv", "installed", "make_vec"]

__getattr__ = lazy_names(
    __name__, dict.fromkeys(__all__, "vector_env"), "envherd[gymnasium]", "gymnasium"
)
