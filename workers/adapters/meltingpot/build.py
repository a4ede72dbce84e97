"""Build Melting Pot substrates and scenarios such that each episode is built from its own seed.

This module imports Melting Pot's substrates, without TensorFlow and JAX; only building a scenario imports these.
Melting Pot's own wrappers are used unchanged, around a different innermost one:

- it builds dmlab2d only when an episode starts, from that episode's seed (Melting Pot's own builds one with a random
  seed, and then another for the first seeded episode);
- it reads only the observations that are kept;
- a finished instance is dropped before the next is built, so that memory never holds two;
- its Lua code is a copy of the installed one that resets faster (`lua_tree.py`).

Guarantees: with `deterministic`, an episode is a function of its seed and its actions alone.
Assumes: a substrate's own config declares the right shapes; the first build checks it.
"""

import contextlib
import copy
import itertools
import os
import random
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import dm_env
import dmlab2d
import numpy as np
from dmlab2d import runfiles_helper

from envherd.workers.adapters.common.values import seeded_random
from envherd.workers.adapters.meltingpot.adapter import spaced_seeds
from envherd.workers.adapters.meltingpot.light_import import install_lazy_import
from envherd.workers.adapters.meltingpot.lua_tree import lua_root
from envherd.workers.errors import FactoryError, SpecError

install_lazy_import()

from meltingpot import substrate as substrate_lib  # noqa: E402  # only light after the line above
from meltingpot.utils.substrates import builder  # noqa: E402
from meltingpot.utils.substrates import substrate as substrate_env  # noqa: E402
from meltingpot.utils.substrates.wrappers import (  # noqa: E402
    collective_reward_wrapper,
    discrete_action_wrapper,
    multiplayer_wrapper,
    observables_wrapper,
    reset_wrapper,
)

if TYPE_CHECKING:
    from envherd.workers.adapters.meltingpot.factory import MeltingPotFactory

_WORLD_RGB = "WORLD.RGB"
_COLLECTIVE_REWARD = "COLLECTIVE_REWARD"
#: Observations of Melting Pot's component `LocationObserver`.
_POSITIONS = {
    "POSITION": dm_env.specs.Array((2,), np.int32),
    "ORIENTATION": dm_env.specs.Array((), np.int32),
}

FlatSettings = dict[str, str]


class Specs(NamedTuple):
    """Raw specs of dmlab2d, by name."""

    observation: dict[str, Any]
    action: dict[str, Any]


class EpisodeEnv(reset_wrapper.ResetWrapper):  # type: ignore[misc]  # untyped base
    """The innermost wrapper: a dmlab2d env per episode, built from the episode's seed when it is needed.

    Args:
        make_settings: returns the lab2d settings; called once, or for each seed if they depend on `random`.
        options: what to keep and how to reset.
        wanted: names of raw observations to read, without the agent prefix.
        specs: raw observation and action specs to answer with before the first build; None builds at once.
    """

    def __init__(
        self,
        make_settings: Callable[[], Any],
        options: "MeltingPotFactory",
        wanted: frozenset[str],
        specs: Specs | None,
    ) -> None:
        # Not super().__init__(), which would build an env from a seed that is not the episode's.
        self._recipe = _Recipe(
            make_settings,
            is_deterministic=options.deterministic,
            has_positions=options.positions,
        )
        self._is_reset_in_place = options.fast_reset
        self._wanted = wanted
        self._promised = specs
        self._seeds = spaced_seeds(random.randint(1, 2**32 - 1))
        self._next_seed: int | None = None
        # Seed of a build that no episode has used yet.
        self._built_from: int | None = None
        self._is_closed = False
        self.settings = self._recipe.settings
        if specs is None:
            self._build(self._seed_of_next_episode())

    def __getattr__(self, name: str) -> Any:
        # Melting Pot's wrappers reach the dmlab2d env as `_env`; it is made when first reached.
        if name == "_env" and not self.__dict__.get("_is_closed", True):
            self._build(self._seed_of_next_episode())
            return self.__dict__["_env"]
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r} (closed, or never there)"
        )

    def seed_next(self, seed: int) -> None:
        """Build the next episode from a seed in `[0, 2**32)`; the seeds of later episodes are derived from it."""
        self._seeds = spaced_seeds(seed)
        self._next_seed = None

    def reset(self) -> dm_env.TimeStep:
        """Start the next episode: a build from its seed, or with `fast_reset` the same build started anew."""
        seed = self._seed_of_next_episode()
        self._next_seed = None
        if (
            self._is_reset_in_place
            and "_env" in self.__dict__
            and self._built_from is None
        ):
            self._env._rng = np.random.RandomState(seed)  # noqa: SLF001  # as dmlab2d.Environment(seed=seed) does
        elif self._built_from != seed:
            self._build(seed)
        self._built_from = None
        return self._env.reset()

    def action_spec(self) -> Any:
        """Return dmlab2d's action spec, known before anything is built."""
        return (
            self._env.action_spec() if self._promised is None else self._promised.action
        )

    def observation_spec(self) -> Any:
        """Return dmlab2d's spec of the observations that are read, known before anything is built."""
        return (
            self._env.observation_spec()
            if self._promised is None
            else self._promised.observation
        )

    def close(self) -> None:
        """Free the dmlab2d env; nothing builds another one after it."""
        self._is_closed = True
        self.__dict__.pop("_env", None)

    def _seed_of_next_episode(self) -> int:
        if self._next_seed is None:
            self._next_seed = next(self._seeds)
        return self._next_seed

    def _build(self, seed: int) -> None:
        self.__dict__.pop("_env", None)  # frees the finished one first
        self._built_from = None
        raw = dmlab2d.Lab2d(
            runfiles_helper.find(),
            {**self._recipe.settings_for(seed), "env_seed": str(seed)},
        )
        self._env = dmlab2d.Environment(
            env=raw,
            observation_names=[
                name
                for name in raw.observation_names()
                if _without_player(name) in self._wanted
            ],
            seed=seed,
        )
        self._built_from = seed
        if self._promised is not None:
            _check_promise(
                self._promised,
                self._env,
                self.settings.get("levelName", ""),
            )
            self._promised = None


