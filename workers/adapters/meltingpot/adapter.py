"""Melting Pot substrates and scenarios behind the partial-reset protocol.

Keys, shapes and dtypes are those of TorchRL's `MeltingpotEnv`: world observations at the root without
their "WORLD." prefix (`RGB`), what each agent sees under `("agents", "observation", ...)` stacked over
agents (scalars are `[P, 1]`), `("agents", "reward")` float64 `[P, 1]`, `("agents", "action")` int64 `[P]`.

Ends: Melting Pot reports every end alike, also at the frame cap. Here an end at the cap is `truncated`, any other
`terminated`. So a real end in the very step of the cap counts as truncated, and an env whose settings name no cap (not
built by Melting Pot's own builder) is always `terminated`.

Seeds: `reset(seed=s)` builds that very episode from `s`, also for a user's own `substrate.build(...)`. There the
build's own random seed is unused, so the first reset builds again (`MeltingPotFactory` builds from the first seed at
once). Melting Pot is not reproducible by its seed alone; see
`MeltingPotFactory(deterministic=True)`. An env in which no episode builder is found cannot be seeded:
`spec.metadata["can_seed"]` says so.

The adapter always resets by Melting Pot's own `reset`, never by a step after the end, which would restart the env in
place without rebuilding it.
"""

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from envherd.shm.specs import Discrete, EnvSpec, Key, LeafSpec
from envherd.workers.adapters.base import Adapter, Mask, Options, StepValues
from envherd.workers.adapters.common.values import seeded_random
from envherd.workers.errors import ActionError, ResetNeeded, SpecError

# ---- episodes ----------------------------------------------------------------------------------
# Access the innermost wrapper of a Melting Pot env, which holds its episodes' seed and frame cap.
#
# Finds Melting Pot's `ResetWrapper`, or the one that `MeltingPotFactory` puts in its place, under any number
# of wrappers, by its attributes: importing this file imports no Melting Pot.

_WORLD_RGB = "WORLD.RGB"
#: What Melting Pot's own build function closes over; see `meltingpot.utils.substrates.builder.builder`.
_SEEDS = "env_seeds"
_SETTINGS = "lab2d_settings_dict"


class Episodes:
    """Handle on the wrapper that builds dmlab2d anew for every episode.

    Attributes:
        wrapper: that wrapper; None where the env has none.
        max_frames: the frame cap; None if the env's settings do not name it.
        cell_px: side of a cell of the map in the pictures.
        level: the Lua level, e.g. "the_matrix", which several substrates share; empty where unknown.
        can_seed: whether `seed_next` has an effect.
    """

    def __init__(self, env: Any) -> None:
        self.wrapper: Any = next(
            (
                layer
                for layer in layers(env)
                # Asked of the layer alone: a wrapper passes other names on to the env inside.
                if hasattr(type(layer), "seed_next")
                or "_rebuild_environment" in getattr(layer, "__dict__", {})
            ),
            None,
        )
        self._cells = _closure(getattr(self.wrapper, "_rebuild_environment", None))
        settings = self._settings()
        cap = settings.get("maxEpisodeLengthFrames")
        self.max_frames = None if cap is None else int(cap)
        self.level = str(settings.get("levelName", "")).rpartition("/")[2]
        self.cell_px = int(settings.get("spriteSize", 8))  # of Melting Pot's maps
        self._is_ours = hasattr(type(self.wrapper), "seed_next")
        self.can_seed = self._is_ours or {_SEEDS, _SETTINGS} <= self._cells.keys()

    def seed_next(self, seed: int) -> None:
        """Make the next `reset` build its episode from a seed in `[0, 2**32)`; later seeds are derived from it."""
        if self._is_ours:
            self.wrapper.seed_next(seed)
        elif self.can_seed:
            seeds = spaced_seeds(seed)
            # Built, and no episode started: Melting Pot would start it as it is.
            if not self.wrapper._reset:
                if self._settings().get("env_seed") == str(seed):
                    next(seeds)
                else:
                    self.wrapper._reset = True  # no public way to ask for a rebuild
            self._cells[_SEEDS].cell_contents = seeds

    def world_rgb(self) -> np.ndarray | None:
        """Draw the world now, uint8 `[H, W, 3]` (fresh memory); None before the first episode or without a view."""
        lab2d = vars(self.wrapper).get("_env") if self.wrapper is not None else None
        raw = getattr(lab2d, "_env", None)
        if raw is None:
            return None
        try:
            return np.asarray(raw.observation(_WORLD_RGB))
        except KeyError:
            return None

    def _settings(self) -> Mapping[str, Any]:
        if _SETTINGS in self._cells:
            settings: Mapping[str, Any] = self._cells[_SETTINGS].cell_contents
            return settings
        return getattr(self.wrapper, "settings", None) or {}


