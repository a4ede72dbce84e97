"""Groups of agents: their keys, shapes and dtypes, and where each agent's values are stored.

Names are those of TorchRL's `PettingZooWrapper`. Agents called `NAME_0`, `NAME_1`, ... are the group `NAME`, any
other agent is a separate group; a group of A agents has, stacked over them:

================================  ===============  =======  =======================================================
key below the group               shape            dtype    value
================================  ===============  =======  =======================================================
observation (a Dict's entries     [A, *its own]    its own  zeros for agents that say nothing
below it)
action                            [A, *its own]    its own  discrete actions are int64 indices
reward                            [A, 1]           float32  0 for agents that get none
done, terminated, truncated       [A, 1]           bool     see `ends.py`
mask                              [A]              bool     whether the agent acts in the next step
action_mask                       [A, actions]     bool     what it may do there; all True for agents that do not act
info (one entry each)             [A, *its own]    float32  numbers that all its agents had in their first infos
================================  ===============  =======  =======================================================

`action_mask` is there where observations (as a Dict's entry) or infos have one, and is taken out of them.
Agents whose spaces differ in structure, shape or dtype cannot be stacked: each becomes a separate group, under its
own name. Where only bounds or numbers of actions differ they stay together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from envherd.shm.specs import Binary, LeafSpec
from envherd.workers.adapters.common.tree import RESERVED_NAMES, builder, flattener, leaf_specs
from envherd.workers.adapters.gymnasium.spaces import action_tree, nested_observation_tree
from envherd.workers.adapters.pettingzoo.spaces import (
    ACTION_MASK,
    Agent,
    AgentSpaces,
    common_infos,
    common_mask,
    stacked,
)
from envherd.workers.errors import SpecError
from envherd.workers.writers import writer_for


class AgentGroup:
    """Agents whose values are stacked.

    The arrays are written again by every reset and step.

    Args:
        name: the group's key.
        members: its agents, in the order in which they are stacked.

    Attributes:
        observation: leaves of the agents' observations, of `action_mask`, `mask` and infos.
        values: arrays aligned with `observation`.
        action: leaves of their actions.
        seats: one for each agent.
        reward, done, terminated, truncated: `[A, 1]`.
        mask, action_mask: `[A]`, and `[A, actions]` or None.

    Raises:
        SpecError: the agents' values cannot be stacked.
    """

    def __init__(self, name: str, members: Sequence[AgentSpaces]) -> None:
        self.name = name
        self.size = size = len(members)
        trees = [nested_observation_tree(member.observation, (name, "observation")) for member in members]
        acts = [action_tree(member.action, (name, "action")) for member in members]
        observation = stacked([leaf_specs(tree) for tree in trees], members)
        self.action = stacked([leaf_specs(act) for act in acts], members)
        self.reward = np.zeros((size, 1), np.float32)
        self.done, self.terminated, self.truncated = (np.zeros((size, 1), bool) for _ in range(3))
        self.mask, self.action_mask = np.zeros(size, bool), common_mask(members)
        self.observed = [np.zeros(leaf.shape, leaf.dtype) for leaf in observation]
        self.infos = {key: np.zeros((size, *shape), np.float32) for key, shape in common_infos(members).items()}
        flags = {"mask": self.mask} if self.action_mask is None else {ACTION_MASK: self.action_mask, "mask": self.mask}
        self.observation = (
            *observation,
            *(LeafSpec((name, key), array.shape, "bool", Binary()) for key, array in flags.items()),
            *(LeafSpec((name, "info", key), array.shape, "float32") for key, array in self.infos.items()),
        )
        self.values = [*self.observed, *flags.values(), *self.infos.values()]
        triples = zip(members, trees, acts, strict=True)
        self.seats = [Seat(self, index, member, tree, act) for index, (member, tree, act) in enumerate(triples)]

    @property
    def done_values(self) -> tuple[np.ndarray, ...]:
        """The three done leaves, in their order."""
        return self.done, self.terminated, self.truncated


class Seat:
    """One agent's place in its group.

    Attributes:
        agent: as the env calls it.
        build: action leaves of this agent -> its action.
    """

    def __init__(self, group: AgentGroup, index: int, known: AgentSpaces, observation: Any, action: Any) -> None:
        name = str(known.agent)
        self.group = group
        self.index = index
        self.agent = known.agent
        self.build = builder(action)
        self._flatten = flattener(observation, f"the observation of {name}")
        leaves = [replace(leaf, key=(name, *leaf.key[1:])) for leaf in leaf_specs(observation)]
        self._writers = [writer_for(leaf, array) for leaf, array in zip(leaves, group.observed, strict=True)]
        self._info_writers = {
            key: writer_for(LeafSpec((name, "info", key), array.shape[1:], "float32"), array)
            for key, array in group.infos.items()
        }
        self._has_mask_in_observation = known.has_mask_in_observation
        self._is_blank = False

    @property
    def end(self) -> tuple[bool, bool]:
        """Whether the agent has terminated, and whether it was truncated."""
        return bool(self.group.terminated[self.index, 0]), bool(self.group.truncated[self.index, 0])

    @end.setter
    def end(self, flags: tuple[bool, bool]) -> None:
        group, index = self.group, self.index
        group.terminated[index, 0], group.truncated[index, 0] = flags
        group.done[index, 0] = any(flags)

    def blank(self) -> None:
        """Store that the env returned nothing for the agent and that it does not act."""
        if self._is_blank:
            return
        for array in self.group.values:
            array[self.index] = 0
        if self.group.action_mask is not None:
            self.group.action_mask[self.index] = True
        self._is_blank = True

    def observe(self, observation: Any, info: Any, *, is_acting: bool) -> None:
        """Store the agent's observation, whether it acts next, and its legal actions."""
        self._is_blank = False
        index, group = self.index, self.group
        info = info if isinstance(info, Mapping) else {}
        legal = info.get(ACTION_MASK)
        if self._has_mask_in_observation:
            observation = dict(observation)
            legal = observation.pop(ACTION_MASK, None)
        for write, value in zip(self._writers, self._flatten(observation), strict=True):
            write(index, value)
        for key, write in self._info_writers.items():
            if key in info:
                write(index, info[key])
            else:
                group.infos[key][index] = 0
        group.mask[index] = is_acting
        if group.action_mask is not None:
            group.action_mask[index] = self._flags(legal) if is_acting and legal is not None else True

    def _flags(self, legal: Any) -> np.ndarray:
        assert self.group.action_mask is not None
        shape = self.group.action_mask.shape[1:]
        array = np.asarray(legal)
        if array.shape != shape or array.dtype.kind not in "biu":
            raise SpecError(
                f"reading the action mask of {self.agent} failed: expected flags of shape {shape}, "
                f"got {array.dtype} {array.shape}. Give one for each action."
            )
        return array.astype(bool)


