"""Factories for envs given by name, as on a command line or in a config file.

Each is a frozen value that pickles by reference to this module, so a worker that unpickles it imports only the env's
own family. Melting Pot has its own factory, `MeltingPotFactory`.

Making a factory checks nothing. `gymnasium_ids`, `pettingzoo_ids`, `vmas_scenarios` and `dm_control_tasks` list the
names, and `named_callable` looks one up.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envherd.workers.errors import FactoryError

_TORCHRL_BASE = "torchrl.envs.common.EnvBase"


@dataclass(frozen=True)
class GymnasiumFactory:
    """Build `gymnasium.make(env_id)`.

    Attributes:
        env_id: as Gymnasium reads it: `CartPole-v1`, `ALE/Pong-v5`, `module_that_registers:MyEnv-v0`.
        render_mode: "rgb_array" for envs that are to be drawn; None leaves it to the env.
    """

    env_id: str
    render_mode: str | None = None

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules worth importing before workers are forked."""
        return ("gymnasium",)

    def __call__(self, **env_kwargs: Any) -> Any:
        """Return the env, made with these arguments (`ParallelEnv(..., env_kwargs={"max_episode_steps": 50})`)."""
        import gymnasium

        return gymnasium.make(self.env_id, **{"render_mode": self.render_mode, **env_kwargs})


@dataclass(frozen=True)
class DmControlFactory:
    """Build `dm_control.suite.load(domain, task)`.

    Attributes:
        domain: e.g. `cartpole`.
        task: e.g. `balance`.
    """

    domain: str
    task: str

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules worth importing before workers are forked."""
        return ("dm_control.suite",)

    def __call__(self, **env_kwargs: Any) -> Any:
        """Return the env, loaded with these arguments (`env_kwargs={"task_kwargs": {"time_limit": 2.0}}`)."""
        from dm_control import suite

        return suite.load(self.domain, self.task, **env_kwargs)


@dataclass(frozen=True)
class PettingZooFactory:
    """Build a PettingZoo env, and say how its agents are grouped.

    Attributes:
        env: an id, which has a slash (`sisl/multiwalker-v9`; for PettingZoo 1.26 and later); a module
            (`mpe2.simple_spread_v3`), whose `parallel_env(...)` is called, or `env(...)` if it has no other; or
            a callable that returns an env.
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
        is_module = isinstance(self.env, str) and "/" not in self.env
        return (str(self.env),) if is_module else ("pettingzoo",)

    def __call__(self, **env_kwargs: Any) -> Any:
        """Return the env, made with these arguments (`ParallelEnv(..., env_kwargs={"N": 5})`)."""
        rendering = {"render_mode": self.render_mode} if self.render_mode else {}
        env = self._make()(**rendering, **env_kwargs)
        env.envherd_options = self
        return env

    def _make(self) -> Callable[..., Any]:
        if callable(self.env):
            return self.env
        if "/" in self.env:
            import pettingzoo

            return functools.partial(pettingzoo.make, "parallel", self.env)
        module = importlib.import_module(self.env)
        make: Callable[..., Any] = getattr(module, "parallel_env", None) or module.env
        return make


@dataclass(frozen=True)
class OldGymFactory:
    """Build an env of the API before Gymnasium: `step` returns four values, `reset` an observation alone.

    Workers run such an env only if this factory declares it; see `adapters/gymnasium/old_gym.py` for the meaning of
    `done`, seeds, spaces and pictures.

    Attributes:
        env: a callable that returns the env, or an id of the package `gym`.
        horizon: an end in the step of this number is `truncated`, for envs that cut their episodes without setting
            `info["TimeLimit.truncated"]`.
    """

    env: str | Callable[..., Any]
    horizon: int | None = None

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules worth importing before workers are forked."""
        module = "gym" if isinstance(self.env, str) else str(getattr(self.env, "__module__", None) or "gymnasium")
        return ("gymnasium", *(() if module == "__main__" else (module,)))

    def __call__(self, **env_kwargs: Any) -> Any:
        """Return the env, made with these arguments, as a `gymnasium.Env`."""
        from envherd.workers.adapters.gymnasium.old_gym import OldGymEnv

        return OldGymEnv(self._make()(**env_kwargs), horizon=self.horizon)

    def _make(self) -> Callable[..., Any]:
        if callable(self.env):
            return self.env
        return functools.partial(importlib.import_module("gym").make, self.env)


@dataclass(frozen=True)
class VmasFactory:
    """Build a VMAS env: `num_rows` worlds of a scenario, in torch.

    Attributes:
        scenario: e.g. `balance`; those of `vmas_scenarios`.
        num_rows: worlds that are stepped together, the B of its batch shape.
        device: where they are, e.g. "cpu" or "cuda:0".
        max_steps: steps until an episode is truncated; None never does.
        continuous_actions: False for indices.
    """

    scenario: str
    num_rows: int = 32
    device: str = "cpu"
    max_steps: int | None = None
    continuous_actions: bool = True

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules worth importing before workers are forked."""
        return ("vmas", "envherd.workers.adapters.simulators.vmas")

    def __call__(self, **scenario_kwargs: Any) -> Any:
        """Return the env, its scenario made with these arguments (`ParallelEnv(..., env_kwargs={"n_agents": 5})`)."""
        import vmas

        from envherd.workers.adapters.simulators.vmas import seed_builds

        seed_builds()
        return vmas.make_env(
            self.scenario,
            num_envs=self.num_rows,
            device=self.device,
            max_steps=self.max_steps,
            continuous_actions=self.continuous_actions,
            **scenario_kwargs,
        )


