"""Names of envs on the command line, and the factories that they stand for.

    meltingpot:NAME            meltingpot:clean_up                    a substrate or a scenario
    gymnasium:ID               gymnasium:CartPole-v1                  any id of gymnasium.make
    gymnasium_vec:ID[:ROWS]    gymnasium_vec:CartPole-v1:16           a vector env of ROWS (8) rows
    envpool:TASK[:ROWS]        envpool:Pong-v5:16                     an EnvPool of ROWS (8) rows
    dm_control:DOMAIN/TASK     dm_control:cartpole/balance            the dm_control suite
    pettingzoo:ID-OR-MODULE    pettingzoo:sisl/multiwalker-v9         a registered parallel env
                               pettingzoo:mpe2.simple_spread_v3       a module with parallel_env (or env)
    torchrl:MODULE:CALLABLE    torchrl:my_envs:make_env               returns a TorchRL env
    python:MODULE:CALLABLE     python:my_envs:make_env                returns an env of any family

A name without its family is a callable if it has a colon (`my_envs:make_env`). Others (`CartPole-v1`, `clean_up`)
belong to the first family of `LISTED` that knows them, or else are envs that another package registers with Gymnasium.
The prefixes `gymnasium_vec:`, `envpool:` and `torchrl:` are required.

Names are checked in the caller's process. An unknown name is refused at once, with the closest known ones. The check
imports the package of the family (except Melting Pot) or the named module. It builds no env.
"""

import contextlib
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from envherd.workers.adapters.named import (
    FAMILIES,
    NamedFactory,
    import_named,
    is_pettingzoo_id,
    named_callable,
    plug_in_ids,
    registered_by_plug_ins,
)
from envherd.workers.errors import FactoryError, closest
from envherd.workers.options import FactoryCall

Factory = Callable[..., Any]
#: What a name stands for.
Made = FactoryCall

FORMS = tuple(family.form for family in FAMILIES.values())
#: The families whose envs have names, in the order of the lookup.
LISTED = tuple(name for name, family in FAMILIES.items() if family.is_listed)


def factory_for(name: str, *, with_frames: bool = False) -> Factory:
    """Return the picklable factory that a name stands for.

    Args:
        name: one of `FORMS`.
        with_frames: the envs will be rendered; some must know that when they are built.

    Raises:
        FactoryError: no such family, env, module or callable, with the closest names; or a missing package.
    """
    name = full_name(name)
    key, _, rest = name.partition(":")
    if not rest:
        raise FactoryError(_no_family(name, [], []))
    family = FAMILIES[key]
    if family.package:
        _require(family.package)
    rest, rows = _split_rows(rest) if family.has_rows else (rest, {})
    if family.names is None:
        named_callable(rest, name)
    elif key == "pettingzoo" and not is_pettingzoo_id(rest):
        _check_module(rest, name)
    elif family.package:
        rest = _listed(key, rest, name)
    factory: Any = (
        family.factory(rest, **rows)
        if family.factory
        else NamedFactory(key, rest, **rows)
    )
    return (
        replace(factory, render_mode="rgb_array")
        if with_frames and family.renders
        else factory
    )


def made_for(
    name: str,
    env_kwargs: Mapping[str, Any] | None,
    max_steps: int | None,
    *,
    with_frames: bool = False,
) -> Made:
    """Return the factory that a name stands for, and the keyword arguments for its calls.

    Args:
        name: see `factory_for`.
        env_kwargs: keyword arguments of the env.
        max_steps: most steps of an episode; None leaves it to the env.
        with_frames: see `factory_for`.

    Raises:
        FactoryError: no such env, or a family whose envs take no limit.
    """
    factory: Any = factory_for(name, with_frames=with_frames)
    kwargs = dict(env_kwargs or {})
    if max_steps is None:
        return Made(factory, kwargs)
    limit = FAMILIES[full_name(name).partition(":")[0]].limit
    if limit is None:
        known = ", ".join(one for one, family in FAMILIES.items() if family.limit)
        raise FactoryError(
            f"--max-steps failed: expected an env of one of {known}, got {name}. Set the limit in the env, or by "
            f"--env-kwargs."
        )
    if hasattr(factory, limit):
        return Made(replace(factory, **{limit: max_steps}), kwargs)
    return Made(factory, {limit: max_steps, **kwargs})


def full_name(name: str) -> str:
    """Return a name with its family; see the module's docstring.

    Raises:
        FactoryError: the name has no family, and no family knows it.
    """
    if name.partition(":")[0] in FAMILIES:
        return name
    module, colon, rest = name.partition(":")
    if colon and rest.replace(".", "").isidentifier() and _is_there(module):
        return f"python:{name}"
    known: list[str] = []
    missing: list[str] = []
    for family in () if colon else LISTED:
        try:
            names = known_names(family)
        except FactoryError:
            missing.append(family)
            continue
        if name in names:
            return f"{family}:{name}"
        known += names
    with contextlib.suppress(ImportError):
        found = plug_in_ids()
        if name in found:
            return f"gymnasium:{found[name]}:{name}"
        known += found
    raise FactoryError(_no_family(name, known, missing))


