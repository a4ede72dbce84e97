"""Names of envs as one writes them on a command line, and the factories they stand for.

    meltingpot:NAME            meltingpot:clean_up                    a substrate or a scenario
    gymnasium:ID               gymnasium:CartPole-v1                  whatever gymnasium.make takes
    gymnasium_vec:ID[:ROWS]    gymnasium_vec:CartPole-v1:16           a vector env of ROWS (8) rows
    envpool:TASK[:ROWS]        envpool:Pong-v5:16                     an EnvPool of ROWS (8) rows
    dm_control:DOMAIN/TASK     dm_control:cartpole/balance            the dm_control suite
    pettingzoo:ID-OR-MODULE    pettingzoo:sisl/multiwalker-v9         a registered parallel env
                               pettingzoo:mpe2.simple_spread_v3       a module with parallel_env, as PettingZoo's have
    vmas:SCENARIO              vmas:balance, vmas:balance:64          a VMAS scenario, 32 (or 64) rows of it
    torchrl:MODULE:CALLABLE    torchrl:my_envs:make_env               returns a TorchRL env
    python:MODULE:CALLABLE     python:my_envs:make_env                returns an env of any family

A name without its family (`CartPole-v1`, `clean_up`, `my_envs:make_env`) is that of the first family of `LISTED` that
knows it, or else of a callable in a module. `gymnasium_vec:`, `envpool:` and `torchrl:` must be written.

A name is checked here, in the caller's process, so that a misspelt one is refused at once with the closest
ones; for that the package of its family (or the module named) is imported. No env is built.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from envherd.workers.adapters.meltingpot.factory import MeltingPotFactory, scenario_names, substrate_names
from envherd.workers.adapters.named import (
    CallableFactory,
    DmControlFactory,
    GymnasiumFactory,
    PettingZooFactory,
    VmasFactory,
    dm_control_tasks,
    gymnasium_ids,
    named_callable,
    pettingzoo_ids,
    vmas_scenarios,
)
from envherd.workers.adapters.named_batches import EnvPoolFactory, GymnasiumVectorFactory, envpool_tasks
from envherd.workers.build import closest
from envherd.workers.errors import FactoryError

Factory = Callable[..., Any]

FORMS = (
    "meltingpot:NAME",
    "gymnasium:ID",
    "gymnasium_vec:ID[:ROWS]",
    "envpool:TASK[:ROWS]",
    "dm_control:DOMAIN/TASK",
    "pettingzoo:ID-OR-MODULE",
    "vmas:SCENARIO",
    "torchrl:MODULE:CALLABLE",
    "python:MODULE:CALLABLE",
)


def factory_for(name: str, *, with_frames: bool = False) -> Factory:
    """Return the picklable factory that a name stands for.

    Args:
        name: one of `FORMS`.
        with_frames: the envs will be asked for pictures; some envs must know that when they are built.

    Raises:
        FactoryError: no such family, env, module or callable, with the closest names; or a missing package.
    """
    family, colon, rest = name.partition(":")
    if family not in _FAMILIES:
        name = _with_family(name)
        family, colon, rest = name.partition(":")
    if not colon or not rest:
        raise FactoryError(_no_family(name, family))
    factory = _FAMILIES[family](rest)
    if with_frames and isinstance(factory, (GymnasiumFactory, GymnasiumVectorFactory, PettingZooFactory)):
        return replace(factory, render_mode="rgb_array")
    return factory


def known_names(family: str) -> tuple[str, ...]:
    """Return the names of a family's envs, sorted, for `FAMILY:NAME`. No env is built.

    Args:
        family: one of `LISTED`.

    Raises:
        FactoryError: the family's package is missing.
    """
    extra, names = _NAMES[family]
    if family != "meltingpot":
        _require(family, extra)
    found = tuple(sorted(names()))
    if not found:
        raise FactoryError(f"{family} failed: expected an installed {family}, got none. pip install 'envherd[{extra}]'")
    return found


def _with_family(name: str) -> str:
    """Return a name that has no family with that of the first family that knows it.

    Raises:
        FactoryError: no family knows it.
    """
    for family in LISTED:
        if ("/" in name) <= (family in _WITH_SLASH):
            with contextlib.suppress(FactoryError):
                if name in known_names(family):
                    return f"{family}:{name}"
    module, _, rest = name.partition(":")
    if rest.replace(".", "").isidentifier() and _is_there(module):
        return f"python:{name}"
    raise FactoryError(_no_family(name, module))


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def callable_at(target: str, full_name: str) -> Callable[..., Any]:
    """Import `MODULE:CALLABLE` and return the callable.

    Args:
        target: e.g. `my_envs:make_env`; dots after the colon lead into classes.
        full_name: what the user wrote, for messages.

    Raises:
        FactoryError: no such module, no such name in it (with the closest), or not callable.
    """
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise FactoryError(f"{full_name!r} failed: expected MODULE:CALLABLE, e.g. my_envs:make_env, got {target!r}.")
    namespace = vars(_import_named(module, full_name))
    first = name.partition(".")[0]
    if first not in namespace:
        public = [known for known, value in namespace.items() if callable(value) and not known.startswith("_")]
        raise FactoryError(f"{full_name!r} failed: {module} has no {first!r}.{closest(first, public)}")
    return named_callable(module, name)


def _no_family(name: str, family: str) -> str:
    known = [*(f"{prefix}:" for prefix in _FAMILIES), *(f"meltingpot:{substrate}" for substrate in substrate_names())]
    hint = closest(name if ":" in name else f"meltingpot:{name}", known) or closest(f"{family}:", known)
    if family in ("", *_FAMILIES):
        hint = ""
    return f"{name!r} failed: expected one of {', '.join(FORMS)}.{hint}"


def _meltingpot(name: str) -> Factory:
    return MeltingPotFactory(name)


def _gymnasium(env_id: str) -> Factory:
    _require("gymnasium", "gymnasium")
    module, _, bare_id = env_id.rpartition(":")
    if module:
        _import_named(module, f"gymnasium:{env_id}")
    known = gymnasium_ids()
    if bare_id not in known:
        raise FactoryError(
            f"'gymnasium:{env_id}' failed: expected an env that Gymnasium knows, got {bare_id!r}."
            f"{closest(bare_id, known)} Envs of another package: gymnasium:THE_PACKAGE:ID."
        )
    return GymnasiumFactory(env_id)


def _gymnasium_vec(name: str) -> Factory:
    env_id, num_rows = _split_rows(name)
    _gymnasium(env_id)  # which checks the id
    return GymnasiumVectorFactory(env_id, **num_rows)


def _envpool(name: str) -> Factory:
    _require("envpool", "envpool")
    task, num_rows = _split_rows(name)
    known = envpool_tasks()
    if task not in known:
        raise FactoryError(f"'envpool:{name}' failed: expected an EnvPool task, got {task!r}.{closest(task, known)}")
    return EnvPoolFactory(task, **num_rows)


def _split_rows(name: str) -> tuple[str, dict[str, Any]]:
    """Split `NAME:ROWS`; a name may have colons too."""
    first, _, last = name.rpartition(":")
    return (first, {"num_rows": int(last)}) if first and last.isdigit() and int(last) else (name, {})


def _dm_control(task: str) -> Factory:
    _require("dm_control", "dm-control")
    known = dm_control_tasks()
    if task not in known:
        raise FactoryError(
            f"'dm_control:{task}' failed: expected DOMAIN/TASK of the dm_control suite, got {task!r}."
            f"{closest(task, known)}"
        )
    domain, _, name = task.partition("/")
    return DmControlFactory(domain, name)


def _pettingzoo(name: str) -> Factory:
    _require("pettingzoo", "pettingzoo")
    if "/" in name:
        known = pettingzoo_ids()
        if name not in known:
            raise FactoryError(
                f"'pettingzoo:{name}' failed: expected a parallel env that PettingZoo knows, got {name!r}."
                f"{closest(name, known)} Envs of another package: pettingzoo:THE_MODULE."
            )
        return PettingZooFactory(name)
    found = vars(_import_named(name, f"pettingzoo:{name}"))
    if not any(callable(found.get(make)) for make in ("parallel_env", "env")):
        raise FactoryError(
            f"'pettingzoo:{name}' failed: expected a module with parallel_env (or env), got {name} without. "
            f"Name the module of one env, e.g. pettingzoo:mpe2.simple_spread_v3."
        )
    return PettingZooFactory(name)


def _vmas(name: str) -> Factory:
    _require("vmas", "vmas")
    scenario, colon, rows = name.partition(":")
    known = vmas_scenarios()
    if scenario not in known:
        raise FactoryError(
            f"'vmas:{name}' failed: expected a VMAS scenario, got {scenario!r}.{closest(scenario, known)}"
        )
    if not colon:
        return VmasFactory(scenario)
    if not (rows.isdigit() and int(rows)):
        raise FactoryError(f"'vmas:{name}' failed: expected a number of rows after the scenario, got {rows!r}.")
    return VmasFactory(scenario, num_rows=int(rows))


def _torchrl(target: str) -> Factory:
    _require("torchrl", "torchrl")
    callable_at(target, f"torchrl:{target}")
    module, _, name = target.partition(":")
    return CallableFactory(module, name, must_be_torchrl=True)


def _python(target: str) -> Factory:
    callable_at(target, f"python:{target}")
    module, _, name = target.partition(":")
    return CallableFactory(module, name)


def _import_named(module: str, full_name: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise FactoryError(
            f"{full_name!r} failed: importing {module} raised {type(error).__name__}: {error}. "
            f"Modules are looked for in the current directory and among the installed packages."
        ) from error


def _require(package: str, extra: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise FactoryError(
            f"{package} failed: expected the package {package}, got {error}. pip install 'envherd[{extra}]'"
        ) from error


_FAMILIES: dict[str, Callable[[str], Factory]] = {
    "meltingpot": _meltingpot,
    "gymnasium": _gymnasium,
    "gymnasium_vec": _gymnasium_vec,
    "envpool": _envpool,
    "dm_control": _dm_control,
    "pettingzoo": _pettingzoo,
    "vmas": _vmas,
    "torchrl": _torchrl,
    "python": _python,
}

#: Family, which is also the name of its package -> its extra, and what returns the names of its envs.
_NAMES: dict[str, tuple[str, Callable[[], Iterable[str]]]] = {
    "meltingpot": ("meltingpot", lambda: (*substrate_names(), *scenario_names())),  # without importing it: it is slow
    "gymnasium": ("gymnasium", gymnasium_ids),
    "dm_control": ("dm-control", dm_control_tasks),
    "pettingzoo": ("pettingzoo", pettingzoo_ids),
    "vmas": ("vmas", vmas_scenarios),
}
#: Families whose names may have a slash.
_WITH_SLASH = ("gymnasium", "dm_control", "pettingzoo")
#: The families whose envs have names, in the order in which they are asked.
LISTED = tuple(_NAMES)
