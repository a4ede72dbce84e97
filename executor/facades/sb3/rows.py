"""Stable-Baselines3's actions as the slab's rows, rows as masks of legal actions for `MaskablePPO`, and the spaces.

Guarantees: a whole batch is checked before anything is written.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from envherd.executor.facades.rows import LatestColumn
from envherd.executor.facades.spaces import (
    Space,
    as_array,
    fitted,
    inner_spaces,
    name_below,
    single_or_dict,
    space_of,
)
from envherd.executor.protocol.positions import Positions
from envherd.shm.slab import Slab
from envherd.shm.specs import Discrete, EnvSpec, Key, LeafSpec, MultiDiscrete
from envherd.workers.adapters.common.tree import Leaf, flattener
from envherd.workers.adapters.gymnasium.spaces import FIXED, native_tree

# ---- spaces ------------------------------------------------------------------------------------
# The Gymnasium spaces of an env's rows for Stable-Baselines3.
#
# A *row* is what SB3 calls an env: one env, or one agent of an env whose agents are stacked in a single
# group. Agents see only their own leaves; observations of the whole world are available through `render`.


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


# ---- rows --------------------------------------------------------------------------------------


class Writer:
    """Writes SB3's actions to the slab.

    Args:
        slab: of the envs.
        space: of one row's action.
        num_agents: rows per env.
    """

    def __init__(self, slab: Slab, space: Space, num_agents: int) -> None:
        tree = native_tree(space, "")
        self._split = flattener(tree, None)
        self._is_leaf = isinstance(tree, Leaf)
        self._num_agents = num_agents
        self._num_rows = slab.plan.num_envs * num_agents
        groups = slab.groups
        side = next(
            (leaf for group in groups for leaf in group.spec.action if leaf.is_side),
            None,
        )
        if side is not None:
            raise NotImplementedError(
                f"reading action_space failed: expected actions of a fixed shape, got {side}. "
                f"Stable-Baselines3 does not support others."
            )
        # By group, and by leaf and group.
        self._env_ids = [np.array(group.plan.env_ids) for group in groups]
        self._targets = [
            [
                group.inputs["input", *leaf.key]
                for group, leaf in zip(groups, own)  # noqa: B905  # of equal length by construction
            ]
            for own in zip(*(group.spec.action for group in groups), strict=True)
        ]
        self._starts = [_start(leaf) for leaf in groups[0].spec.action]
        has_one_target = len(self._targets) == 1 and len(groups) == 1
        self._is_single = has_one_target and num_agents == 1 and self._starts[0] is None
        self._only = self._targets[0][0]
        self._shape = self._only.shape

    def write(self, actions: Any) -> None:
        """Check and write one action per row.

        Args:
            actions: `[num_rows, ...]`, or a sequence of what the space samples; read, never kept.

        Raises:
            ActionError: the wrong number of them, or values that the space's dtype cannot hold.
        """
        if (
            self._is_single
            and actions.__class__ is np.ndarray
            and actions.shape == self._shape
        ):
            # The usual batch, in less time.
            self._only[...] = fitted(actions, self._shape, self._only.dtype)
            return
        if self._is_leaf or isinstance(actions, Mapping):
            leaves = self._split(actions)
        else:
            rows = [self._split(action) for action in actions]
            leaves = [[row[i] for row in rows] for i in range(len(self._targets))]
        # All leaves are checked before the first is written.
        checked = [self._fit(i, leaf) for i, leaf in enumerate(leaves)]
        for targets, values in zip(self._targets, checked, strict=True):
            for env_ids, target in zip(self._env_ids, targets, strict=True):
                target[...] = values[env_ids]

    def _fit(self, index: int, values: Any) -> np.ndarray:
        """Return the values of one leaf, one row per env."""
        target = self._targets[index][0]
        start = self._starts[index]
        rest = target.shape[1:] if self._num_agents == 1 else target.shape[2:]
        array = as_array(values)
        if start is not None:
            array = array - start
        return fitted(
            array,
            (self._num_rows, *rest),
            target.dtype,
        ).reshape(-1, *target.shape[1:])


def _start(leaf: LeafSpec) -> np.ndarray | None:
    """Return the `start` that SB3's actions have in addition to the indices in a batch; None if it is 0."""
    if isinstance(leaf.domain, (Discrete, MultiDiscrete)) and np.any(leaf.domain.start):
        return np.asarray(leaf.domain.start)
    return None


NAME = "action_mask"


def mask_reader(
    positions: Positions,
    num_agents: int,
) -> Callable[[], np.ndarray] | None:
    """Return the function that reads which actions are legal now; None if the envs have no masks.

    Masks are the leaf `action_mask` of a group of agents (PettingZoo), or the entry `action_mask` of infos that
    `ExecutorOptions(infos={"action_mask": ...})` makes a leaf. All actions are legal if the env returned no mask.

    Args:
        positions: of the envs.
        num_agents: rows per env.

    Returns:
        A function without arguments, which returns bool `[num_rows, actions]`, a copy.
    """
    slab = positions.slab
    keys: list[Key] = [("info", NAME), ("info", f"_{NAME}")]
    for group, _ in slab.groups[0].spec.groups:
        # Of one at most: see `num_agents`.
        keys = [(*group, NAME)]
    if not all(
        keys[0] in {leaf.key for leaf in group.spec.observation}
        for group in slab.groups
    ):
        return None
    widths = [
        slab.groups[0].columns["next", *key][0, 0].size // num_agents for key in keys
    ]
    # That of the masks, and that of which envs have one, if there is such a leaf.
    columns = [
        LatestColumn(positions, key, slab.plan.num_envs * num_agents, (width,))
        for key, width in zip(keys, widths, strict=True)
    ]

    def read() -> np.ndarray:
        legal = columns[0].read().astype(bool)
        for has_mask in columns[1:]:
            legal[~has_mask.read()[:, 0].astype(bool)] = True
        return legal

    return read
