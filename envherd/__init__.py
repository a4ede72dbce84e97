"""Parallel environments for reinforcement learning.

from envherd import ParallelEnv

with ParallelEnv(8, make_env, seed=0) as env:
    data = env.rollout(200, policy)

All public names are here; each is imported when it is first used. The facades, which stand for the classes of other
libraries, are modules: `envherd.torchrl`, `sb3`, `gymnasium`, `pettingzoo`, `rllib` and `cleanrl`. The
checks for custom envs are in `envherd.executor.testing`.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from envherd import moved

if TYPE_CHECKING:
    from envherd.executor.batched import BatchedEnv
    from envherd.executor.cluster.rollouts import RayRollouts
    from envherd.executor.cluster.shares import ClusterError
    from envherd.executor.guests.collectors.async_collector import (
        AsyncCollector,
        AsyncStatistics,
    )
    from envherd.executor.guests.collectors.collector import Collector
    from envherd.executor.guests.collectors.policy import swapped_parameters, uncopied
    from envherd.executor.guests.leases import Lease, LeasePool
    from envherd.executor.guests.monitor import Statistics, WorkerStatistics
    from envherd.executor.options import ExecutorOptions
    from envherd.executor.parallel import ParallelEnv
    from envherd.executor.progress import progress
    from envherd.executor.serial import SerialEnv
    from envherd.executor.show.camera import VideoRecorder
    from envherd.executor.show.evaluate import evaluate
    from envherd.executor.show.loggers import (
        Episode,
        EpisodeLogger,
        PrometheusCollector,
        to_scalars,
    )
    from envherd.executor.show.per_player import PerPlayer, RandomPlayer
    from envherd.executor.show.results import (
        EpisodeRecord,
        Evaluation,
        Evaluations,
        Interval,
        Rate,
    )
    from envherd.executor.sizing.recommending import recommend
    from envherd.executor.start.zygote import preloaded
    from envherd.shm.specs import Binary as Binary  # not in `__all__`
    from envherd.shm.specs import Box as Box
    from envherd.shm.specs import Discrete as Discrete
    from envherd.shm.specs import EnvSpec, LeafSpec
    from envherd.shm.specs import MultiDiscrete as MultiDiscrete
    from envherd.shm.specs import OneHot as OneHot
    from envherd.shm.specs import Unbounded as Unbounded
    from envherd.workers.adapters.base import Adapter
    from envherd.workers.adapters.meltingpot.factory import (
        MeltingPotFactory,
        scenario_names,
        substrate_names,
    )
    from envherd.workers.adapters.named import PettingZooFactory
    from envherd.workers.adapters.registry import register as register
    from envherd.workers.current import WorkerInfo, worker
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
    from envherd.workers.guests.interpreters import InPython
    from envherd.workers.wrappers.pictures import SmallPictures

    __version__: str

_ERRORS = "envherd.workers.errors"
_SPECS = "envherd.shm.specs"

#: Public name -> the module that has it.
_HOMES = {
    "ActionError": _ERRORS,
    "Adapter": "envherd.workers.adapters.base",
    "AsyncCollector": "envherd.executor.guests.collectors.async_collector",
    "AsyncStatistics": "envherd.executor.guests.collectors.async_collector",
    "BatchedEnv": "envherd.executor.batched",
    "Binary": _SPECS,
    "Box": _SPECS,
    "Busy": _ERRORS,
    "Closed": _ERRORS,
    "ClusterError": "envherd.executor.cluster.shares",
    "Collector": "envherd.executor.guests.collectors.collector",
    "Discrete": _SPECS,
    "EnvError": _ERRORS,
    "EnvSpec": _SPECS,
    "EnvherdError": _ERRORS,
    "Episode": "envherd.executor.show.loggers",
    "EpisodeLogger": "envherd.executor.show.loggers",
    "EpisodeRecord": "envherd.executor.show.results",
    "Evaluation": "envherd.executor.show.results",
    "Evaluations": "envherd.executor.show.results",
    "ExecutorOptions": "envherd.executor.options",
    "FactoryError": _ERRORS,
    "InPython": "envherd.workers.guests.interpreters",
    "InternalError": _ERRORS,
    "Interval": "envherd.executor.show.results",
    "LeafSpec": _SPECS,
    "Lease": "envherd.executor.guests.leases",
    "LeasePool": "envherd.executor.guests.leases",
    "MeltingPotFactory": "envherd.workers.adapters.meltingpot.factory",
    "MultiDiscrete": _SPECS,
    "OneHot": _SPECS,
    "ParallelEnv": "envherd.executor.parallel",
    "PerPlayer": "envherd.executor.show.per_player",
    "PettingZooFactory": "envherd.workers.adapters.named",
    "PrometheusCollector": "envherd.executor.show.loggers",
    "RandomPlayer": "envherd.executor.show.per_player",
    "Rate": "envherd.executor.show.results",
    "RayRollouts": "envherd.executor.cluster.rollouts",
    "ResetNeeded": _ERRORS,
    "SerialEnv": "envherd.executor.serial",
    "SmallPictures": "envherd.workers.wrappers.pictures",
    "SpecError": _ERRORS,
    "Statistics": "envherd.executor.guests.monitor",
    "Unbounded": _SPECS,
    "VideoRecorder": "envherd.executor.show.camera",
    "WorkerInfo": "envherd.workers.current",
    "WorkerLost": _ERRORS,
    "WorkerStatistics": "envherd.executor.guests.monitor",
    "WorkerTimeout": _ERRORS,
    "evaluate": "envherd.executor.show.evaluate",
    "preloaded": "envherd.executor.start.zygote",
    "progress": "envherd.executor.progress",
    "recommend": "envherd.executor.sizing.recommending",
    "register": "envherd.workers.adapters.registry",
    "scenario_names": "envherd.workers.adapters.meltingpot.factory",
    "substrate_names": "envherd.workers.adapters.meltingpot.factory",
    "swapped_parameters": "envherd.executor.guests.collectors.policy",
    "to_scalars": "envherd.executor.show.loggers",
    "uncopied": "envherd.executor.guests.collectors.policy",
    "worker": "envherd.workers.current",
}

#: Modules of facades, imported when they are first used -> packages without which they cannot be imported.
_FACADES = {
    "cleanrl": ("gymnasium",),
    "gymnasium": ("gymnasium",),
    "pettingzoo": ("gymnasium",),
    "rllib": (
        "gymnasium",
        "ray",
        "fsspec",
        "pandas",
        "pyarrow",
        "tensorboardX",
        "tree",
    ),
    "sb3": ("gymnasium", "stable_baselines3"),
    "torchrl": ("torchrl",),
}

#: A name that earlier versions had -> what to use instead.
_GONE = {
    "Capsules": "keep the seed and the actions, and run the episode in a SerialEnv (docs/errors.md)",
    "MetricsServer": "PrometheusCollector(env), with prometheus_client (docs/logging.md)",
    "ProbeFailed": "EnvError, WorkerLost or WorkerTimeout",
    "RayParallelEnv": "RayRollouts (docs/cluster.md)",
    "RemoteBatch": "the entries env_ids and policy_version of a batch of RayRollouts.stream",
    "RemoteRollouts": "RayRollouts (docs/cluster.md)",
    "VmasFactory": "return torchrl.envs.VmasEnv(scenario, num_envs=...) from the factory",
    "benchmarl": "set benchmarl.experiment.experiment.ParallelEnv (docs/torchrl.md)",
    "OldGymFactory": "wrap the env in the factory: shimmy.GymV21CompatibilityV0(env=env)",
    "plot_evaluations": "draw from Evaluation.to_dict()",
    "to_prometheus": "PrometheusCollector(env), with prometheus_client (docs/logging.md)",
    "write_scalars": "EpisodeLogger.write, or a loop over to_scalars (docs/logging.md)",
}

#: Classes of other libraries, by the names that they have there -> those that take their place.
_ELSEWHERE = {
    "AsyncVectorEnv": "gymnasium.AsyncVectorEnv",
    "SyncVectorEnv": "gymnasium.SyncVectorEnv",
    "VectorEnv": "gymnasium.AsyncVectorEnv",
    "make_vec": "gymnasium.make_vec",
    "EnvBase": "torchrl.ParallelEnv",
    "SubprocVecEnv": "sb3.SubprocVecEnv",
    "DummyVecEnv": "sb3.DummyVecEnv",
    "VecEnv": "sb3.SubprocVecEnv",
    "ParallelVectorEnv": "pettingzoo.ParallelVectorEnv",
    "concat_vec_envs_v1": "pettingzoo.concat_vec_envs_v1",
    "OldVectorEnv": "cleanrl.OldVectorEnv",
    "SingleAgentEnvRunner": "rllib.SingleAgentEnvRunner",
    "MultiAgentEnvRunner": "rllib.MultiAgentEnvRunner",
}

#: What `from envherd import *` imports: all names but those of Gymnasium and of TorchRL's specs.
__all__ = [
    "ActionError",
    "Adapter",
    "AsyncCollector",
    "AsyncStatistics",
    "BatchedEnv",
    "Busy",
    "Closed",
    "ClusterError",
    "Collector",
    "EnvError",
    "EnvSpec",
    "EnvherdError",
    "Episode",
    "EpisodeLogger",
    "EpisodeRecord",
    "Evaluation",
    "Evaluations",
    "ExecutorOptions",
    "FactoryError",
    "InPython",
    "InternalError",
    "Interval",
    "LeafSpec",
    "Lease",
    "LeasePool",
    "MeltingPotFactory",
    "ParallelEnv",
    "PerPlayer",
    "PettingZooFactory",
    "PrometheusCollector",
    "RandomPlayer",
    "Rate",
    "RayRollouts",
    "ResetNeeded",
    "SerialEnv",
    "SmallPictures",
    "SpecError",
    "Statistics",
    "VideoRecorder",
    "WorkerInfo",
    "WorkerLost",
    "WorkerStatistics",
    "WorkerTimeout",
    "evaluate",
    "preloaded",
    "progress",
    "recommend",
    "scenario_names",
    "substrate_names",
    "swapped_parameters",
    "to_scalars",
    "uncopied",
    "worker",
]


if not TYPE_CHECKING:  # to a type checker, unknown names remain unknown

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used: workers and `envherd --help` import this package too."""
        if name == "__version__":
            from importlib.metadata import version

            value: Any = version("envherd")
        elif name in _HOMES:
            value = getattr(importlib.import_module(_HOMES[name]), name)
        elif name in _FACADES:
            value = importlib.import_module(f"{__name__}.{name}")
        # `from envherd import NAME` would replace the text of an AttributeError.
        elif name in _GONE:
            value = moved.refuser(__name__, _GONE)(name)
        elif name in _ELSEWHERE:
            facade, _, there = _ELSEWHERE[name].partition(".")
            raise ImportError(
                f"importing {name} failed: expected a name of envherd, got one of its facades. Write: from "
                f"envherd.{facade} import {there}."
            )
        else:
            import difflib

            similar = (
                []
                if name.startswith("_")
                else difflib.get_close_matches(name, (*_HOMES, *_FACADES), 1)
            )
            advice = f". Did you mean {similar[0]}?" if similar else ""
            # Without `name`: Python's own tracebacks would append a second suggestion.
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}{advice}",
                obj=sys.modules[__name__],
            )
        globals()[name] = value
        return value


moved.install()


def _is_installed(package: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(package) is not None
    except ValueError:  # a program has put an object without a spec into sys.modules
        return False


def __dir__() -> list[str]:
    """Return all public names, and those of the facades whose libraries are installed."""
    facades = [
        facade for facade, needed in _FACADES.items() if all(map(_is_installed, needed))
    ]
    return sorted((*_HOMES, *facades, "__version__"))
