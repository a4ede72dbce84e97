"""Tests for your own envs and adapters: the partial-reset contract."""

from envherd.executor.testing.batch import Batch, BlockBatch, Row
from envherd.executor.testing.compare import ContractViolation
from envherd.executor.testing.contract import Contract, ContractReport, check_env_contract
from envherd.executor.testing.suite import PartialResetContract

__all__ = [
    "Batch",
    "BlockBatch",
    "Contract",
    "ContractReport",
    "ContractViolation",
    "PartialResetContract",
    "Row",
    "check_env_contract",
]