def layers(env: Any) -> Iterator[Any]:
    """Yield an env and what it wraps, outermost first, without touching what is built on demand."""
    while env is not None:
        yield env
        held = getattr(env, "__dict__", {})
        env = next(
            (held[name] for name in ("_env", "_substrate", "env") if name in held),
            None,
        )


def spaced_seeds(first: int) -> Iterator[int]:
    """Yield a seed and then, for episodes without an explicit seed, others that do not overlap a neighbour's."""
    yield first
    following = random.Random(first)
    while True:
        yield following.getrandbits(32)


def _closure(function: Any) -> dict[str, Any]:
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None)
    return (
        dict(zip(code.co_freevars, cells, strict=True))
        if code is not None and cells
        else {}
    )


# ---- fast step ---------------------------------------------------------------------------------
# A shorter way through Melting Pot's wrappers for a step, with the same result.
#
# `Substrate.step` passes through six wrappers, which build dictionaries of every observation that the Lua
# level offers, for every agent, and publish them to subscribers. `DirectStep` sets the same actions on the
# same dmlab2d env, advances it once and reads only what is kept.
#
# Guarantees: observations, rewards and ends are bit for bit those of `env.step`; the wrappers' own state is
# what it would be. It is used only for envs that consist of Melting Pot's own wrappers in their original order, and not
# while the env's observables have a subscriber.


_WRAPPERS = "meltingpot.utils.substrates.wrappers"

#: The classes of an env as Melting Pot builds it, outermost first.
_STOCK = (
    "meltingpot.utils.substrates.substrate.Substrate",
    f"{_WRAPPERS}.collective_reward_wrapper.CollectiveRewardWrapper",
    f"{_WRAPPERS}.discrete_action_wrapper.Wrapper",
    f"{_WRAPPERS}.multiplayer_wrapper.Wrapper",
    f"{_WRAPPERS}.observables_wrapper.ObservablesWrapper",
)
_STOCK_EPISODES = (
    f"{_WRAPPERS}.reset_wrapper.ResetWrapper",
    "envherd.workers.adapters.meltingpot.build.EpisodeEnv",
)
_OVERRIDABLE = ("step", "observation", "events")
_SUBJECTS = ("_action_subject", "_timestep_subject", "_events_subject")
_RUNNING = "RUNNING"
_COLLECTIVE_REWARD = "COLLECTIVE_REWARD"
#: A stack of at least this many dimensions holds images.
_IMAGE = 3


class Views:
    """What the agents of one env see and get: steps it, directly if it is a stock env, and reads it.

    Args:
        env: a `Substrate` or `Scenario`.
        players: name of an observation -> zeros `[P, ...]`.
        worlds: names of the observations that are the same for all agents, read from the first.
        num_players: P.

    Attributes:
        stacks: `players`, written again by each step and reset.
        players: what the agents see: the stacks, and after a direct step for images the tuple of the agents' arrays.
        worlds: name -> value (fresh memory).
        reward: float64 `[P, 1]`, written again as the stacks are.
    """

    def __init__(
        self,
        env: Any,
        players: Mapping[str, np.ndarray],
        worlds: Iterable[str],
        num_players: int,
    ) -> None:
        self._env = env
        self.stacks = dict(players)
        self.players: dict[str, Any] = dict(players)
        self.worlds: dict[str, Any] = dict.fromkeys(worlds)
        self.reward = np.zeros((num_players, 1))
        self._direct: DirectStep | None = None
        chain = stock_layers(env)
        if chain is not None:
            images = [name for name, stack in players.items() if stack.ndim >= _IMAGE]
            self._direct = DirectStep(
                chain,
                {
                    name: stack
                    for name, stack in players.items()
                    if name not in (*images, _COLLECTIVE_REWARD)
                },
                images,
                self.reward,
                players.get(_COLLECTIVE_REWARD),
            )

    def forget(self) -> None:
        """Drop the episode's dmlab2d env, so that it is freed before the next one is built."""
        if self._direct is not None:
            self._direct.forget()

    def step(
        self,
        actions: np.ndarray,
        as_native: Callable[[np.ndarray], list[Any]] = np.ndarray.tolist,
    ) -> bool:
        """Make one transition and read it; return whether the episode has ended.

        Args:
            actions: int64 `[P]`.
            as_native: what the env gets in place of them, if it is not stepped directly.
        """
        if self._direct is not None and self._direct.is_possible():
            return self._direct.step(actions, self.worlds, self.players)
        timestep = self._env.step(as_native(actions))
        has_ended = bool(timestep.last())
        self.take(timestep)
        self.reward[:, 0] = timestep.reward
        return has_ended

    def take(self, timestep: Any) -> None:
        """Read the observations of a `timestep`; a scenario's world views are not among them."""
        self.players.update(self.stacks)
        for name, stack in self.stacks.items():
            for row, observation in zip(stack, timestep.observation, strict=True):
                row[...] = observation[name]
        if "_is_focal" not in vars(self._env):
            self.take_worlds(timestep)

    def take_worlds(self, timestep: Any) -> None:
        """Read the world views of a `timestep` of the substrate."""
        first = timestep.observation[0]
        for name in self.worlds:
            self.worlds[name] = first[name]


