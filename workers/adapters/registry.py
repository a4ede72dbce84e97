"""Find the adapter of an env by the names of its classes, without importing any RL package.

`find_adapter(env)` walks the env's class and its bases, most derived first, and looks each
`module.QualName` up in a table; torch simulators are found inside Gymnasium's wrappers, too. An adapter's
module is imported only when it is needed. Users add their own families with `register`.
"""

import importlib
from typing import Any

from envherd.workers.adapters.base import Adapter
from envherd.workers.errors import FactoryError
from envherd.workers.options import EnvType

_PACKAGE = "envherd.workers.adapters"

_ISAACLAB = (
    "manager_based_rl_env.ManagerBasedRLEnv",
    "direct_rl_env.DirectRLEnv",
    "direct_marl_env.DirectMARLEnv",
)

_NATIVE = f"{_PACKAGE}.simulators.native"
_GENERIC_TORCH = f"{_NATIVE}:TorchNativeAdapter"
_ISAAC = f"{_NATIVE}:IsaacLabAdapter"
_MANISKILL = f"{_NATIVE}:ManiSkillAdapter"

#: `module.QualName` of an env class -> `module:Class` of its adapter.
_TABLE: dict[str, str | type[Adapter]] = {
    "meltingpot.utils.substrates.substrate.Substrate": f"{_PACKAGE}.meltingpot.adapter:MeltingPotAdapter",
    "meltingpot.utils.scenarios.scenario.Scenario": f"{_PACKAGE}.meltingpot.adapter:MeltingPotAdapter",
    "dm_env._environment.Environment": f"{_PACKAGE}.dm_env.adapter:DmEnvAdapter",
    "gymnasium.core.Env": f"{_PACKAGE}.gymnasium.adapter:GymnasiumAdapter",
    "gymnasium.vector.vector_env.VectorEnv": f"{_PACKAGE}.gymnasium.vector:GymnasiumVectorAdapter",
    "envpool.python.envpool.EnvPoolMixin": f"{_PACKAGE}.envpool:EnvPoolAdapter",
    "pettingzoo.utils.env.ParallelEnv": f"{_PACKAGE}.pettingzoo.adapter:PettingZooAdapter",
    "pettingzoo.utils.env.AECEnv": f"{_PACKAGE}.pettingzoo.adapter:PettingZooAdapter",
    "torchrl.envs.common.EnvBase": f"{_PACKAGE}.torchrl.adapter:TorchRLAdapter",
    "mani_skill.envs.sapien_env.BaseEnv": _MANISKILL,
    "mani_skill.vector.wrappers.gymnasium.ManiSkillVectorEnv": _MANISKILL,
    **dict.fromkeys(
        (
            f"{package}.{name}"
            for package in ("isaaclab.envs", "omni.isaac.lab.envs")
            for name in _ISAACLAB
        ),
        _ISAAC,
    ),
}

#: `module:function` of each family that changes how its packages are imported. A worker calls these functions before it
#: imports anything for an env, because a factory may import any family's packages by itself.
_IMPORT_HOOKS = (f"{_PACKAGE}.meltingpot.light_import:install_lazy_import",)

_TORCH = {_GENERIC_TORCH, _MANISKILL, _ISAAC}


def register(env_class: str | type, adapter: type[Adapter] | str) -> None:
    """Serve envs of a class (and of its subclasses) with an adapter.

    Call it inside the factory, or in a module that the worker imports: registration is per process.

    Args:
        env_class: the class, or its `"module.QualName"`.
        adapter: an `Adapter` subclass, or `"module:Class"`, imported when first needed.
    """
    name = env_class if isinstance(env_class, str) else _qualified_name(env_class)
    _TABLE[name] = adapter


def install_import_hooks() -> None:
    """Install the import hooks of all families in this process; calling it again changes nothing."""
    for hook in _IMPORT_HOOKS:
        _imported(hook)()