@dataclass(frozen=True)
class CallableFactory:
    """Build an env by calling a callable of a module.

    Attributes:
        module: where it is, importable in the worker.
        name: of the callable in it; dots lead into classes.
        must_be_torchrl: refuse an env that is not TorchRL's.
    """

    module: str
    name: str
    must_be_torchrl: bool = False

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules worth importing before workers are forked."""
        return (self.module,)

    def __call__(self, **env_kwargs: Any) -> Any:
        """Return the env, made with these arguments.

        Raises:
            FactoryError: it is not TorchRL's although it must be, or the callable is not there.
        """
        env = named_callable(self.module, self.name)(**env_kwargs)
        if self.must_be_torchrl and _TORCHRL_BASE not in map(_qualified_name, type(env).__mro__):
            raise FactoryError(
                f"torchrl:{self.module}:{self.name} failed: expected a TorchRL env, got {_qualified_name(type(env))}. "
                f"Name it python:{self.module}:{self.name} to run envs of other families."
            )
        return env


def gymnasium_ids() -> list[str]:
    """Return the ids of all envs that Gymnasium knows so far, sorted."""
    import gymnasium

    return sorted(gymnasium.registry)


#: Packages that register envs with Gymnasium when they are imported.
GYMNASIUM_PLUG_INS = ("ale_py", "minigrid", "highway_env", "gymnasium_robotics", "metaworld")


def plug_in_ids() -> dict[str, str]:
    """Import the plug-ins of Gymnasium that are installed; return id -> plug-in, for `PLUG_IN:ID`."""
    for name in GYMNASIUM_PLUG_INS:
        if importlib.util.find_spec(name) is not None:
            # One that is broken has no ids.
            with contextlib.suppress(Exception), contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(name)
    return registered_by_plug_ins()


def registered_by_plug_ins() -> dict[str, str]:
    """Return id -> plug-in of the envs that the plug-ins imported so far have registered."""
    import gymnasium

    makers = {env_id: re.split("[.:]", str(spec.entry_point))[0] for env_id, spec in gymnasium.registry.items()}
    return {env_id: maker for env_id, maker in sorted(makers.items()) if maker in GYMNASIUM_PLUG_INS}


def pettingzoo_ids() -> list[str]:
    """Return the ids of all parallel envs that PettingZoo knows so far, sorted; none of a PettingZoo without ids."""
    import pettingzoo

    return sorted(getattr(pettingzoo, "parallel_registry", ()))


def vmas_scenarios() -> list[str]:
    """Return the names of all scenarios that come with VMAS, sorted."""
    import vmas

    return sorted(vmas.scenarios + vmas.mpe_scenarios + vmas.debug_scenarios)


def dm_control_tasks() -> list[str]:
    """Return `domain/task` for all tasks of the dm_control suite, sorted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a missing display matters only for rendering
        from dm_control import suite

    return sorted(f"{domain}/{task}" for domain, task in suite.ALL_TASKS)


def named_callable(module: str, name: str) -> Callable[..., Any]:
    """Import a module and return a callable in it.

    Raises:
        FactoryError: there is no such name, or it is not callable.
        Exception: whatever importing the module raises.
    """
    target: Any = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(target, part):
            raise FactoryError(f"{module}:{name} failed: expected a callable of this name, got none in {module}.")
        target = getattr(target, part)
    if not callable(target):
        raise FactoryError(f"{module}:{name} failed: expected a callable, got {type(target).__qualname__}.")
    found: Callable[..., Any] = target
    return found


def _qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
