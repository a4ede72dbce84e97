"""Read agents' spaces and infos, and stack them; see `pettingzoo/groups.py` for the result."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gymnasium import spaces

from envherd.shm.specs import Box, Discrete, Domain, LeafSpec, MultiDiscrete, Unbounded
from envherd.workers.adapters.common.tree import nested, shrunk
from envherd.workers.errors import SpecError

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
    shapes = {key: np.shape(value) for key, value in info.items() if isinstance(key, str) and _is_numeric(value)}
    mask_shape = shapes.pop(ACTION_MASK, None)
    has_mask = isinstance(observation, spaces.Dict) and ACTION_MASK in observation.spaces
    if has_mask:
        mask_shape = observation[ACTION_MASK].shape
        observation = spaces.Dict({key: space for key, space in observation.spaces.items() if key != ACTION_MASK})
    return AgentSpaces(agent, observation, action, mask_shape, has_mask, shapes)


def common_infos(members: Sequence[AgentSpaces]) -> dict[str, tuple[int, ...]]:
    """Return the info entries that all members have in the same shape."""
    others = [member.info_shapes for member in members[1:]]
    return {
        key: shape for key, shape in members[0].info_shapes.items() if all(other.get(key) == shape for other in others)
    }


def common_mask(members: Sequence[AgentSpaces]) -> np.ndarray | None:
    """Return the members' action masks, all True; None where they have none.

    Raises:
        SpecError: masks of several shapes, or some in observations and some not.
    """
    found = {member.mask_shape for member in members} - {None}
    if not found:
        return None
    if len(found) > 1 or len({member.has_mask_in_observation for member in members}) > 1:
        raise _cannot_stack(members, "unlike action masks")
    return np.ones((len(members), *(found.pop() or ())), bool)


def stacked(leaves: Sequence[tuple[LeafSpec, ...]], members: Sequence[AgentSpaces]) -> tuple[LeafSpec, ...]:
    """Return members' leaves as leaves of their group, `[A, *their shape]`.

    Raises:
        SpecError: members differ in keys, shapes or dtypes, or a value has no fixed shape.
    """
    if len({tuple((leaf.key, leaf.shape, leaf.dtype) for leaf in own) for own in leaves}) > 1:
        raise _cannot_stack(members, "spaces of unlike shape or dtype")
    return tuple(_stack(column, members) for column in zip(*leaves, strict=True))


def _stack(column: tuple[LeafSpec, ...], members: Sequence[AgentSpaces]) -> LeafSpec:
    first = column[0]
    if first.is_side:
        raise SpecError(
            f"reading the spaces of {members[0].agent} failed: expected values of a fixed shape, got {first}. "
            f"Values of agents are stacked: encode it as an array in a wrapper around the env."
        )
    domain = _stack_domains([leaf.domain for leaf in column], first.shape)
    return replace(first, shape=(len(column), *first.shape), domain=domain)


def _stack_domains(domains: Sequence[Any], shape: tuple[int, ...]) -> Domain:
    first: Domain = domains[0]
    if isinstance(first, (Discrete, MultiDiscrete)):
        return _stack_indices(domains, shape)
    if all(domain == first for domain in domains) and not isinstance(first, Box):
        return first
    if all(isinstance(domain, (Box, Unbounded)) for domain in domains):
        lows = [getattr(domain, "low", -np.inf) for domain in domains]
        highs = [getattr(domain, "high", np.inf) for domain in domains]
        return Box(*(shrunk(np.stack([np.broadcast_to(end, shape) for end in ends])) for ends in (lows, highs)))
    return Unbounded()


def _stack_indices(domains: Sequence[Any], shape: tuple[int, ...]) -> Domain:
    if isinstance(domains[0], Discrete) and all(domain == domains[0] for domain in domains):
        return domains[0]
    if not all(isinstance(domain, (Discrete, MultiDiscrete)) for domain in domains):
        return Unbounded()
    counts = tuple(domain.n if isinstance(domain, Discrete) else domain.nvec for domain in domains)
    starts = tuple(domain.start or nested(np.zeros(shape, int)) for domain in domains)
    return MultiDiscrete(counts, starts if np.any(starts) else ())


def _is_numeric(value: Any) -> bool:
    if value is None or isinstance(value, (str, bytes, Mapping)):
        return False
    try:
        return np.asarray(value).dtype.kind in "biuf"
    except ValueError:  # ragged
        return False


def _cannot_stack(members: Sequence[AgentSpaces], got: str) -> SpecError:
    return SpecError(
        f"grouping the agents failed: expected agents of one group to have like spaces, got {got} "
        f"({', '.join(str(member.agent) for member in members)}). Put them into groups of their own."
    )
