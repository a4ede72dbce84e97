"""TorchRL's `ParallelEnv` on the executor; `SerialEnv` is TorchRL's own."""

import contextlib

from envherd.executor.facades import needing
from envherd.executor.facades.installing import replaced

with needing("envherd[torchrl]", "torchrl"):
    import torchrl.envs
    from torchrl.envs import SerialEnv

    from envherd.executor.facades.torchrl.parallel_env import BuildFailed, ParallelEnv

__all__ = ["BuildFailed", "ParallelEnv", "SerialEnv", "installed"]


def installed() -> contextlib.AbstractContextManager[None]:
    """Replace TorchRL's `ParallelEnv` by ours, in all of TorchRL, for a block."""
    return replaced("torchrl", {torchrl.envs.ParallelEnv: ParallelEnv})
