"""The direct way of `PettingZooEnv` and `PettingZooWrapper` around parallel envs. `direct.py` has its rules.

As in TorchRL, each step begins with zeros, which remain for agents that the env returned nothing for. The mask of an
action spec, which `rand_action` of the TorchRL env reads, is written when its root is asked for.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torchrl.data import Categorical, OneHot
from torchrl.envs import EnvBase

from envherd.executor.facades.torchrl.ways.direct import (
    DirectWay,
    TdKey,
    action_reader,
    encoder,
    leaves_of,
    numpy_dtype,
    require,
)
from envherd.workers.adapters.base import StepValues
from envherd.workers.adapters.torchrl.private_api import wrapped_env

_ENDS = ("done", "terminated", "truncated")
_NOTHING: Mapping[str, Any] = {}


class DirectPettingZoo(DirectWay):
    """Steps one parallel env."""

    reuses_buffers = True

    def __init__(
        self,
        env: EnvBase,
        inputs: list[TdKey],
        observed: list[TdKey],
        rewards: list[TdKey],
    ) -> None:
        super().__init__(env, inputs, observed, rewards)
        require(env.parallel, "its agents take turns")
        names = {group: list(agents) for group, agents in env.group_map.items()}
        require(
            {*inputs, *rewards} == {*itertools.product(names, ("action", "reward"))},
            f"it has the inputs {inputs} and the rewards {rewards}",
        )
        specs = {
            **leaves_of(env.full_observation_spec),
            **leaves_of(env.full_done_spec),
            **leaves_of(env.full_reward_spec),
        }
        self._arrays = {
            key: np.zeros(spec.shape, numpy_dtype(spec)) for key, spec in specs.items()
        }
        known = {*_ENDS, *((group, end) for group in names for end in _ENDS), *rewards}
        require(known <= specs.keys(), "it lacks ends")
        self.native = wrapped_env(env)
        self._use_mask = bool(env.use_mask)
        self._use_any = bool(env.done_on_any)
        self._readers = [action_reader(env.full_action_spec[key]) for key in inputs]
        self._acting = [names[key[0]] for key in inputs]
        self._encode_state = encoder(specs["state"]) if env.return_state else None
        own = {
            key: spec
            for key, spec in specs.items()
            if key not in known and key != "state"
        }
        require(
            all(isinstance(key, tuple) and key[0] in names for key in own),
            f"it observes {list(own)}",
        )
        self._groups = [
            _Group(env, group, agents, list(own), self._arrays)
            for group, agents in names.items()
        ]
        self._values = [self._arrays[key] for key in observed]
        self._reward_values = [self._arrays[key] for key in rewards]

    def step(self, action: list[Any]) -> StepValues:
        actions: dict[Any, Any] = {}
        for read, agents, value in zip(
            self._readers,
            self._acting,
            action,
            strict=True,
        ):
            actions.update(zip(agents, read(value), strict=True))
        observations, rewards, terminations, truncations, infos = self.native.step(
            actions
        )
        self._observe(observations, infos)
        left = self.native.agents if self._use_mask else None
        for group in self._groups:
            group.take_ends(observations, rewards, terminations, truncations, left)
        fold = np.logical_or if self._use_any else np.logical_and
        for end in _ENDS:
            self._arrays[end][0] = functools.reduce(
                fold,
                [fold.reduce(group.ends[end], None) for group in self._groups],
            )
        return (
            self._current(),
            list(self._reward_values),
            bool(self._arrays["done"][0]),
            False,
        )

    def reset(self) -> list[Any]:
        observations, infos = self.native.reset()
        for end in _ENDS:
            self._arrays[end][...] = False
        for group in self._groups:
            group.clear_ends(observations)
        self._observe(observations, infos)
        return self._current()

    def root(self) -> Any:
        for group in self._groups:
            group.update_mask()
        return super().root()

    def _observe(
        self,
        observations: Mapping[Any, Any],
        infos: Mapping[Any, Any],
    ) -> None:
        acting = self.native.agents
        for group in self._groups:
            group.observe(observations, infos, acting)
        if self._encode_state is not None:
            self._arrays["state"][...] = self._encode_state(self.native.state())

    def _current(self) -> list[Any]:
        self.latest = self._values
        self.is_ahead = True
        return list(self._values)


class _Entry(NamedTuple):
    """An observation of an agent.

    Attributes:
        place: its row of the array, `[1, ...]` (VIEW).
        path: of its value in what the env returns for the agent.
        encode: converts the value.
    """

    place: Any
    path: tuple[str, ...]
    encode: Callable[[Any], np.ndarray]


class _Group:
    """The agents of one group, and their rows of the arrays.

    Args:
        env: the TorchRL env.
        name: of the group.
        agents: its agents, in the order of their rows.
        keys: of the observation leaves of all groups.
        arrays: key -> `[A, ...]`.

    Attributes:
        ends: name -> bool `[A, 1]`.
    """

    def __init__(
        self,
        env: EnvBase,
        name: str,
        agents: list[Any],
        keys: list[TdKey],
        arrays: Mapping[TdKey, np.ndarray],
    ) -> None:
        self._agents = list(enumerate(agents))
        self.ends = {end: arrays[name, end] for end in _ENDS}
        self._reward = arrays[name, "reward"]
        self._mask = arrays[name, "mask"] if env.use_mask else None
        self._action_mask = (
            arrays[name, "action_mask"] if env.has_action_mask[name] else None
        )
        self._action_spec = env.full_action_spec[name, "action"]
        own = [key for key in keys if key[0] == name]
        self._infos = {
            key[2]: arrays[key] for key in own if key[1] == "info" and len(key) == 3
        }
        paths = [key for key in own if key[1] == "observation"]
        spec = env.full_observation_spec
        self._rows = [
            [
                _Entry(arrays[key][row : row + 1], key[2:], encoder(spec[key][row]))
                for key in paths
            ]
            for row, _ in self._agents
        ]
        self._num_entries = len({key[2] for key in paths if len(key) > 2})
        others = [
            key
            for key in own
            if key not in paths and key[1] not in ("mask", "action_mask", "info")
        ]
        is_read = not others and all(len(key) == 3 for key in own if key[1] == "info")
        require(
            is_read and all(arrays[key].shape[:1] == (len(agents),) for key in own),
            f"it observes {own}",
        )

    def observe(
        self,
        observations: Mapping[Any, Any],
        infos: Mapping[Any, Any],
        acting: Any,
    ) -> None:
        """Write what its agents observe, zeros for those that the env returned nothing for."""
        if self._mask is not None:
            self._mask[...] = [agent in acting for _, agent in self._agents]
        if self._action_mask is not None:
            self._action_mask[...] = True
        for array in self._infos.values():
            array[...] = 0
        for row, agent in self._agents:
            if agent in observations:
                self._observe_one(
                    row,
                    agent,
                    observations[agent],
                    infos,
                    is_acting=agent in acting,
                )
            else:
                for entry in self._rows[row]:
                    entry.place[...] = 0

    def _observe_one(
        self,
        row: int,
        agent: Any,
        observation: Any,
        infos: Mapping[Any, Any],
        *,
        is_acting: bool,
    ) -> None:
        info = (
            infos[agent] if self._infos or self._action_mask is not None else _NOTHING
        )
        if self._action_mask is not None:
            has_own = isinstance(observation, dict) and "action_mask" in observation
            source = observation if has_own else info
            if is_acting and isinstance(source, dict) and "action_mask" in source:
                self._action_mask[row] = np.asarray(source["action_mask"], bool)
        if (
            isinstance(observation, Mapping)
            and len(observation.keys() - {"action_mask"}) != self._num_entries
        ):
            raise KeyError(
                f"expected {self._num_entries} observations of {agent}, got {list(observation)}"
            )
        for place, path, encode in self._rows[row]:
            place[0] = encode(functools.reduce(operator.getitem, path, observation))
        if self._infos:
            for name, value in info.items():
                if name != "action_mask" or self._action_mask is None:
                    self._infos[name][row] = value

    def take_ends(
        self,
        observations: Mapping[Any, Any],
        rewards: Mapping[Any, Any],
        terminations: Mapping[Any, Any],
        truncations: Mapping[Any, Any],
        left: Any,
    ) -> None:
        """Write the rewards and ends of its agents.

        Args:
            observations: by agent; so are the next three.
            rewards: see there.
            terminations: see there.
            truncations: see there.
            left: agents that must have observations; None if all must.

        Raises:
            ValueError: one of them has none.
        """
        done, terminated, truncated = self.ends.values()
        for row, agent in self._agents:
            if agent in observations:
                self._reward[row] = rewards[agent]
                ends = terminations[agent], truncations[agent]
            elif left is None:
                raise ValueError(
                    "Dead agents found in the environment, you need to set use_mask=True to allow this."
                )
            elif agent in left:
                raise ValueError(
                    f"Dead agent {agent} not found in step observation but still available in {left}"
                )
            else:
                self._reward[row] = 0
                ends = terminations.get(agent, True), truncations.get(agent, True)
            terminated[row], truncated[row] = ends
            done[row] = any(ends)

    def clear_ends(self, observations: Mapping[Any, Any]) -> None:
        """Write what a reset leaves: no ends.

        Raises:
            KeyError: an agent has no observation.
        """
        for _, agent in self._agents:
            observations[agent]
        for flag in self.ends.values():
            flag[...] = False

    def update_mask(self) -> None:
        """Write the mask of the action spec."""
        if self._action_mask is not None and isinstance(
            self._action_spec,
            (Categorical, OneHot),
        ):
            self._action_spec.update_mask(torch.from_numpy(self._action_mask.copy()))