class _Recipe:
    """Lab2d settings in the form that dmlab2d takes."""

    def __init__(
        self,
        make_settings: Callable[[], Any],
        *,
        is_deterministic: bool,
        has_positions: bool,
    ) -> None:
        self._make_settings = make_settings
        self._has_positions = has_positions
        self._lua_root = lua_root(is_ordered=is_deterministic)
        if is_deterministic:
            with seeded_random(0):
                # A config that draws gives other settings for each seed.
                before = random.getstate()
                self.settings = self._flatten()
                self._is_per_seed = random.getstate() != before
        else:
            # As in Melting Pot, configs draw from the global generator, once.
            self.settings = self._flatten()
            self._is_per_seed = False

    def settings_for(self, seed: int) -> FlatSettings:
        if not self._is_per_seed:
            return self.settings
        with seeded_random(seed):
            return self._flatten()

    def _flatten(self) -> FlatSettings:
        """Do what `meltingpot.utils.substrates.builder.builder` does before it builds."""
        settings = builder.config_dict.ConfigDict(
            copy.deepcopy(self._make_settings())
        ).unlock()
        builder.apply_prefab_overrides(settings)
        builder.maybe_build_and_add_avatar_objects(settings)
        if self._has_positions:
            _observe_positions(settings.simulation.gameObjects)
        builder.locate_and_overwrite_level_directory(settings)
        if self._lua_root is not None and settings.get("levelDirectory"):
            settings.levelDirectory = self._lua_root
        flat: FlatSettings = builder.parse_python_settings_for_dmlab2d(settings)
        return flat


def build_substrate(options: "MeltingPotFactory") -> Any:
    """Build the substrate that a factory describes, or that of a scenario without its bots.

    Raises:
        FactoryError: a role or an observation key that the substrate does not have.
    """
    config = substrate_lib.get_config(options.substrate)
    scenario = options.scenario_config
    default = config.default_player_roles if scenario is None else scenario.roles
    roles = tuple(default if options.roles is None else options.roles)
    unknown = sorted(set(roles) - set(config.valid_roles))
    if unknown or not roles:
        raise FactoryError(
            f"building {options.name} failed: expected roles among {sorted(config.valid_roles)}, one per agent, "
            f"got {unknown or 'none'}. roles=None takes the {len(config.default_player_roles)} default ones."
        )
    kept = _kept_keys(options, config.individual_observation_names)
    individual = [name for name in config.individual_observation_names if name in kept]
    individual += _POSITIONS if options.positions else ()
    env = _assemble(options, config, roles, individual)
    env.envherd_roles = roles
    env.envherd_is_focal = (
        (True,) * len(roles) if scenario is None else scenario.is_focal
    )
    return env


def build_scenario(options: "MeltingPotFactory") -> Any:
    """Build the scenario that a factory describes; imports TensorFlow, for its bots.

    Raises:
        FactoryError: the bots' saved models are not installed, or an observation key is unknown.
    """
    from meltingpot.configs import bots as bot_configs
    from meltingpot.configs import scenarios as scenario_configs

    config = scenario_configs.SCENARIO_CONFIGS[options.name]
    names = sorted(set().union(*config.bots_by_role.values()))
    paths = {
        name: bot_configs.BOT_CONFIGS[name].model_path
        for name in names
        if name in bot_configs.BOT_CONFIGS
    }
    missing = [name for name, path in paths.items() if not os.path.exists(path)]
    if missing:
        raise _models_missing(options.name, missing, bot_configs.MODELS_ROOT)

    from meltingpot import bot as bot_lib
    from meltingpot import scenario as scenario_lib
    from meltingpot.utils.scenarios import scenario as scenario_env

    substrate_config = substrate_lib.get_config(config.substrate)
    individual = list(substrate_config.individual_observation_names)
    _kept_keys(
        options,
        [name for name in individual if name in scenario_lib.PERMITTED_OBSERVATIONS],
    )
    with contextlib.ExitStack() as stack:
        inner = _assemble(options, substrate_config, config.roles, individual)
        stack.callback(inner.close)
        bots = {}
        for name in names:
            bots[name] = bot_lib.build(name)
            stack.callback(bots[name].close)
        env = scenario_env.build_scenario(
            substrate=inner,
            bots=bots,
            bots_by_role=config.bots_by_role,
            roles=config.roles,
            is_focal=config.is_focal,
            permitted_observations=scenario_lib.PERMITTED_OBSERVATIONS,
        )
        # From here on, the scenario closes the substrate and the bots.
        stack.pop_all()
    env.envherd_roles = tuple(itertools.compress(config.roles, config.is_focal))
    env.envherd_is_focal = (True,) * len(env.envherd_roles)
    return env


