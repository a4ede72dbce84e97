"""TorchRL's batched envs on the executor: `ParallelEnv` and `SerialEnv`."""

from envherd.executor.facades.torchrl.parallel_env import BuildFailed, ParallelEnv, SerialEnv

__all__ = ["BuildFailed", "ParallelEnv", "SerialEnv"]
