"""Oracle envs, and envs that break on purpose. The contract that checks your own: `envherd.executor.testing`."""

from envherd.workers.testing.envs import CountingEnv, PlainAdapter, PlainEnv
from envherd.workers.testing.faults import FaultyEnv

__all__ = ["CountingEnv", "FaultyEnv", "PlainAdapter", "PlainEnv"]
