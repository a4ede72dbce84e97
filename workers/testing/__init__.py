"""Tests for your own envs and adapters: the contract, oracle envs, and envs that break on purpose."""

from envherd.workers.testing.batch import Batch, BlockBatch, Row
from envherd.workers.testing.compare import ContractViolation
from envherd.workers.testing.contract import Contract, ContractReport, check_env_contract
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
from envherd.workers.testing.suite import PartialResetContract

__all__ = [
    "AgentsEnv",
    "Batch",
    "BlockBatch",
    "ChattyEnv",
    "Contract",
    "ContractReport",
    "ContractViolation",
    "CountingEnv",
    "FaultyEnv",
    "FlagsEnv",
    "GlobalRandomEnv",
    "HeavyEnv",
    "PairEnv",
    "ParentEnv",
    "PartialResetContract",
    "PlainAdapter",
    "PlainEnv",
    "Row",
    "TextEnv",
    "check_env_contract",
]