def known_names(family: str) -> tuple[str, ...]:
    """Return the names of a family's envs, sorted, for `FAMILY:NAME`. No env is built.

    Args:
        family: one of `LISTED`.

    Raises:
        FactoryError: the family's package is missing.
    """
    entry = FAMILIES[family]
    if entry.package:
        _require(entry.package)
    found = tuple(sorted(entry.names() if entry.names else ()))
    if not found:
        raise FactoryError(
            f"{family} failed: expected an installed {family}, got none. {_install(family)}"
        )
    return found


def _no_family(name: str, known: list[str], missing: list[str]) -> str:
    """Return the message for a name whose family is missing or unknown.

    Args:
        name: what the user wrote.
        known: the names without a family.
        missing: the families whose package is not installed, if names of all families were searched.
    """
    if (written := _as_callable(name)) and name.partition(":")[0] not in FAMILIES:
        return f"{name!r} failed: expected MODULE:CALLABLE, got a module or a path. Write {written}."
    family, colon, _ = name.partition(":")
    got = hint = ""
    if not colon:
        hint = closest(name, known)
    elif family and family not in FAMILIES:
        if _is_there(family):
            got = ", got a module and no callable"
            hint = f" If {family} registers this id, write gymnasium:{name}."
        else:
            got = f", got neither a family nor a module {family!r}"
            hint = closest(f"{family}:", [f"{prefix}:" for prefix in FAMILIES])
    absent = f" Not installed: {', '.join(missing)}." if name and missing else ""
    return f"{name!r} failed: expected one of {', '.join(FORMS)}{got}.{hint}{absent}"


def _as_callable(name: str) -> str:
    """Return `MODULE:CALLABLE` for a module, its path, or a dotted name in it; "" for other names. Imports nothing."""
    path, _, attribute = name.partition(":")
    module = path.removeprefix("./").removesuffix(".py").replace("/", ".")
    is_name = not attribute or attribute.replace(".", "").isidentifier()
    if not (is_name and _is_there(module.partition(".")[0])):
        return ""
    if "." in module and path == module:
        module, _, attribute = module.rpartition(".")
    return f"{module}:{attribute or 'CALLABLE'}"


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _split_rows(name: str) -> tuple[str, dict[str, Any]]:
    """Split `NAME:ROWS` at the last colon; the name may also contain colons."""
    first, _, last = name.rpartition(":")
    return (
        (first, {"num_rows": int(last)})
        if first and last.isdecimal() and int(last)
        else (name, {})
    )


def _listed(key: str, rest: str, full_name: str) -> str:
    """Check the name of an env that its family lists; return it with the plug-in of Gymnasium that registers it.

    Args:
        key: the family.
        rest: the name without family and rows.
        full_name: what the user wrote, for messages.
    """
    family = FAMILIES[key]
    of_gymnasium = family.package == "gymnasium"
    module, _, bare = rest.rpartition(":") if of_gymnasium else ("", "", rest)
    if module:
        import_named(module, full_name)
    known = sorted(family.names() if family.names else ())
    if bare not in known:
        bare = _latest(bare, [*known, *plug_in_ids()] if of_gymnasium else known)
        rest = f"{module}:{bare}" if module else bare
    if of_gymnasium and not module:
        plug_in = (registered_by_plug_ins() if bare in known else plug_in_ids()).get(
            bare
        )
        if plug_in is not None:
            return f"{plug_in}:{bare}"  # makes workers import the package
    first, _, last = bare.rpartition(":")
    if first in known:
        raise FactoryError(
            f"{full_name!r} failed: expected a number of rows after {first}, got {last!r}."
        )
    if bare not in known:
        raise FactoryError(
            f"{full_name!r} failed: expected {family.form} of an installed env, got {bare!r}."
            f"{closest(bare, known)}{family.elsewhere}"
        )
    return rest


def _latest(name: str, known: Iterable[str]) -> str:
    """Return the id of the highest version of an env that is named without one, as `gymnasium.make` takes it."""
    versions = [
        # What comes after `-v`.
        int(one[len(name) + 2 :])
        for one in known
        if re.fullmatch(re.escape(name) + r"-v[0-9]+", one)
    ]
    return f"{name}-v{max(versions)}" if versions else name


def _check_module(module: str, full_name: str) -> None:
    """Refuse a module that has no env of PettingZoo."""
    found = vars(import_named(module, full_name))
    if not any(callable(found.get(make)) for make in ("parallel_env", "env")):
        raise FactoryError(
            f"{full_name!r} failed: expected a module with parallel_env (or env), got {module} without. "
            f"Name the module of one env, e.g. pettingzoo:mpe2.simple_spread_v3."
        )


def _require(package: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise FactoryError(
            f"{package} failed: expected the package {package}, got {error}. {_install(package)}"
        ) from error


def _install(package: str) -> str:
    return f"pip install 'envherd[{package.replace('_', '-')}]'"
