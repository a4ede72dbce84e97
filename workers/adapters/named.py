"""Families of envs whose names a command line or a config file takes, and the factories that names stand for.

`FAMILIES` is the table: how each family's envs are built, what workers preload, and which names there are. Factories
are frozen values that pickle by reference. Making one checks nothing: `env_names.py` checks names.
"""

import contextlib
import functools
import importlib
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envherd.workers.adapters.meltingpot.factory import (
    MeltingPotFactory,
    scenario_names,
    substrate_names,
)
from envherd.workers.adapters.registry import is_one_of
from envherd.workers.errors import FactoryError, closest
from envherd.workers.sending.importing import explain_exit


@dataclass(frozen=True)
class NamedFactory:
    """Build the env that a name stands for.

    Attributes:
        family: a key of `FAMILIES`.
        name: of the env, without its family.
        num_rows: envs in one env of `gymnasium_vec` or `envpool`.
        render_mode: "rgb_array" for envs that are to be drawn; None leaves it to the env.
        max_steps: of `python`: truncate episodes after this number of steps; None leaves it to the env.
    """

    family: str
    name: str
    num_rows: int = 8
    render_mode: str | None = None
    max_steps: int | None = None

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules worth importing before workers are forked."""
        return FAMILIES[self.family].preload or (self.name.partition(":")[0],)

    def __call__(self, **env_kwargs: Any) -> Any:
        """Return the env, made with these arguments (`ParallelEnv(..., env_kwargs={"max_episode_steps": 50})`).

        Raises:
            FactoryError: the callable that the name stands for is not there, or does not return what it must.
        """
        return FAMILIES[self.family].build(self, **env_kwargs)


@dataclass(frozen=True)
class PettingZooFactory:
    """Build a PettingZoo env, and say how its agents are grouped.

    Attributes:
        env: an id, which has a slash or a version (`sisl/multiwalker-v9`, `mine-v0`; for PettingZoo 1.26 and later);
            a module (`mpe2.simple_spread_v3`), whose `parallel_env(...)` is called, or `env(...)` if it has no other;
            or a callable that returns an env.
        render_mode: "rgb_array" for envs that are to be drawn; None leaves it to the env.
        group_map: group name -> its agents; None groups agents by name, as TorchRL does.
        return_state: also observe `state`, the env's view of everything, at the root (TorchRL's option of this name).
    """

    env: str | Callable[..., Any]
    render_mode: str | None = None
    group_map: Mapping[str, Sequence[Any]] | None = None
    return_state: bool = False

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules worth importing before workers are forked."""
        return (
            (self.env,)
            if isinstance(self.env, str) and not is_pettingzoo_id(self.env)
            else ("pettingzoo",)
        )

    def __call__(self, **env_kwargs: Any) -> Any:
        """Return the env, made with these arguments (`ParallelEnv(..., env_kwargs={"N": 5})`)."""
        rendering = {"render_mode": self.render_mode} if self.render_mode else {}
        env = self._make()(**rendering, **env_kwargs)
        env.envherd_options = self
        return env

    def _make(self) -> Callable[..., Any]:
        if callable(self.env):
            return self.env
        if is_pettingzoo_id(self.env):
            import pettingzoo

            return functools.partial(pettingzoo.make, "parallel", self.env)
        module = importlib.import_module(self.env)
        return getattr(module, "parallel_env", None) or module.env


def is_pettingzoo_id(name: str) -> bool:
    """Return whether a name is an id of PettingZoo's registry: no module has a slash, or a version after a hyphen."""
    return "/" in name or re.search(r"-v[0-9]+$", name) is not None


# ---- how the envs of a name are built --------------------------------------------------------------


def _build_gymnasium(made: NamedFactory, **env_kwargs: Any) -> Any:
    import gymnasium

    return gymnasium.make(made.name, **{"render_mode": made.render_mode, **env_kwargs})


def _build_gymnasium_vec(made: NamedFactory, **env_kwargs: Any) -> Any:
    """Return a SyncVectorEnv that leaves resets to the executor."""
    import gymnasium

    rendering: dict[str, Any] = (
        {"render_mode": made.render_mode} if made.render_mode else {}
    )
    return gymnasium.make_vec(
        made.name,
        made.num_rows,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED},
        **rendering,
        **env_kwargs,
    )