class DirectStep:
    """Steps one stock Melting Pot env.

    Args:
        chain: the env's layers, from `stock_layers`.
        numbers: key -> `[P, ...]` array to read every agent's observation into.
        images: keys of the observations that `step` returns as a tuple of the agents' arrays, as read.
        reward: float64 `[P, 1]`, to read rewards into.
        collective_reward: float64 `[P, 1]` for the sum of the rewards, or None where it is not kept.
    """

    def __init__(
        self,
        chain: list[Any],
        numbers: Mapping[str, np.ndarray],
        images: Iterable[str],
        reward: np.ndarray,
        collective_reward: np.ndarray | None,
    ) -> None:
        self._episodes = chain[-1]
        self._subjects = [
            getattr(layer, name) for layer in (chain[0], chain[4]) for name in _SUBJECTS
        ]
        table = chain[2]._action_table
        self._action_names = tuple(table[0])
        self._action_table = np.array(
            [[row[name] for name in self._action_names] for row in table],
            np.int32,
        )
        self._reward = reward
        self._collective_reward = collective_reward
        players = range(1, len(reward) + 1)
        self._reads = {
            f"{i}.{key}": rows[i - 1] for key, rows in numbers.items() for i in players
        }
        self._reads |= {f"{i}.REWARD": reward[i - 1] for i in players}
        self._images = {key: [f"{i}.{key}" for i in players] for key in images}
        self._lab2d: Any = None
        self._places = np.zeros(0, np.intp)
        self._is_stock = False

    def forget(self) -> None:
        """Drop the episode's dmlab2d env, so that it is freed before the next one is built."""
        self._lab2d = None

    def is_possible(self) -> bool:
        """Return whether this env may be stepped directly now: a stock dmlab2d env inside, no subscriber, no end."""
        lab2d = self._episodes._env
        if lab2d is not self._lab2d:
            self._meet(lab2d)
        for subject in self._subjects:
            if subject.observers:
                return False
        return self._is_stock and not lab2d._reset_next_step

    def step(
        self,
        actions: np.ndarray,
        worlds: dict[str, Any],
        players: dict[str, Any],
    ) -> bool:
        """Make one transition; legal right after `is_possible` has returned True.

        Args:
            actions: int64 `[P]`, an index per agent, checked by the caller.
            worlds: name of a world observation -> replaced by its value (fresh memory).
            players: key of an image -> replaced by the tuple of the agents' values (fresh memory).

        Returns:
            Whether the episode has ended.
        """
        lab2d = self._lab2d
        raw = lab2d._env
        lab2d._act_discrete[self._places] = self._action_table.take(actions, 0)
        raw.act_discrete(lab2d._act_discrete)
        status, _ = raw.advance()
        has_ended = status.name != _RUNNING
        lab2d._status = status
        lab2d._reset_next_step = has_ended
        read = raw.observation
        for name, place in self._reads.items():
            place[...] = read(name)
        for key, names in self._images.items():
            players[key] = tuple(map(read, names))
        for name in worlds:
            worlds[name] = read(name)
        if self._collective_reward is not None:
            self._collective_reward[...] = self._reward.sum()
        return has_ended

    def _meet(self, lab2d: Any) -> None:
        """Learn where each agent's actions go: the order differs from one Lua state to the next."""
        self._lab2d = lab2d
        own = vars(lab2d)
        places = own.get("_act_discrete_map", {})
        names = [
            [f"{i + 1}.{name}" for name in self._action_names]
            for i in range(len(self._reward))
        ]
        # Melting Pot sends whole numbers alone; anything else takes the long way.
        self._is_stock = (
            _name(lab2d) == "dmlab2d.Environment"
            and not any(name in own for name in _OVERRIDABLE)
            and {name for row in names for name in row} == places.keys()
            and len(own["_act_continuous"]) == 0
            and len(own["_act_text"]) == 0
        )
        if self._is_stock:
            self._places = np.array(
                [[places[name] for name in row] for row in names],
                np.intp,
            )


