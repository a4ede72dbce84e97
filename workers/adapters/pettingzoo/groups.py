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
done, terminated, truncated       [A, 1]           bool     see `adapter.py`
mask                              [A]              bool     whether the agent acts in the next step
action_mask                       [A, actions]     bool     what it may do there; all True for agents that do not act
info (one entry each)             [A, *its own]    float32  numbers that all its agents had in their first infos
================================  ===============  =======  =======================================================

`action_mask` is there where observations (as a Dict's entry) or infos have one, and is taken out of them.
Agents whose spaces differ in structure, shape or dtype cannot be stacked: each becomes a separate group, under its
own name. Where only bounds or numbers of actions differ they stay together.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gymnasium import spaces

from envherd.shm.specs import Binary, LeafSpec
from envherd.workers.adapters.common.tree import (
    RESERVED_NAMES,
    builder,
    flattener,
    leaf_specs,
    stacked,
)
from envherd.workers.adapters.gymnasium.spaces import tree_below
from envherd.workers.errors import SpecError
from envherd.workers.writers import writer_for

Agent = Hashable

ACTION_MASK = "action_mask"


@dataclass(frozen=True)
class AgentSpaces:
    """The spaces and info entries of one agent.

    Attributes:
        agent: as the env calls it.
        observation: its space, without the action mask.
        action: its space.
        mask_shape: of its action mask; None where it has none.
        has_mask_in_observation: whether the mask is an entry of its observation (else of its info).
        info_shapes: of the numbers in its first info.
    """

    agent: Agent
    observation: Any
    action: Any
    mask_shape: tuple[int, ...] | None
    has_mask_in_observation: bool
    info_shapes: Mapping[str, tuple[int, ...]]


def read_agent(agent: Agent, observation: Any, action: Any, info: Any) -> AgentSpaces:
    """Read an agent's spaces and its first info (None if it had none)."""
    info = info if isinstance(info, Mapping) else {}
    shapes = {
        key: np.shape(value)
        for key, value in info.items()
        if isinstance(key, str) and _is_numeric(value)
    }
    mask_shape = shapes.pop(ACTION_MASK, None)
    has_mask = (
        isinstance(observation, spaces.Dict) and ACTION_MASK in observation.spaces
    )
    if has_mask:
        mask_shape = observation[ACTION_MASK].shape
        observation = spaces.Dict(
            {
                key: space
                for key, space in observation.spaces.items()
                if key != ACTION_MASK
            }
        )
    return AgentSpaces(agent, observation, action, mask_shape, has_mask, shapes)


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
        reward: `[A, 1]`.
        flags: done, terminated and truncated, bool `[3, A, 1]`.
        mask, action_mask: `[A]`, and `[A, actions]` or None.

    Raises:
        SpecError: the agents' values cannot be stacked.
    """

    def __init__(self, name: str, members: Sequence[AgentSpaces]) -> None:
        self.name = name
        self.size = size = len(members)
        trees = [
            tree_below(member.observation, "observation", name) for member in members
        ]
        acts = [tree_below(member.action, "action", name) for member in members]
        observation = _stacked([leaf_specs(tree) for tree in trees], members)
        self.action = _stacked([leaf_specs(act) for act in acts], members)
        self.reward = np.zeros((size, 1), np.float32)
        self.flags = np.zeros((3, size, 1), bool)
        self.mask = np.zeros(size, bool)
        self.action_mask = _common_mask(members)
        self.observed = [np.zeros(leaf.shape, leaf.dtype) for leaf in observation]
        self.infos = {
            key: np.zeros((size, *shape), np.float32)
            for key, shape in _common_infos(members).items()
        }
        flags = (
            {"mask": self.mask}
            if self.action_mask is None
            else {ACTION_MASK: self.action_mask, "mask": self.mask}
        )
        self.observation = (
            *observation,
            *(
                LeafSpec((name, key), array.shape, "bool", Binary())
                for key, array in flags.items()
            ),
            *(
                LeafSpec((name, "info", key), array.shape, "float32")
                for key, array in self.infos.items()
            ),
        )
        self.values = [*self.observed, *flags.values(), *self.infos.values()]
        self.seats = [
            Seat(self, index, member, tree, act)
            for index, (member, tree, act) in enumerate(
                zip(members, trees, acts, strict=True)
            )
        ]


class Place:
    """Where an agent's reward and flags are stored.

    Args:
        agent: as the env calls it.
        reward: `[1]` (VIEW).
        flags: done, terminated and truncated, bool `[3]` (VIEW).
    """

    def __init__(self, agent: Agent, reward: np.ndarray, flags: np.ndarray) -> None:
        self.agent = agent
        self.reward = reward
        self._ends = flags

    @property
    def has_ended(self) -> bool:
        """Whether the agent has terminated or was truncated."""
        return bool(self._ends[0])

    @property
    def terminated(self) -> bool:
        """Whether the agent has terminated."""
        return bool(self._ends[1])

    @property
    def truncated(self) -> bool:
        """Whether the agent was truncated."""
        return bool(self._ends[2])

    def end(self, *, terminated: bool, truncated: bool) -> None:
        """Store how the agent has ended, if it has."""
        self._ends[:] = terminated or truncated, terminated, truncated


class Seat(Place):
    """One agent's place in its group.

    Attributes:
        build: action leaves of this agent -> its action.
    """

    def __init__(
        self,
        group: AgentGroup,
        index: int,
        known: AgentSpaces,
        observation: Any,
        action: Any,
    ) -> None:
        super().__init__(known.agent, group.reward[index], group.flags[:, index, 0])
        name = str(known.agent)
        self.group = group
        self.index = index
        self.build = builder(action)
        self._flatten = flattener(observation, f"the observation of {name}")
        # Errors of a writer name the agent, not its group.
        self._writers = [
            writer_for(replace(leaf, key=(name, *leaf.key[1:])), array)
            for leaf, array in zip(
                leaf_specs(observation),
                group.observed,
                strict=True,
            )
        ]
        self._info_writers = {
            key: writer_for(
                LeafSpec((name, "info", key), array.shape[1:], "float32"),
                array,
            )
            for key, array in group.infos.items()
        }
        self._has_mask_in_observation = known.has_mask_in_observation
        self._is_blank = False

    def blank(self) -> None:
        """Store that the env returned nothing for the agent and that it does not act."""
        # The rows of an agent that is away are written once, not at each step.
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
        index = self.index
        group = self.group
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
            group.action_mask[index] = (
                self._flags(legal) if is_acting and legal is not None else True
            )

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


def make_groups(
    agents: Sequence[AgentSpaces],
    group_map: Mapping[str, Sequence[Agent]] | None,
) -> list[AgentGroup]:
    """Group agents.

    Args:
        agents: all that the env may have.
        group_map: group name -> its agents; None groups them by name.

    Raises:
        SpecError: a map that is not a partition of the agents, or that groups agents that cannot be stacked; a name
            that a batch uses itself; a value without a fixed shape.
    """
    known = {agent.agent: agent for agent in agents}
    chosen: Mapping[str, Sequence[Agent]] = (
        groups_by_name(list(known)) if group_map is None else group_map
    )
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
        groups.setdefault(
            prefix if underscore and _is_integer(number) else str(agent),
            [],
        ).append(agent)
    return groups


def _is_integer(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


def _check_partition(
    groups: Mapping[str, Sequence[Agent]],
    agents: list[Agent],
) -> None:
    placed = [agent for names in groups.values() for agent in names]
    for agent in (*placed, *agents):
        if placed.count(agent) != 1 or agent not in agents:
            got = "twice"
            if agent not in placed:
                got = "in none"
            elif agent not in agents:
                got = "which the env does not have"
            raise SpecError(
                f"grouping the agents failed: expected each of {', '.join(map(str, agents))} in one group of the "
                f"group_map, got {agent!r} {got}. Correct the group_map."
            )


def _check_names(names: list[str]) -> None:
    for name in names:
        if (
            not name
            or name in RESERVED_NAMES
            or name == "state"
            or names.count(name) > 1
        ):
            raise SpecError(
                f"grouping the agents failed: expected names of groups that differ from each other and from "
                f"{', '.join(sorted(RESERVED_NAMES))} and state, got {name!r}. Give PettingZooFactory a group_map."
            )


def _common_infos(members: Sequence[AgentSpaces]) -> dict[str, tuple[int, ...]]:
    """Return the info entries that all members have in the same shape."""
    others = [member.info_shapes for member in members[1:]]
    return {
        key: shape
        for key, shape in members[0].info_shapes.items()
        if all(other.get(key) == shape for other in others)
    }


def _common_mask(members: Sequence[AgentSpaces]) -> np.ndarray | None:
    """Return the members' action masks, all True; None where they have none.

    Raises:
        SpecError: masks of several shapes, or some in observations and some not.
    """
    found = {member.mask_shape for member in members} - {None}
    if not found:
        return None
    if (
        len(found) > 1
        or len({member.has_mask_in_observation for member in members}) > 1
    ):
        raise _cannot_stack(members, "different action masks")
    return np.ones((len(members), *(found.pop() or ())), bool)


def _stacked(
    leaves: Sequence[tuple[LeafSpec, ...]],
    members: Sequence[AgentSpaces],
) -> tuple[LeafSpec, ...]:
    """Return members' leaves as leaves of their group, `[A, *their shape]`.

    Raises:
        SpecError: members differ in keys, shapes or dtypes, or a value has no fixed shape.
    """
    if (
        len(
            {
                tuple((leaf.key, leaf.shape, leaf.dtype) for leaf in own)
                for own in leaves
            }
        )
        > 1
    ):
        raise _cannot_stack(members, "different ones")
    return tuple(_stack(column, members) for column in zip(*leaves, strict=True))


def _stack(column: tuple[LeafSpec, ...], members: Sequence[AgentSpaces]) -> LeafSpec:
    first = column[0]
    if first.is_side:
        raise SpecError(
            f"reading the spaces of {members[0].agent} failed: expected values of a fixed shape, got {first}. "
            f"Values of agents are stacked: encode it as an array in a wrapper around the env."
        )
    return replace(
        first,
        shape=(len(column), *first.shape),
        domain=stacked([leaf.domain for leaf in column], first.shape),
    )


def _is_numeric(value: Any) -> bool:
    try:
        return np.asarray(value).dtype.kind in "biuf"
    except ValueError:  # ragged
        return False


def _cannot_stack(members: Sequence[AgentSpaces], got: str) -> SpecError:
    return SpecError(
        f"grouping the agents failed: expected agents of one group to have the same keys, shapes and dtypes, got {got} "
        f"({', '.join(str(member.agent) for member in members)}). Put them into separate groups."
    )