def find_adapter(env: Any, env_type: EnvType = "auto") -> type[Adapter]:
    """Return the adapter class for an env.

    Args:
        env: of any family, perhaps in Gymnasium wrappers.
        env_type: "torch" treats an env of no torch family as a batched simulator with Gymnasium's methods; "numpy"
            treats an env that looks like one as an env with arrays; "auto" treats a Gymnasium env with `num_envs` and a
            `device` as a simulator.

    Raises:
        FactoryError: the object is of no known family (the message lists them), or its family takes tensors and
            `env_type` is "numpy".
    """
    adapter = _lookup(type(env))
    inner = env.unwrapped if is_one_of(env, "gymnasium.core.Wrapper") else env
    native = _lookup(type(inner))
    if is_one_of(inner, "vmas.simulator.environment.environment.Environment"):
        raise FactoryError(
            "the factory failed: expected an env of a known family, got one of VMAS. Return "
            "torchrl.envs.VmasWrapper(env), or write a simulator around it as examples/vmas_simulator.py does."
        )
    if native in _TORCH:
        if env_type == "numpy":
            raise FactoryError(
                f"the factory failed: expected an env that takes arrays, as env_type is 'numpy', got "
                f"{_qualified_name(type(inner))}, which takes torch tensors. Leave env_type at 'auto'."
            )
        return _load(native)
    is_torch = env_type == "torch" and not is_one_of(
        inner,
        "torchrl.envs.common.EnvBase",
    )
    if is_torch or (env_type == "auto" and _looks_like_simulator(inner, native)):
        return _load(_GENERIC_TORCH)
    if adapter is not None:
        return _load(adapter)
    if any(cls.__module__.startswith("envherd.executor.") for cls in type(env).__mro__):
        raise FactoryError(
            f"the factory failed: expected one env, got a {type(env).__name__}: an executor cannot be an env. Let the "
            f"factory return one env, and give the executor a larger num_envs."
        )
    if _is_old_gym(env):
        raise FactoryError(
            f"the factory failed: expected an env of a known family, got {_qualified_name(type(env))}, which looks "
            f"like an env of gym, before Gymnasium. If it is one, wrap "
            f"it in the factory: shimmy.GymV21CompatibilityV0(env=env)."
        )
    known = ", ".join(sorted({name.partition(".")[0] for name in _TABLE}))
    raise FactoryError(
        f"the factory failed: expected an env of a known family, got {_qualified_name(type(env))}. "
        f"Known are classes of {known} and their subclasses: derive yours from gymnasium.Env, or write an adapter "
        f"and envherd.register(YourEnv, YourAdapter)."
    )


def _lookup(cls: type) -> str | type[Adapter] | None:
    return next(
        (_TABLE[name] for name in map(_qualified_name, cls.__mro__) if name in _TABLE),
        None,
    )


def is_one_of(env: Any, name: str) -> bool:
    """Return whether an env is of a class, or of a subclass, without importing the class."""
    return any(_qualified_name(cls) == name for cls in type(env).__mro__)


def _looks_like_simulator(env: Any, adapter: str | type[Adapter] | None) -> bool:
    """Return whether a Gymnasium env, or one of no known family, declares many rows on a torch device."""
    if adapter is not None and adapter != _TABLE["gymnasium.core.Env"]:
        return False
    return (
        _has_methods(env)
        and isinstance(getattr(env, "num_envs", None), int)
        and getattr(env, "device", None) is not None
    )


def _is_old_gym(env: Any) -> bool:
    """Return whether an object of any class has the methods and attributes of an old gym env."""
    return (
        _has_methods(env)
        and hasattr(env, "observation_space")
        and hasattr(env, "action_space")
    )


def is_env_like(candidate: Any) -> bool:
    """Return whether an object is an env itself rather than something that builds one."""
    if isinstance(candidate, type):
        return False
    return _lookup(type(candidate)) is not None or _has_methods(candidate)


def _has_methods(env: Any) -> bool:
    return callable(getattr(env, "step", None)) and callable(
        getattr(env, "reset", None)
    )


def _qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _load(adapter: str | type[Adapter]) -> type[Adapter]:
    if isinstance(adapter, type):
        return adapter
    loaded: type[Adapter] = _imported(adapter)
    return loaded


def _imported(path: str) -> Any:
    """Import and return the object at `module:name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
