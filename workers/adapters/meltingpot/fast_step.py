"""A shorter way through Melting Pot's wrappers for a step, with the same result.

`Substrate.step` passes through six wrappers, which build dictionaries of every observation that the Lua
level offers, for every agent, and publish them to subscribers. `DirectStep` sets the same actions on the
same dmlab2d env, advances it once and reads only what is kept.

Guarantees: observations, rewards and ends are bit for bit those of `env.step`; the wrappers' own state is
what it would be. It is used only for envs that consist of Melting Pot's own wrappers in their original order, and not
while the env's observables have a subscriber.
"""

# ruff: noqa: SLF001  # what a step consists of is private to Melting Pot and dmlab2d

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from envherd.workers.adapters.meltingpot.episodes import layers

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