def _build_envpool(made: NamedFactory, **env_kwargs: Any) -> Any:
    """Return a pool with one thread, because workers run at the same time."""
    import envpool

    return envpool.make(
        made.name,
        **{
            "env_type": "gymnasium",
            "num_envs": made.num_rows,
            "num_threads": 1,
            **env_kwargs,
        },
    )


def _build_dm_control(made: NamedFactory, **env_kwargs: Any) -> Any:
    from dm_control import suite

    return suite.load(*made.name.split("/"), **env_kwargs)


def _build_called(made: NamedFactory, **env_kwargs: Any) -> Any:
    env = named_callable(made.name, f"{made.family}:{made.name}")(**env_kwargs)
    if made.family == "torchrl" and not is_one_of(env, "torchrl.envs.common.EnvBase"):
        raise FactoryError(
            f"torchrl:{made.name} failed: expected a TorchRL env, got {type(env).__module__}.{type(env).__qualname__}. "
            f"Name it python:{made.name} to run envs of other families."
        )
    return env if made.max_steps is None else _limited(env, made.name, made.max_steps)


def _limited(env: Any, name: str, max_steps: int) -> Any:
    """Return an env of Gymnasium whose episodes are truncated."""
    if not is_one_of(env, "gymnasium.core.Env"):
        raise FactoryError(
            f"--max-steps failed: expected an env of Gymnasium from {name}, got {type(env).__name__}. Set the limit in "
            f"the env, or by --env-kwargs."
        )
    from gymnasium.wrappers import TimeLimit

    return TimeLimit(env, max_steps)


# ---- which names there are -------------------------------------------------------------------------


def gymnasium_ids() -> list[str]:
    """Return the ids of all envs that Gymnasium knows so far."""
    import gymnasium

    return list(gymnasium.registry)


#: Packages that register envs with Gymnasium when they are imported.
_GYMNASIUM_PLUG_INS = (
    "ale_py",
    "minigrid",
    "highway_env",
    "gymnasium_robotics",
    "metaworld",
)


