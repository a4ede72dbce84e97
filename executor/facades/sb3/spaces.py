"""The Gymnasium spaces of an env's rows for Stable-Baselines3, and the conversion of arrays to observations.

A *row* is what SB3 calls an env: one env, or one agent of an env whose agents are stacked in a single
group. Agents see only their own leaves; observations of the whole world are available through `render`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gymnasium import spaces

from envherd.executor.facades.leaf_spaces import Space, space_of
from envherd.shm.specs import EnvSpec, Key, LeafSpec

#: Arrays `[N, ...]` in the order of the leaves -> SB3's observation.
Compose = Callable[[Sequence[Any]], Any]


def num_agents(spec: EnvSpec) -> int:
    """Return the number of rows of an env: 1, or its number of agents.

    Raises:
        ValueError: agents in several groups, or an env that is itself a batch.
    """
    if spec.batch_shape or len(spec.groups) > 1 or any(len(shape) != 1 for _, shape in spec.groups):
        raise ValueError(
            f"reading the env failed: expected one env or one group of equal agents, got batch shape "
            f"{spec.batch_shape} and groups {spec.groups}. Stable-Baselines3 has no place for more."
        )
    return spec.groups[0][1][0] if spec.groups else 1


def observed_leaves(spec: EnvSpec) -> list[tuple[int, LeafSpec]]:
    """Return `(index, leaf)` of the observation leaves that a row sees: no masks, and no entries of infos."""
    unseen = spec.episode_keys
    seen = [(i, leaf) for i, leaf in enumerate(spec.observation) if leaf.key not in unseen and leaf.key[0] != "info"]
    if not spec.groups:
        return seen
    group = spec.groups[0][0]
    own = [(i, leaf) for i, leaf in seen if leaf.key[: len(group)] == group]
    observed = [(i, leaf) for i, leaf in own if leaf.key[len(group)] == "observation"]
    return observed or own


def compose_for(space: Space) -> Compose:
    """Return the function that builds an observation from its leaves: array, dict or tuple.

    Raises:
        NotImplementedError: spaces nested more than once, or without fixed shapes.
    """
    inner = inner_spaces(space)
    for sub in inner:
        if not isinstance(sub, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
            raise NotImplementedError(
                f"reading observation_space failed: expected Box, Discrete, MultiDiscrete or MultiBinary, alone or in "
                f"one Dict or Tuple, got {type(sub).__name__} in {space}. Nested observation spaces and those "
                f"without a fixed shape are not supported by Stable-Baselines3: flatten them in a wrapper."
            )
    if isinstance(space, spaces.Dict):
        keys = tuple(space.spaces)
        return lambda leaves: dict(zip(keys, leaves, strict=True))
    return tuple if isinstance(space, spaces.Tuple) else lambda leaves: leaves[0]


def inner_spaces(space: Space) -> list[Space]:
    """Return the spaces of an observation's leaves."""
    if isinstance(space, spaces.Dict):
        return list(space.spaces.values())
    return list(space.spaces) if isinstance(space, spaces.Tuple) else [space]


def spaces_of(spec: EnvSpec) -> tuple[Space, Space]:
    """Return the observation and action space of a row of an env that has none itself (no Gymnasium env)."""
    lead = 1 if spec.groups else 0
    observed = {_name(spec, leaf.key): space_of(leaf, lead) for _, leaf in observed_leaves(spec) if not leaf.is_side}
    acted = {_name(spec, leaf.key): space_of(leaf, lead) for leaf in spec.action}
    return _single_or_dict(observed), _single_or_dict(acted)


def _single_or_dict(found: dict[str, Space]) -> Space:
    return next(iter(found.values())) if len(found) == 1 else spaces.Dict(found)


def _name(spec: EnvSpec, key: Key) -> str:
    prefix = (*spec.groups[0][0], "observation") if spec.groups else ()
    return "/".join(key[len(prefix) :] if prefix and key[: len(prefix)] == prefix else key)
