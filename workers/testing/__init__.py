"""Oracle envs. The contract that checks your own: `envherd.executor.testing`."""

from envherd.workers.testing.envs import CountingEnv, PlainAdapter, PlainEnv

__all__ = ["CountingEnv", "PlainAdapter", "PlainEnv"]