def plug_in_ids() -> dict[str, str]:
    """Import the plug-ins of Gymnasium that are installed; return id -> plug-in, for `PLUG_IN:ID`."""
    for name in _GYMNASIUM_PLUG_INS:
        if importlib.util.find_spec(name) is not None:
            # One that is broken has no ids.
            with (
                contextlib.suppress(Exception),
                contextlib.redirect_stdout(sys.stderr),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                importlib.import_module(name)
    return registered_by_plug_ins()


def registered_by_plug_ins() -> dict[str, str]:
    """Return id -> plug-in of the envs that the plug-ins imported so far have registered."""
    import gymnasium

    makers = {
        env_id: re.split("[.:]", str(spec.entry_point))[0]
        for env_id, spec in gymnasium.registry.items()
    }
    return {
        env_id: maker
        for env_id, maker in sorted(makers.items())
        if maker in _GYMNASIUM_PLUG_INS
    }


def _pettingzoo_ids() -> list[str]:
    """Return the ids of all parallel envs that PettingZoo knows so far; none of a PettingZoo without ids."""
    import pettingzoo

    return list(getattr(pettingzoo, "parallel_registry", ()))


def _dm_control_tasks() -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a missing display matters only for rendering
        from dm_control import suite

    return [f"{domain}/{task}" for domain, task in suite.ALL_TASKS]


def _envpool_tasks() -> list[str]:
    import envpool

    return list(envpool.list_all_envs())


def import_named(module: str, asked: str) -> Any:
    """Import the module in a name; `asked` is what the user wrote, for messages.

    Raises:
        FactoryError: it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        why = (
            explain_exit(error)
            if isinstance(error, SystemExit)
            else f"{type(error).__name__}: {error}"
        )
        raise FactoryError(
            f"{asked!r} failed: importing {module} raised {why}. "
            f"Modules are looked for in the current directory and among the installed packages."
        ) from error


def named_callable(target: str, asked: str) -> Callable[..., Any]:
    """Import `MODULE:CALLABLE` and return the callable.

    Args:
        target: e.g. `my_envs:make_env`; a dot after the colon separates a class and its attribute.
        asked: what the user wrote, for messages.

    Raises:
        FactoryError: there is no such module, it has no such name, or the object is not callable.
    """
    module, _, name = target.partition(":")
    if not (module and name) or module.endswith(".py"):
        raise FactoryError(
            f"{asked!r} failed: expected MODULE:CALLABLE, e.g. my_module:make, got {target!r}."
        )
    found: Any = import_named(module, asked)
    for part in name.split("."):
        if not hasattr(found, part):
            public = [
                known
                for known in dir(found)
                if not known.startswith("_") and callable(getattr(found, known))
            ]
            raise FactoryError(
                f"{asked!r} failed: {module} has no {name!r}.{closest(part, public)}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise FactoryError(
            f"{asked!r} failed: expected a callable, got {type(found).__qualname__}."
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the names of a family are read.

    Attributes:
        form: of its names, for messages.
        factory: class of the factories that its names stand for; None for `NamedFactory`.
        build: of a `NamedFactory`: returns the env.
        preload: of a `NamedFactory`: modules worth importing before workers are forked; empty for the module in the
            name.
        package: is imported to check names; "" if none must be, or if `factory` checks them.
        names: returns the names of its envs; None if names are callables of modules.
        elsewhere: a sentence for messages: how to name envs that `names` does not have.
        is_listed: whether `envherd list` prints the names, and whether they can be given without the family.
        has_rows: whether a name may end in a number of rows.
        renders: whether its envs must know when they are built that they will be rendered.
        limit: the field or else keyword argument of its factories that limits the steps of an episode, or None.
    """

    form: str
    factory: Callable[..., Any] | None = None
    build: Callable[..., Any] = _build_called
    preload: tuple[str, ...] = ()
    package: str = ""
    names: Callable[[], Iterable[str]] | None = None
    elsewhere: str = ""
    is_listed: bool = True
    has_rows: bool = False
    renders: bool = False
    limit: str | None = None


_OF_GYMNASIUM: dict[str, Any] = {
    "preload": ("gymnasium",),
    "package": "gymnasium",
    "names": gymnasium_ids,
    "elsewhere": " Envs of another package: gymnasium:THE_PACKAGE:ID.",
    "renders": True,
}
#: Family -> its entry. A name without a family is looked up in this order.
FAMILIES = {
    "meltingpot": Family(
        form="meltingpot:NAME",
        factory=MeltingPotFactory,
        # The package is not imported, which is slow.
        names=lambda: (*substrate_names(), *scenario_names()),
        limit="max_steps",
    ),
    "gymnasium": Family(
        form="gymnasium:[MODULE:]ID",
        build=_build_gymnasium,
        limit="max_episode_steps",
        **_OF_GYMNASIUM,
    ),
    "gymnasium_vec": Family(
        form="gymnasium_vec:ID[:ROWS]",
        build=_build_gymnasium_vec,
        is_listed=False,
        has_rows=True,
        **_OF_GYMNASIUM,
    ),
    "envpool": Family(
        form="envpool:TASK[:ROWS]",
        build=_build_envpool,
        preload=("envpool",),
        package="envpool",
        names=_envpool_tasks,
        is_listed=False,
        has_rows=True,
    ),
    "dm_control": Family(
        form="dm_control:DOMAIN/TASK",
        build=_build_dm_control,
        preload=("dm_control.suite",),
        package="dm_control",
        names=_dm_control_tasks,
    ),
    "pettingzoo": Family(
        form="pettingzoo:ID-OR-MODULE",
        factory=PettingZooFactory,
        package="pettingzoo",
        names=_pettingzoo_ids,
        elsewhere=" Envs of another package: pettingzoo:THE_MODULE.",
        renders=True,
        limit="max_cycles",
    ),
    "torchrl": Family(
        form="torchrl:MODULE:CALLABLE",
        package="torchrl",
        is_listed=False,
    ),
    "python": Family(form="python:MODULE:CALLABLE", is_listed=False, limit="max_steps"),
}
