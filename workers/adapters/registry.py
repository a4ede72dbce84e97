"""Which adapter serves an env: found by the names of its classes, without importing any RL package.

`find_adapter(env)` walks the env's class and its bases, most derived first, and looks each
`module.QualName` up in a table. An adapter's module is imported only when it is needed. Users add
their own families with `register`.
"""

from __future__ import annotations

import importlib
from typing import Any

from envherd.workers.adapters.base import Adapter
from envherd.workers.errors import FactoryError

_PACKAGE = "envherd.workers.adapters"

#: `module.QualName` of an env class -> `module:Class` of its adapter.
_TABLE: dict[str, str | type[Adapter]] = {
    "meltingpot.utils.substrates.substrate.Substrate": f"{_PACKAGE}.meltingpot:MeltingPotAdapter",
    "meltingpot.utils.scenarios.scenario.Scenario": f"{_PACKAGE}.meltingpot:MeltingPotAdapter",
    "dm_env._environment.Environment": f"{_PACKAGE}.dm_env:DmEnvAdapter",
    "gymnasium.core.Env": f"{_PACKAGE}.gymnasium:GymnasiumAdapter",
    "gymnasium.vector.vector_env.VectorEnv": f"{_PACKAGE}.gymnasium_vector:GymnasiumVectorAdapter",
    "envpool.python.envpool.EnvPoolMixin": f"{_PACKAGE}.envpool:EnvPoolAdapter",
    "pettingzoo.utils.env.ParallelEnv": f"{_PACKAGE}.pettingzoo:PettingZooAdapter",
    "pettingzoo.utils.env.AECEnv": f"{_PACKAGE}.pettingzoo:PettingZooAdapter",
    "torchrl.envs.common.EnvBase": f"{_PACKAGE}.torchrl:TorchRLAdapter",
}


def register(env_class: str | type, adapter: type[Adapter] | str) -> None:
    """Serve envs of a class (and of its subclasses) with an adapter.

    Call it inside the factory, or in a module that the worker imports: registration is per process.

    Args:
        env_class: the class, or its `"module.QualName"`.
        adapter: an `Adapter` subclass, or `"module:Class"`, imported when first needed.
    """
    name = env_class if isinstance(env_class, str) else _qualified_name(env_class)
    _TABLE[name] = adapter


def find_adapter(env: Any) -> type[Adapter]:
    """Return the adapter class for an env.

    Raises:
        FactoryError: the object is of no known family; the message lists the known ones.
    """
    for cls in type(env).__mro__:
        adapter = _TABLE.get(_qualified_name(cls))
        if adapter is not None:
            return _load(adapter)
    known = ", ".join(sorted(_TABLE))
    raise FactoryError(
        f"the factory failed: expected an env of a known family, got {_qualified_name(type(env))}. "
        f"Known are {known} and their subclasses; serve another family with "
        f"envherd.workers.adapters.register(YourEnv, YourAdapter)."
    )


def is_env_like(candidate: Any) -> bool:
    """Return whether an object is an env itself rather than something that builds one."""
    if isinstance(candidate, type):
        return False
    names = {_qualified_name(cls) for cls in type(candidate).__mro__}
    has_methods = callable(getattr(candidate, "step", None)) and callable(getattr(candidate, "reset", None))
    return bool(names & _TABLE.keys()) or has_methods


def _qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _load(adapter: str | type[Adapter]) -> type[Adapter]:
    if isinstance(adapter, type):
        return adapter
    module, _, name = adapter.partition(":")
    loaded: type[Adapter] = getattr(importlib.import_module(module), name)
    return loaded