def stock_layers(env: Any) -> list[Any] | None:
    """Return the wrappers of an env that is exactly as Melting Pot builds it, outermost first; else None."""
    chain = []
    for layer in layers(env):
        if any(name in getattr(layer, "__dict__", ()) for name in _OVERRIDABLE):
            return None
        chain.append(layer)
        if len(chain) > len(_STOCK):
            break
    names = tuple(_name(layer) for layer in chain)
    return chain if names[:-1] == _STOCK and names[-1] in _STOCK_EPISODES else None


def _name(instance: Any) -> str:
    return f"{type(instance).__module__}.{type(instance).__qualname__}"


# ---- adapter -----------------------------------------------------------------------------------

_WORLD = "WORLD."
_GROUP = "agents"


class MeltingPotAdapter(Adapter):
    """One `Substrate`, or one `Scenario`, whose rows are its focal agents.

    In a scenario the world view comes from the substrate inside: no focal agent is meant to act on it.
    Observations and rewards that `reset` and `step` return are buffers of this adapter, written again by
    the next call. World views are fresh, and so are the images of a stock env's step: tuples of the agents' arrays.

    Args:
        env: as built by the user's factory, or by `MeltingPotFactory`, whose options it carries.

    Raises:
        SpecError: agents that differ in their observations or actions.
    """

    family = "meltingpot"

    def __init__(self, env: Any) -> None:
        self.env = env
        self._options = options = getattr(env, "envherd_options", None)
        self._name = "" if options is None else str(options.name)
        self._max_steps = None if options is None else options.max_steps
        self._episodes = Episodes(env)
        self._is_scenario = "_is_focal" in vars(env)
        self._num_actions = _num_actions(env)
        observed = _player_specs(env)
        self._num_players = len(observed)
        players = {
            name: spec
            for name, spec in sorted(observed[0].items())
            if not name.startswith(_WORLD)
        }
        worlds = self._world_specs(observed[0])
        self._views = Views(
            env,
            {
                name: np.zeros((self._num_players, *(spec.shape or (1,))), spec.dtype)
                for name, spec in players.items()
                if self._keeps(name)
            },
            worlds,
            self._num_players,
        )
        self._num_steps = 0
        self._needs_reset = True
        self.spec = self._make_spec(worlds)
        if self._is_scenario and worlds:
            env.observables().substrate.timestep.subscribe(
                on_next=self._views.take_worlds
            )

    def reset(
        self,
        seed: int | None,
        options: Options = None,
        mask: Mask = None,  # noqa: ARG002
    ) -> list[Any]:
        """Build and start an episode, from the seed if there is one. Melting Pot takes no options."""
        if options:
            raise ValueError(
                f"reset failed: expected no arguments, as Melting Pot has none, got {sorted(options)}."
            )
        self._needs_reset = True
        self._views.forget()
        if seed is None:
            timestep = self.env.reset()
        else:
            self._episodes.seed_next(seed)
            # A scenario draws its bots from Python's global generator.
            with seeded_random(seed) if self._is_scenario else contextlib.nullcontext():
                timestep = self.env.reset()
        self._views.take(timestep)
        self._num_steps = 0
        self._needs_reset = False
        return self._values()

    def step(self, action: list[Any]) -> StepValues:
        """Make one transition.

        Raises:
            ActionError: not one integer in `[0, A)` per agent; the env was not touched.
            ResetNeeded: the episode has ended or none has begun; the env was not touched.
        """
        if self._needs_reset:
            raise ResetNeeded(
                "step failed: expected an episode under way, got a Melting Pot env that needs a reset."
            )
        has_ended = self._views.step(self._checked(action[0]))
        self._num_steps += 1
        truncated = (
            self._is_at(self._episodes.max_frames)
            if has_ended
            else self._is_at(self._max_steps)
        )
        self._needs_reset = has_ended or truncated
        return (
            self._values(),
            [self._views.reward],
            has_ended and not truncated,
            truncated,
        )

    def render(self) -> np.ndarray | None:
        """Return the world now, uint8 `[H, W, 3]`, also where the world view is not kept; None before a reset."""
        seen = self._views.worlds.get(_WORLD_RGB)
        return self._episodes.world_rgb() if seen is None else seen

    def _values(self) -> list[Any]:
        return [*self._views.worlds.values(), *self._views.players.values()]

    def _is_at(self, limit: int | None) -> bool:
        return limit is not None and self._num_steps >= limit

    def _checked(self, action: Any) -> np.ndarray:
        actions = np.asarray(action)
        if actions.shape != (self._num_players,) or actions.dtype.kind not in "iu":
            raise self._refusal(f"{actions.dtype} {actions.shape}")
        indices: list[int] = actions.tolist()
        if min(indices) < 0 or max(indices) >= self._num_actions:
            player = next(
                i
                for i, index in enumerate(indices)
                if not 0 <= index < self._num_actions
            )
            raise self._refusal(f"{indices[player]} for player_{player}")
        return actions.astype(np.int64, copy=False)

    def _refusal(self, got: str) -> ActionError:
        return ActionError(
            f"step failed: agents/action expected {self._num_players} integers in 0..{self._num_actions - 1}, "
            f"got {got} ({self._name or self._episodes.level}). The env was not stepped."
        )

    def _make_spec(self, worlds: Mapping[str, Any]) -> EnvSpec:
        seen: dict[Key, Any] = {
            (name.removeprefix(_WORLD),): spec for name, spec in worlds.items()
        } | {
            (_GROUP, "observation", name): stack
            for name, stack in self._views.stacks.items()
        }
        cap = self._episodes.max_frames
        return EnvSpec(
            observation=tuple(
                LeafSpec(key, like.shape, like.dtype.name) for key, like in seen.items()
            ),
            action=(
                LeafSpec(
                    (_GROUP, "action"),
                    (self._num_players,),
                    "int64",
                    Discrete(self._num_actions),
                ),
            ),
            reward=(LeafSpec((_GROUP, "reward"), (self._num_players, 1), "float64"),),
            groups=(((_GROUP,), (self._num_players,)),),
            family=self.family,
            metadata={
                "name": self._name,
                "level": self._episodes.level,
                "agent_names": [f"player_{i}" for i in range(self._num_players)],
                "agent_roles": list(getattr(self.env, "envherd_roles", ())),
                "is_focal": list(getattr(self.env, "envherd_is_focal", ())),
                "agent_count": self._num_players,
                "num_actions": self._num_actions,
                "frame_key": "RGB" if _WORLD_RGB in worlds else "",
                "cell_px": self._episodes.cell_px,
                "max_episode_steps": min(
                    (limit for limit in (cap, self._max_steps) if limit is not None),
                    default=None,
                ),
                "can_seed": self._episodes.can_seed,
            },
        )

    def _keeps(self, name: str) -> bool:
        options = self._options
        return options is None or (
            (options.keys is None or name in options.keys) and name not in options.drop
        )

    def _world_specs(self, observed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the specs of the world views that are kept; a scenario hides its substrate's."""
        # No public way.
        inner = self.env._substrate.observation_spec()[0] if self._is_scenario else {}
        has_rgb = self._options is None or self._options.world_rgb
        return {
            name: spec
            for name, spec in sorted({**inner, **observed}.items())
            if name.startswith(_WORLD) and (has_rgb or name != _WORLD_RGB)
        }


def _player_specs(env: Any) -> list[dict[str, Any]]:
    specs = [dict(spec) for spec in env.observation_spec()]
    shapes = [
        {name: (spec.shape, spec.dtype) for name, spec in player.items()}
        for player in specs
    ]
    for i, player in enumerate(shapes):
        different = sorted(
            name
            for name in player.keys() | shapes[0].keys()
            if player.get(name) != shapes[0].get(name)
        )
        if different:
            raise SpecError(
                f"reading the specs failed: expected all agents to see the same, got player_0 and player_{i} "
                f"differing in {different[0]}. Agents with different observations cannot be stacked."
            )
    return specs


def _num_actions(env: Any) -> int:
    counts = {int(spec.num_values) for spec in env.action_spec()}
    if len(counts) != 1:
        raise SpecError(
            f"reading the specs failed: expected one number of actions for all, got {sorted(counts)}."
        )
    return counts.pop()
