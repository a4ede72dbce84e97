"""Convert Stable-Baselines3's actions to the slab's rows, and rows to masks of legal actions for `MaskablePPO`.

Guarantees: a whole batch is checked before anything is written.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from envherd.executor.facades.columns import LatestColumn
from envherd.executor.facades.fitting import as_array, fitted
from envherd.executor.facades.leaf_spaces import Space
from envherd.executor.protocol.positions import Positions
from envherd.shm.slab import Slab
from envherd.shm.specs import Discrete, Key, LeafSpec, MultiDiscrete
from envherd.workers.adapters.common.tree import Leaf, flattener
from envherd.workers.adapters.gymnasium.spaces import native_tree


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
    `ExecutorOptions(infos=("action_mask",))` makes a leaf. All actions are legal if the env returned no mask.

    Args:
        positions: of the envs.
        num_agents: rows per env.

    Returns:
        A function without arguments, which returns bool `[num_rows, actions]`, a copy.
    """
    slab = positions.slab
    keys: list[Key] = [("info", NAME), ("info", f"_{NAME}")]
    for group, _ in slab.groups[0].spec.groups:
        # Of one at most: see `spaces.num_agents`.
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
