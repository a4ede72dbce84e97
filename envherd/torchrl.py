"""TorchRL's `ParallelEnv` on the executor: `from envherd.torchrl import ParallelEnv`."""

from envherd.executor.facades import needing

with needing("envherd[torchrl]", "torchrl"):
    from torchrl.envs import SerialEnv

    from envherd.executor.facades.torchrl.parallel_env import (
        BuildFailed,
        ParallelEnv,
        installed,
    )

__all__ = ["BuildFailed", "ParallelEnv", "SerialEnv", "installed"]
