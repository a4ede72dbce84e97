"""PettingZoo parallel envs behind the partial-reset protocol. Groups of agents have their keys, shapes and dtypes.

Agents may leave and return. `mask` in a row marks the agents that act in the next step; the env gets only their
actions. If the env returns nothing for an agent, its observation in the row is zeros and its reward 0.

Ends of agents: `terminated` and `truncated` below a group are the env's flags of the agent. They keep their values
while it is away and are cleared when it returns. An agent that leaves without a flag counts as terminated.

Ends of episodes: the root is done when no agent is left, as with TorchRL's `done_on_any=False` (TorchRL's default for
parallel envs, True, ends an episode with its first agent). The root is `terminated` if all agents that have ended were
terminated, else `truncated` (TorchRL sets neither if some were terminated and some truncated). Then all agents are
done, also those that never took part.

AEC envs are converted by `pettingzoo.utils.conversions.aec_to_parallel` if they allow it. In envs converted by
`turn_based_aec_to_parallel`, only the agent whose turn it is acts.

The adapter resets the env once to learn the entries of its infos and, if it declares no `state_space`, the shape of its
state.
Does not check whether values are inside their spaces (shape and dtype are checked). Refuses agents that are not among
`possible_agents`.
"""

import itertools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from envherd.shm.specs import Binary, EnvSpec, LeafSpec, done_leaves
from envherd.workers.adapters.base import Adapter, Mask, Options, StepValues
from envherd.workers.adapters.common.tree import (
    RESERVED_NAMES,
    builder,
    flattener,
    leaf_specs,
    stacked,
)
from envherd.workers.adapters.common.values import (
    as_flag,
    as_float,
    outline,
    own_options,
)
from envherd.workers.adapters.gymnasium.spaces import frame_rate, tree_below
from envherd.workers.adapters.registry import is_one_of
from envherd.workers.errors import ResetNeeded, SpecError
from envherd.workers.writers import writer_for

# ---- groups ------------------------------------------------------------------------------------
# Groups of agents: their keys, shapes and dtypes, and where each agent's values are stored.
#
# Names are those of TorchRL's `PettingZooWrapper`. Agents called `NAME_0`, `NAME_1`, ... are the group `NAME`, any
# other agent is a separate group; a group of A agents has, stacked over them:
#
# ================================  ===============  =======  =======================================================
# key below the group               shape            dtype    value
# ================================  ===============  =======  =======================================================
# observation (a Dict's entries     [A, *its own]    its own  zeros for agents that say nothing
# below it)
# action                            [A, *its own]    its own  discrete actions are int64 indices
# reward                            [A, 1]           float32  0 for agents that get none
# done, terminated, truncated       [A, 1]           bool     see the head of this file
# mask                              [A]              bool     whether the agent acts in the next step
# action_mask                       [A, actions]     bool     what it may do there; all True for agents that do not act
# info (one entry each)             [A, *its own]    float32  numbers that all its agents had in their first infos
# ================================  ===============  =======  =======================================================
#
# `action_mask` is there where observations (as a Dict's entry) or infos have one, and is taken out of them.
# Agents whose spaces differ in structure, shape or dtype cannot be stacked: each becomes a separate group, under its
# own name. Where only bounds or numbers of actions differ they stay together.

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


# ---- adapter -----------------------------------------------------------------------------------

#: PettingZoo's base class of envs whose agents take turns.
AEC = "pettingzoo.utils.env.AECEnv"

_FIVE = (
    "(observations, rewards, terminations, truncations, infos), each a dict by agent"
)


