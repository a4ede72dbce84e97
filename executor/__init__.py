"""Parallel environments for reinforcement learning: what users import.

from envherd.executor import ParallelEnv
with ParallelEnv(8, make_env, seed=0) as env:
    data = env.rollout(200, policy)
"""

from envherd.executor.options import ExecutorOptions
from envherd.executor.parallel import ParallelEnv
from envherd.executor.serial import SerialEnv
from envherd.executor.statistics import Statistics, WorkerStatistics
from envherd.workers.adapters.meltingpot_factory import MeltingPotFactory
from envherd.workers.errors import (
    ActionError,
    Busy,
    Closed,
    EnvError,
    EnvherdError,
    FactoryError,
    InternalError,
    ResetNeeded,
    SpecError,
    WorkerLost,
    WorkerTimeout,
)

__all__ = [
    "ActionError",
    "Busy",
    "Closed",
    "EnvError",
    "EnvherdError",
    "ExecutorOptions",
    "FactoryError",
    "InternalError",
    "MeltingPotFactory",
    "ParallelEnv",
    "ResetNeeded",
    "SerialEnv",
    "SpecError",
    "Statistics",
    "WorkerLost",
    "WorkerStatistics",
    "WorkerTimeout",
]
