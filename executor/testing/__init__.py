"""Tests for your own envs and adapters: the partial-reset contract."""

from envherd.executor.testing.batch import (
    ExecutorBatch,
    Row,
    in_this_process,
    in_workers,
)
from envherd.executor.testing.compare import ContractViolation
from envherd.executor.testing.contract import (
    Contract,
    ContractReport,
    check_env_contract,
)
from envherd.executor.testing.suite import PartialResetContract

__all__ = [
    "Contract",
    "ContractReport",
    "ContractViolation",
    "ExecutorBatch",
    "PartialResetContract",
    "Row",
    "check_env_contract",
    "in_this_process",
    "in_workers",
]
