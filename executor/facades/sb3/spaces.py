"""The Gymnasium spaces of an env's rows for Stable-Baselines3.

A *row* is what SB3 calls an env: one env, or one agent of an env whose agents are stacked in a single
group. Agents see only their own leaves; observations of the whole world are available through `render`.
"""

import math

from envherd.executor.facades.leaf_spaces import (
    Space,
    inner_spaces,
    name_below,
    single_or_dict,
    space_of,
)
from envherd.shm.specs import EnvSpec, LeafSpec
from envherd.workers.adapters.gymnasium.spaces import FIXED


def num_agents(spec: EnvSpec) -> int:
    """Return the number of rows of an env: 1, or its number of agents.

    Raises:
        ValueError: agents in several groups, or an env that is itself a batch.
    """
    if (
        spec.batch_shape
        or len(spec.groups) > 1
        or any(len(shape) != 1 for _, shape in spec.groups)
    ):
        raise ValueError(
            f"reading the env failed: expected one env or one group of equal agents, got batch shape "
            f"{spec.batch_shape} and groups {spec.groups}. Stable-Baselines3 does not support more."
        )
    return math.prod(size for _, (size,) in spec.groups)


def observed_leaves(spec: EnvSpec) -> list[LeafSpec]:
    """Return the observation leaves that a row sees: no masks, and no entries of infos."""
    seen = [
        leaf
        for leaf in spec.observation
        if leaf.key not in spec.episode_keys and leaf.key[0] != "info"
    ]
    for group, _ in spec.groups:
        own = [leaf for leaf in seen if leaf.key[: len(group)] == group]
        seen = [leaf for leaf in own if leaf.key[len(group)] == "observation"] or own
    return seen


def check_observed(space: Space) -> None:
    """Refuse an observation space that SB3 does not support.

    Raises:
        NotImplementedError: spaces nested more than once, or without fixed shapes.
    """
    for sub in inner_spaces(space):
        if not isinstance(sub, FIXED):
            raise NotImplementedError(
                f"reading observation_space failed: expected Box, Discrete, MultiDiscrete or MultiBinary, alone or in "
                f"one Dict or Tuple, got {type(sub).__name__} in {space}. Nested observation spaces and those "
                f"without a fixed shape are not supported by Stable-Baselines3: flatten them in a wrapper."
            )


def spaces_of(spec: EnvSpec) -> tuple[Space, Space]:
    """Return the observation and action space of a row of an env that has none itself (no Gymnasium env)."""
    # The agents of the group, if there is one, are the first dimension of its leaves.
    lead = len(spec.groups)
    prefixes = [(*group, "observation") for group, _ in spec.groups]
    observed = {
        name_below(leaf.key, *prefixes): space_of(leaf, lead)
        for leaf in observed_leaves(spec)
        if not leaf.is_side
    }
    acted = {
        name_below(leaf.key, *prefixes): space_of(leaf, lead) for leaf in spec.action
    }
    return single_or_dict(observed), single_or_dict(acted)