def make_groups(agents: Sequence[AgentSpaces], group_map: Mapping[str, Sequence[Agent]] | None) -> list[AgentGroup]:
    """Group agents.

    Args:
        agents: all that the env may have.
        group_map: group name -> its agents; None groups them by name.

    Raises:
        SpecError: a map that is not a partition of the agents, or that groups agents that cannot be stacked; a name
            that a batch uses itself; a value without a fixed shape.
    """
    known = {agent.agent: agent for agent in agents}
    chosen: Mapping[str, Sequence[Agent]] = groups_by_name(list(known)) if group_map is None else group_map
    _check_partition(chosen, list(known))
    groups: list[AgentGroup] = []
    for name, names in chosen.items():
        members = [known[agent] for agent in names]
        try:
            groups.append(AgentGroup(name, members))
        except SpecError:
            if group_map is not None or len(members) == 1:
                raise
            groups.extend(AgentGroup(str(member.agent), [member]) for member in members)
    _check_names([group.name for group in groups])
    return groups


def groups_by_name(agents: Sequence[Agent]) -> dict[str, list[Agent]]:
    """Return `{"NAME": ["NAME_0", "NAME_1", ...], "other": ["other"], ...}`."""
    groups: dict[str, list[Agent]] = {}
    for agent in agents:
        prefix, underscore, number = str(agent).rpartition("_")
        groups.setdefault(prefix if underscore and _is_integer(number) else str(agent), []).append(agent)
    return groups


def _is_integer(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


def _check_partition(groups: Mapping[str, Sequence[Agent]], agents: list[Agent]) -> None:
    placed = [agent for names in groups.values() for agent in names]
    for agent in (*placed, *agents):
        if placed.count(agent) != 1 or agent not in agents:
            got = "in none" if agent not in placed else "twice" if agent in agents else "which the env does not have"
            raise SpecError(
                f"grouping the agents failed: expected each of {', '.join(map(str, agents))} in one group of the "
                f"group_map, got {agent!r} {got}. Correct the group_map."
            )


def _check_names(names: list[str]) -> None:
    for name in names:
        if not name or name in RESERVED_NAMES or name == "state" or names.count(name) > 1:
            raise SpecError(
                f"grouping the agents failed: expected names of groups that differ from each other and from "
                f"{', '.join(sorted(RESERVED_NAMES))} and state, got {name!r}. Give PettingZooFactory a group_map."
            )
