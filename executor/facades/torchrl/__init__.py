"""TorchRL's `ParallelEnv` on the executor; `SerialEnv` is TorchRL's own."""

from typing import TYPE_CHECKING

from envherd.executor.facades import lazy_names

if TYPE_CHECKING:
    from torchrl.envs import SerialEnv

    from envherd.executor.facades.torchrl.parallel_env import (
        BuildFailed,
        ParallelEnv,
        installed,
    )

__all__ = ["BuildFailed", "ParallelEnv", "SerialEnv", "installed"]

__getattr__ = lazy_names(
    __name__, dict.fromkeys(__all__, "parallel_env"), "envherd[torchrl]", "torchrl"
)