class ParallelAdapter(Adapter):
    """The steps of an env whose agents may leave and return; subclasses store the values of each agent.

    Args:
        env: what the executor's requests reach.
        parallel: the parallel env that is stepped.
        seats: agent -> where its values are stored.
    """

    family: ClassVar[str] = "pettingzoo"
    is_its_attributes = True
    #: Whether an episode without any agent is an error.
    _needs_agents: ClassVar[bool] = True

    def __init__(self, env: Any, parallel: Any, seats: Mapping[Agent, Any]) -> None:
        self.env = env
        self._parallel = parallel
        self.info: Mapping[Any, Any] = {}
        self._turns = turn_based(parallel)
        self._seats = seats
        # In which the seats store them, aligned with the spec.
        self._rewards: list[np.ndarray] = []
        # Done, terminated and truncated of each group, bool `[A, 1]`.
        self._done_values: list[Any] = []
        self._needs_reset = True

    def reset(
        self,
        seed: int | None,
        options: Options = None,
        mask: Mask = None,  # noqa: ARG002
    ) -> list[Any]:
        """Start a new episode; `options` are `{"options": {...}}`, of which the env gets a copy, or nothing.

        Raises:
            TypeError: a keyword other than `options`.
            SpecError: the env returned anything but `(observations, infos)`, or has no agents.
        """
        # Until the end of this method, because the env may raise.
        self._needs_reset = True
        observations, self.info = checked_reset(self._begin(seed, options))
        if self._needs_agents and not self._parallel.agents:
            raise SpecError(
                "reset failed: expected a PettingZoo env with agents, got one that has none. Fix the env."
            )
        for seat in self._seats.values():
            seat.end(terminated=False, truncated=False)
        self._observe(observations)
        self._needs_reset = False
        return self._row()

    def step(self, action: list[Any]) -> StepValues:
        """Make one transition.

        Raises:
            ResetNeeded: no agent is left, or no episode has begun; the env was not touched.
            SpecError: the env returned no five dicts, left out an agent that acts, or named an unknown one.
        """
        if self._needs_reset:
            raise ResetNeeded(
                "step failed: expected an episode under way, got an env that needs a reset."
            )
        acting = self._acting()
        result = checked_step(self._parallel.step(self._actions(action, acting)))
        _, rewards, terminations, truncations, self.info = result
        self._observe(*result[:4])
        for agent, seat in self._seats.items():
            reward = rewards.get(agent)
            seat.reward[0] = (
                0.0 if reward is None else as_float(reward, f"reward of {agent}")
            )
        terminated, truncated = self._note_ends(terminations, truncations, acting)
        self._needs_reset = terminated or truncated
        return self._row(), list(self._rewards), terminated, truncated

    def done_values(self) -> list[Any]:
        return self._done_values

    def render(self) -> Any:
        """Return what `env.render()` draws, uint8 `[H, W, 3]`, if its render mode is "rgb_array", else None."""
        return (
            self._parallel.render()
            if getattr(self._parallel, "render_mode", None) == "rgb_array"
            else None
        )

    def state_dict(self) -> Any:
        """Return the env's state, and which agents have ended."""
        return {
            "env": super().state_dict(),
            "ends": [
                [seat.terminated, seat.truncated] for seat in self._seats.values()
            ],
            "needs_reset": self._needs_reset,
        }

    def read_state(self, state: Any) -> Callable[[], None]:
        """Check a state that `state_dict` returned; return what restores it."""
        if not (
            isinstance(state, Mapping)
            and {"env", "ends", "needs_reset"} <= state.keys()
        ):
            raise ValueError(
                f"expected a state of a PettingZoo env, got {type(state).__name__}."
            )
        put = super().read_state(state["env"])
        ends = state["ends"]
        needs_reset = state["needs_reset"]
        are_ends = isinstance(ends, list) and all(
            isinstance(end, list) and len(end) == 2 for end in ends
        )
        flags = (
            [needs_reset, *itertools.chain.from_iterable(ends)] if are_ends else [None]
        )
        if not all(isinstance(flag, bool) for flag in flags) or len(ends) != len(
            self._seats
        ):
            raise ValueError(
                f"expected the ends of {len(self._seats)} agents, got {ends!r:.80}, {needs_reset!r:.80}."
            )

        def put_all() -> None:
            put()
            for seat, (terminated, truncated) in zip(
                self._seats.values(),
                ends,
                strict=True,
            ):
                seat.end(terminated=terminated, truncated=truncated)
            self._needs_reset = needs_reset

        return put_all

    def _begin(self, seed: int | None, options: Mapping[str, Any] | None) -> Any:
        """Reset the env and return what it returned."""
        return self._parallel.reset(
            seed=seed,
            options=own_options(options, "PettingZoo env"),
        )

    def _acting(self) -> list[Agent]:
        """Return the agents whose actions the env gets."""
        return list(self._parallel.agents)

    def _note_ends(
        self,
        terminations: Mapping[Agent, Any],
        truncations: Mapping[Agent, Any],
        acting: Collection[Agent],
    ) -> tuple[bool, bool]:
        """Record how agents have ended; return whether the episode has terminated, and whether it was truncated."""
        present = self._parallel.agents
        for agent, seat in self._seats.items():
            terminated = terminations.get(agent)
            truncated = truncations.get(agent)
            if terminated is not None or truncated is not None:
                seat.end(
                    terminated=terminated is not None
                    and as_flag(terminated, f"terminations[{agent!r}]"),
                    truncated=truncated is not None
                    and as_flag(truncated, f"truncations[{agent!r}]"),
                )
            elif agent in present:
                seat.end(terminated=False, truncated=False)
            elif agent in acting:
                seat.end(terminated=True, truncated=False)
        return _end_episode(self._seats, present)

    def _actions(self, action: list[Any], acting: list[Agent]) -> dict[Agent, Any]:
        """Return the actions of the agents that act."""
        raise NotImplementedError

    def _observe(self, *dicts: Mapping[Agent, Any]) -> None:
        """Store the observations, which are the first of the four dicts of a step, or the only one of a reset."""
        raise NotImplementedError

    def _row(self) -> list[Any]:
        """Return the values of the spec's observation leaves."""
        raise NotImplementedError

    def _seat(self, agent: Agent) -> Any:
        seat = self._seats.get(agent)
        if seat is None:
            raise SpecError(
                f"reading observations failed: expected agents among {', '.join(map(str, self._seats))}, "
                f"got {agent!r}. Name all agents that may ever appear in env.possible_agents."
            )
        return seat


