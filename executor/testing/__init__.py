"""Tests for your own envs and adapters: the partial-reset contract."""

from envherd.executor.testing.contract import (
    Contract,
    ContractReport,
    check_env_contract,
)
from envherd.executor.testing.traces import (
    ContractViolation,
    ExecutorBatch,
    Row,
    in_this_process,
    in_workers,
)

__all__ = [
    "Contract",
    "ContractReport",
    "ContractViolation",
    "ExecutorBatch",
    "Row",
    "check_env_contract",
    "in_this_process",
    "in_workers",
]
