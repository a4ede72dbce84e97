"""TorchRL's `ParallelEnv` on the executor: `from envherd.torchrl import ParallelEnv`."""

from envherd.executor.facades.torchrl import (
    BuildFailed,
    ParallelEnv,
    SerialEnv,
    installed,
)

__all__ = ["BuildFailed", "ParallelEnv", "SerialEnv", "installed"]