class PettingZooAdapter(ParallelAdapter):
    """One `pettingzoo.ParallelEnv`, or an `AECEnv` that can be made one.

    `reset` and `step` return buffers of this adapter, which the next call overwrites. If
    `PettingZooFactory(return_state=True)` built the env, `state` at the root is its `state()`.

    Args:
        env: what the factory returned; it is reset once here.

    Attributes:
        env: the parallel env (of an AEC env, the one that `aec_to_parallel` made of it).
        info: the infos by agent, as the env gave them (VIEW).

    Raises:
        SpecError: no `possible_agents`, an AEC env that cannot be made parallel, spaces without a fixed shape,
            agents that cannot be grouped as the factory says.
    """

    def __init__(self, env: Any) -> None:
        options = getattr(env, "envherd_options", None)
        env = as_parallel(env)
        agents = possible_agents(env)
        try:
            first = env.reset(seed=None, options=None)
        except Exception as error:
            error.add_note(
                "(in the env's reset(seed=None, options=None), by which envherd learns its agents)"
            )
            raise
        _, infos = checked_reset(first)
        self._groups = make_groups(
            [
                read_agent(
                    agent,
                    env.observation_space(agent),
                    env.action_space(agent),
                    infos.get(agent),
                )
                for agent in agents
            ],
            None if options is None else options.group_map,
        )
        super().__init__(
            env,
            env,
            {seat.agent: seat for group in self._groups for seat in group.seats},
        )
        self._values = [value for group in self._groups for value in group.values]
        self._rewards = [group.reward for group in self._groups]
        self._done_values = [value for group in self._groups for value in group.flags]
        has_state = options is not None and options.return_state
        self._state = _state_leaf(env) if has_state else None
        self.spec = self._make_spec()

    def _actions(self, action: list[Any], acting: list[Agent]) -> dict[Agent, Any]:
        start = 0
        parts = {}
        for group in self._groups:
            parts[group.name] = action[start : start + len(group.action)]
            start += len(group.action)
        actions = {}
        for agent in acting:
            seat: Seat = self._seat(agent)
            actions[agent] = seat.build(
                [values[seat.index] for values in parts[seat.group.name]]
            )
        return actions

    def _observe(self, *dicts: Mapping[Agent, Any]) -> None:
        observations = dicts[0]
        acting = acting_agents(self.env, self._turns)
        for agent in self.env.agents:
            if agent not in observations:
                self._seat(agent)
                raise SpecError(
                    f"reading observations failed: expected one of every agent in env.agents, got none of {agent}. "
                    f"Fix the env: agents that are left have an observation."
                )
        for agent in observations:
            self._seat(agent)
        for agent, seat in self._seats.items():
            if agent in observations:
                seat.observe(
                    observations[agent],
                    self.info.get(agent),
                    is_acting=agent in acting,
                )
            else:
                seat.blank()

    def _row(self) -> list[Any]:
        if self._state is None:
            return list(self._values)
        return [*self._values, self.env.state()]

    def _make_spec(self) -> EnvSpec:
        groups = self._groups
        state = () if self._state is None else (self._state,)
        return EnvSpec(
            observation=(
                *(leaf for group in groups for leaf in group.observation),
                *state,
            ),
            action=tuple(leaf for group in groups for leaf in group.action),
            reward=tuple(
                LeafSpec((group.name, "reward"), (group.size, 1), "float32")
                for group in groups
            ),
            done=done_leaves(
                groups=tuple(((group.name,), (group.size, 1)) for group in groups)
            ),
            groups=tuple(((group.name,), (group.size,)) for group in groups),
            family=self.family,
            metadata=_metadata(self.env, groups),
        )


