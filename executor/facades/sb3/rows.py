"""Between the slab's rows and Stable-Baselines3's arrays.

Guarantees: everything that is handed out is a copy of the caller's own (SB3 stores the observation of
one step only after the next one, and adds to rewards in place). Actions are checked as a whole before
one is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from envherd.executor.facades.sb3.spaces import observed_leaves
from envherd.shm.slab import Slab
from envherd.shm.specs import Discrete, LeafSpec, MultiDiscrete
from envherd.workers.adapters.hosts.leaf_spaces import Space
from envherd.workers.errors import ActionError


class Column:
    """One leaf of all rows, at any ring column: `[num_rows, *shape]` from the arrays of one or several groups.

    Args:
        arrays: one `[columns, envs, ...]` per group of equal envs (VIEWS).
        env_ids: which envs each of them holds.
        num_rows: in all; each env has `num_rows / num_envs` of them, one after the other.
        shape: of a row, as SB3 expects it.
    """

    def __init__(
        self, arrays: Sequence[np.ndarray], env_ids: Sequence[np.ndarray], num_rows: int, shape: tuple[int, ...]
    ) -> None:
        self._views = [list(array) for array in arrays]
        self._env_ids = env_ids
        self._shape = (num_rows, *shape)
        self._num_envs = sum(map(len, env_ids))
        self._only = self._views[0]
        self._is_plain = len(arrays) == 1 and all(view.flags.c_contiguous for view in self._only)
        if self._is_plain:
            self._only = [view.reshape(self._shape) for view in self._only]

    def read(self, column: int) -> np.ndarray:
        """Return all rows at a column, copied."""
        if self._is_plain:
            return self._only[column].copy()
        return self._gather(column).reshape(self._shape)

    def read_each(self, columns: np.ndarray) -> np.ndarray:
        """Return the rows of each env at its own column, int64 `[num_envs]`, copied."""
        read = self.read(int(columns[0]))
        for column in set(columns.tolist()) - {int(columns[0])}:
            is_there = np.repeat(columns == column, len(read) // self._num_envs)
            read[is_there] = self.look(column)[is_there]
        return read

    def look(self, column: int) -> np.ndarray:
        """Return all rows at a column, as a VIEW where that is possible."""
        return self._only[column] if self._is_plain else self.read(column)

    def _gather(self, column: int) -> np.ndarray:
        if len(self._views) == 1:
            return self._only[column].copy()
        first = self._only[column]
        gathered = np.empty((self._num_envs, *first.shape[1:]), first.dtype)
        for views, env_ids in zip(self._views, self._env_ids, strict=True):
            gathered[env_ids] = views[column]
        return gathered


class Reader:
    """Reads steps and resets from the slab.

    Args:
        slab: of the envs.
        shapes: of the leaves of one row's observation.
        num_agents: rows per env.
    """

    def __init__(self, slab: Slab, shapes: Sequence[tuple[int, ...]], num_agents: int) -> None:
        groups = slab.groups
        env_ids = [np.array(group.plan.env_ids) for group in groups]
        num_rows = slab.plan.num_envs * num_agents

        def columns(section: str, leaves: Sequence[Sequence[LeafSpec]], shape: tuple[int, ...]) -> Column:
            pairs = zip(groups, leaves, strict=True)
            arrays = [group.columns[section, *leaf.key] for group, (leaf,) in pairs]
            return Column(arrays, env_ids, num_rows, shape)

        observed = [[leaf for _, leaf in observed_leaves(group.spec)] for group in groups]
        self.next = [columns("next", [[own[i]] for own in observed], shape) for i, shape in enumerate(shapes)]
        self.root = [columns("root", [[own[i]] for own in observed], shape) for i, shape in enumerate(shapes)]
        self._reward = columns("next", [group.spec.reward for group in groups], ())
        num_envs = slab.plan.num_envs
        self.flags = {
            name: Column([group.columns["next", name] for group in groups], env_ids, num_envs, ())
            for name in ("terminated", "truncated")
        }

    def rewards(self, column: int) -> np.ndarray:
        """Return the rewards, float32 `[num_rows]`, in memory of their own."""
        return self._reward.look(column).astype(np.float32)


class Writer:
    """Writes SB3's actions to the slab.

    Args:
        slab: of the envs.
        space: of one row's action.
        num_agents: rows per env.
    """

    def __init__(self, slab: Slab, space: Space, num_agents: int) -> None:
        self._space = space
        self._num_rows = slab.plan.num_envs * num_agents
        groups = slab.groups
        leaves = groups[0].spec.action
        side = next((leaf for group in groups for leaf in group.spec.action if leaf.is_side), None)
        if side is not None:
            raise NotImplementedError(
                f"reading action_space failed: expected actions of a fixed shape, got {side}. "
                f"Stable-Baselines3 has no place for them."
            )
        self._targets = [
            [(np.array(group.plan.env_ids), group.inputs["input", *leaf.key]) for group, leaf in zip(groups, own)]  # noqa: B905  # of equal length by construction
            for own in zip(*(group.spec.action for group in groups), strict=True)
        ]
        self._starts = [_start(leaf) for leaf in leaves]
        self._is_single = len(self._targets) == 1 and len(groups) == 1 and self._starts[0] is None
        self._only = self._targets[0][0][1]
        self._shape = self._only.shape

    def write(self, actions: Any) -> None:
        """Check and write one action per row.

        Args:
            actions: `[num_rows, ...]`, or a sequence of what the space samples; read, never kept.

        Raises:
            ActionError: the wrong number of them, or values that the space's dtype cannot hold.
        """
        if self._is_single and actions.__class__ is np.ndarray and actions.shape == self._shape:
            if actions.dtype != self._only.dtype:
                actions = self._cast(actions, self._only.dtype)
            self._only[...] = actions
            return
        if len(actions) != self._num_rows:
            raise ActionError(f"step failed: expected {self._num_rows} actions, got {len(actions)}. Give one per row.")
        leaves = _split(self._space, actions)
        checked = [self._fit(i, leaf) for i, leaf in enumerate(leaves)]
        for targets, values in zip(self._targets, checked, strict=True):
            for env_ids, target in targets:
                target[...] = values[env_ids]

    def _fit(self, index: int, values: Any) -> np.ndarray:
        """Return the values of one leaf, one row per env."""
        target, start = self._targets[index][0][1], self._starts[index]
        array = np.asarray(values)
        num_envs = sum(len(env_ids) for env_ids, _ in self._targets[index])
        shape = (num_envs, *target.shape[1:])
        if array.size != int(np.prod(shape)):
            raise ActionError(f"step failed: expected actions of shape {shape}, got {array.shape}.")
        array = array.reshape(shape)
        return self._cast(array if start is None else array - start, target.dtype)

    def _cast(self, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
        cast = array.astype(dtype)
        if dtype.kind in "iub" and array.dtype.kind not in "iub" and not (cast == array).all():
            first = array[cast != array].flat[0]
            raise ActionError(f"step failed: expected {dtype} actions, got {array.dtype} {first}. No env was stepped.")
        return cast


def _start(leaf: LeafSpec) -> np.ndarray | None:
    """Return what SB3's actions have more than the indices that a batch keeps."""
    if isinstance(leaf.domain, (Discrete, MultiDiscrete)) and np.any(leaf.domain.start):
        return np.asarray(leaf.domain.start)
    return None


def _split(space: Space, actions: Any) -> list[Any]:
    """Return the actions of each leaf, in the order of the space."""
    if isinstance(space, spaces.Dict):
        entries = space.spaces.items()
        is_stacked = isinstance(actions, Mapping)
        stacked = [(sub, actions[key] if is_stacked else [one[key] for one in actions]) for key, sub in entries]
        return [leaf for sub, values in stacked for leaf in _split(sub, values)]
    if isinstance(space, spaces.Tuple):
        parts = [(sub, [one[i] for one in actions]) for i, sub in enumerate(space.spaces)]
        return [leaf for sub, values in parts for leaf in _split(sub, values)]
    return [actions]
