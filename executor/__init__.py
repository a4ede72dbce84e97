"""Parallel environments for reinforcement learning: the public API.

from envherd.executor import ParallelEnv
with ParallelEnv(8, make_env, seed=0) as env:
    data = env.rollout(200, policy)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Re-exported.
    from envherd.executor.guests.collectors.async_collector import (
        AsyncCollector as AsyncCollector,
    )
    from envherd.executor.guests.collectors.collector import Collector
    from envherd.executor.guests.monitor import Statistics, WorkerStatistics
    from envherd.executor.options import ExecutorOptions
    from envherd.executor.parallel import ParallelEnv
    from envherd.executor.serial import SerialEnv
    from envherd.executor.sizing.recommending import recommend
    from envherd.executor.start.zygote import preloaded
    from envherd.workers.adapters.meltingpot.factory import MeltingPotFactory
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
    "Collector",
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
    "preloaded",
    "recommend",
]

#: The module of each name, imported on first use (PEP 562): importing torch takes seconds, which neither
#: `envherd --help` nor a worker that unpickles a factory needs.
_HOMES = {
    "AsyncCollector": "envherd.executor.guests.collectors.async_collector",
    "Collector": "envherd.executor.guests.collectors.collector",
    "ExecutorOptions": "envherd.executor.options",
    "MeltingPotFactory": "envherd.workers.adapters.meltingpot.factory",
    "ParallelEnv": "envherd.executor.parallel",
    "SerialEnv": "envherd.executor.serial",
    "Statistics": "envherd.executor.guests.monitor",
    "WorkerStatistics": "envherd.executor.guests.monitor",
    "preloaded": "envherd.executor.start.zygote",
    "recommend": "envherd.executor.sizing.recommending",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in __all__ and name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(
        importlib.import_module(_HOMES.get(name, "envherd.workers.errors")),
        name,
    )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
