"""TorchRL's batched envs on the executor: `ParallelEnv`, `SerialEnv`, `AsyncEnvPool`, `installed`."""

from envherd.executor.facades import needing

with needing("envherd[torchrl]", "torchrl"):
    from envherd.executor.facades.torchrl.async_pool import AsyncEnvPool, installed
    from envherd.executor.facades.torchrl.parallel_env import BuildFailed, ParallelEnv, SerialEnv

__all__ = ["AsyncEnvPool", "BuildFailed", "ParallelEnv", "SerialEnv", "installed"]