def as_parallel(env: Any) -> Any:
    """Return an env as a parallel env, converted if it is an AEC env."""
    if not is_one_of(env, AEC):
        return env
    from pettingzoo.utils.conversions import aec_to_parallel

    if not env.metadata.get("is_parallelizable", False):
        raise SpecError(
            f"reading the env failed: expected a PettingZoo parallel env, got the AEC env {env}, whose agents do not "
            f"act at the same time. If they take turns, return pettingzoo.utils.conversions."
            f"turn_based_aec_to_parallel(env) from the factory; if all act before the env changes, set "
            f'metadata["is_parallelizable"] = True in it.'
        )
    return aec_to_parallel(env)


def turn_based(env: Any) -> Any:
    """Return the AEC env inside an env in which agents take turns; None for other envs."""
    while type(env).__name__ != "turn_based_aec_to_parallel_wrapper":
        inner = getattr(env, "__dict__", {}).get("env")
        if inner is None:
            return None
        env = inner
    return env.aec_env


def possible_agents(env: Any) -> list[Agent]:
    """Return all agents that may ever appear; refuse an env that names none."""
    agents = list(getattr(env, "possible_agents", ()))
    if not agents:
        raise SpecError(
            f"reading the env failed: expected possible_agents, got none from {type(env).__name__}. "
            f"Name all agents that may ever appear in env.possible_agents, so that their rows have a place."
        )
    return agents


def acting_agents(env: Any, turns: Any) -> list[Agent]:
    """Return the agents that act in the next step.

    Args:
        env: parallel.
        turns: what `turn_based` returned for it.
    """
    return env.agents if turns is None or not env.agents else [turns.agent_selection]


def checked_step(result: Any) -> Any:
    """Return the five dicts by agent that `env.step` has returned; refuse anything else."""
    if not (
        isinstance(result, (tuple, list))
        and len(result) == 5
        and all(isinstance(d, Mapping) for d in result)
    ):
        raise SpecError(
            f"step failed: expected {_FIVE}, got {outline(result)}. Return them from env.step."
        )
    return result


def checked_reset(result: Any) -> tuple[Mapping[Agent, Any], Mapping[Any, Any]]:
    """Return the observations and infos that `env.reset` has returned; refuse anything else."""
    if not (
        isinstance(result, (tuple, list))
        and len(result) == 2
        and all(isinstance(d, Mapping) for d in result)
    ):
        raise SpecError(
            f"reset failed: expected (observations, infos), both dicts by agent, got {outline(result)}. "
            f"PettingZoo before 1.23 returned observations alone: return both from env.reset."
        )
    return result[0], result[1]


def _state_leaf(env: Any) -> LeafSpec:
    """Return the spec of the env's state, from its space where it has one, else from its state now."""
    space = getattr(env, "state_space", None)
    like = (
        np.asarray(env.state())
        if space is None or space.shape is None
        else np.empty(space.shape, space.dtype)
    )
    return LeafSpec(("state",), like.shape, like.dtype.name)


def _metadata(env: Any, groups: list[AgentGroup]) -> dict[str, Any]:
    native = getattr(env, "metadata", None) or {}
    names = {group.name: [str(seat.agent) for seat in group.seats] for group in groups}
    return {
        "env_id": str(native.get("name") or type(env.unwrapped).__qualname__),
        "render_mode": getattr(env, "render_mode", None),
        "group_map": names,
        "agent_names": [name for members in names.values() for name in members],
        "agent_count": sum(group.size for group in groups),
        **frame_rate(env),
    }


def _end_episode(
    seats: Mapping[Agent, Any],
    agents: Collection[Agent],
) -> tuple[bool, bool]:
    """Return whether the episode has terminated, and whether it was truncated; if so, all agents are done.

    Args:
        seats: of all agents.
        agents: those that are present now.
    """
    if not all(seats[agent].has_ended for agent in agents):
        return False, False
    ended = [seat for seat in seats.values() if seat.has_ended]
    terminated = all(seat.terminated for seat in ended)
    truncated = not terminated or (
        bool(ended) and all(seat.truncated for seat in ended)
    )
    for seat in seats.values():
        if not seat.has_ended:
            seat.end(terminated=terminated, truncated=truncated)
    return terminated, truncated