def _assemble(
    options: "MeltingPotFactory",
    config: Any,
    roles: Any,
    individual: list[str],
) -> Any:
    worlds = [
        name
        for name in config.global_observation_names
        if options.world_rgb or name != _WORLD_RGB
    ]
    # A config describes its default number of agents; for another number, read the env itself.
    has_spec = len(roles) == len(config.default_player_roles)
    specs = (
        _promised_specs(config, len(roles), individual, worlds) if has_spec else None
    )
    env = observables_wrapper.ObservablesWrapper(
        EpisodeEnv(
            partial(config.lab2d_settings_builder, roles=roles, config=config),
            options,
            frozenset([*individual, *worlds, "REWARD"]),
            specs,
        )
    )
    env = multiplayer_wrapper.Wrapper(
        env,
        individual_observation_names=individual,
        global_observation_names=worlds,
    )
    env = discrete_action_wrapper.Wrapper(
        env,
        action_table=tuple(dict(row) for row in config.action_set),
    )
    return substrate_env.Substrate(
        collective_reward_wrapper.CollectiveRewardWrapper(env)
    )


def _promised_specs(
    config: Any,
    num_players: int,
    individual: list[str],
    worlds: list[str],
) -> Specs:
    """Return the specs that the substrate's own config declares for dmlab2d."""
    given: Mapping[str, Any] = {**config.timestep_spec.observation, **_POSITIONS}
    observation = {name: given[name] for name in worlds}
    action = {}
    for player in range(1, num_players + 1):
        observation.update({f"{player}.{name}": given[name] for name in individual})
        observation[f"{player}.REWARD"] = config.timestep_spec.reward
        for name in config.action_set[0]:
            values = [row[name] for row in config.action_set]
            action[f"{player}.{name}"] = dm_env.specs.BoundedArray(
                (),
                np.int32,
                min(values),
                max(values),
            )
    return Specs(observation, action)


def _observe_positions(game_objects: Any) -> None:
    """Add the component that observes an agent's place to each avatar."""
    for one in game_objects:
        if any(component["component"] == "Avatar" for component in one["components"]):
            one["components"].append(
                {
                    "component": "LocationObserver",
                    "kwargs": {"objectIsAvatar": True, "alsoReportOrientation": True},
                }
            )


def _check_promise(promised: Specs, env: Any, level: str) -> None:
    observation, action = promised
    given = env.observation_spec()
    for name, spec in observation.items():
        got = given.get(name)
        if got is None or got.shape != spec.shape or got.dtype != spec.dtype:
            raise SpecError(
                f"building {level} failed: expected {name} {spec.dtype} {spec.shape} by the substrate's config, "
                f"got {'nothing' if got is None else f'{got.dtype} {got.shape}'}. "
                f"Pass roles explicitly, in another number than the default, or report it."
            )
    if set(action) != set(env.action_spec()):
        raise SpecError(
            f"building {level} failed: expected actions {sorted(action)}, got {sorted(env.action_spec())}."
        )


def _kept_keys(options: "MeltingPotFactory", individual: Any) -> frozenset[str]:
    known = {*individual, _COLLECTIVE_REWARD}
    for key in (*(options.keys or ()), *options.drop):
        if key not in known:
            raise FactoryError(
                f"building {options.name} failed: expected keys and drop among {sorted(known)}, got {key!r}. "
                f"The world view is governed by world_rgb."
            )
    kept = (known if options.keys is None else known & set(options.keys)) - set(
        options.drop
    )
    if not kept:
        raise FactoryError(
            f"building {options.name} failed: expected keys to keep some of {sorted(known)}, got none."
        )
    return frozenset(kept)


def _without_player(name: str) -> str:
    player, _, rest = name.partition(".")
    return rest if player.isdigit() else name


def _models_missing(scenario: str, missing: list[str], root: str) -> FactoryError:
    shown = ", ".join(missing[:3]) + (
        f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    )
    return FactoryError(
        f"building {scenario} failed: expected the saved models of its bots in {root}, got none for {shown}. "
        f"dm-meltingpot downloads them while pip builds it, unless meltingpot-assets-2.3.0.tar.gz is in "
        f"{tempfile.gettempdir()}: with network access or that file, "
        f"`pip install --force-reinstall --no-deps --no-cache-dir dm-meltingpot`. Without them, put policies in "
        f"the bots' places: MeltingPotFactory({scenario!r}, bots=False), or evaluate(..., background=policy)."
    )
