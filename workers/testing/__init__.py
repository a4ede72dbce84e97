"""Oracle envs, and envs that break on purpose. The contract that checks your own: `envherd.executor.testing`."""

from envherd.workers.testing.envs import (
    AgentsEnv,
    CountingEnv,
    FlagsEnv,
    GlobalRandomEnv,
    PairEnv,
    PlainAdapter,
    PlainEnv,
    TextEnv,
)
from envherd.workers.testing.faults import ChattyEnv, FaultyEnv, HeavyEnv, ParentEnv

__all__ = [
    "AgentsEnv",
    "ChattyEnv",
    "CountingEnv",
    "FaultyEnv",
    "FlagsEnv",
    "GlobalRandomEnv",
    "HeavyEnv",
    "PairEnv",
    "ParentEnv",
    "PlainAdapter",
    "PlainEnv",
    "TextEnv",
]
