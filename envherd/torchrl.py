"""TorchRL's `ParallelEnv` on the executor: `from envherd.torchrl import ParallelEnv`."""

from typing import TYPE_CHECKING

from envherd import moved
from envherd.executor.facades import needing

with needing("envherd[torchrl]", "torchrl"):
    from torchrl.envs import SerialEnv

    from envherd.executor.facades.torchrl.parallel_env import (
        BuildFailed,
        ParallelEnv,
        installed,
    )

__all__ = ["BuildFailed", "ParallelEnv", "SerialEnv", "installed"]

if not TYPE_CHECKING:  # to a type checker, unknown names remain unknown
    __getattr__ = moved.refuser(
        __name__,
        {
            "AsyncEnvPool": "envherd.ParallelEnv with send and recv, or envherd.AsyncCollector (docs/torchrl.md)"
        },
    )
