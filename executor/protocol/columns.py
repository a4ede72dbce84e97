"""Columns that workers write rows to: the frames of the ring, or the time steps of a rollout's storage.

A command names a target and a column. This module gives both kinds of target the index order `[column, row, ...]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from envherd.shm.layout import Name
from envherd.shm.slab import Slab, SlabPlan, Storage
from envherd.workers.protocol import RING


class Places:
    """The group and the row of each env, which are the same in all columns.

    Attributes:
        pairs: per env, `(group, row)`.
        group_of, row_of: the same, int64 `[N]`.
        env_ids: per group, the envs of its rows, int64, ascending.
        is_one_group: whether all envs are in one group, so that rows equal ids.
        is_flat: whether also no env is a batch itself: the done flags of a column are bool `[N, 1]`.
    """

    def __init__(self, plan: SlabPlan) -> None:
        self.num_envs = plan.num_envs
        self.pairs = [plan.place(env_id) for env_id in range(plan.num_envs)]
        self.group_of = np.array([group for group, _ in self.pairs])
        self.row_of = np.array([row for _, row in self.pairs])
        self.env_ids = [np.array(group.env_ids) for group in plan.groups]
        self.is_one_group = len(plan.groups) == 1
        self.is_flat = self.is_one_group and not plan.groups[0].spec.batch_shape

    def rows_of(self, env_ids: np.ndarray) -> np.ndarray:
        """Return the rows of some envs in their groups, int64 `[k]`; may return `env_ids` itself."""
        return env_ids if self.is_one_group else self.row_of[env_ids]


class Columns:
    """The arrays of one target.

    Attributes:
        target: its number in commands.
        root_ahead: column offset from a step's `next` to the root after it: 0 in the ring, 1 in a storage.
        groups: per group, `("next" | "root", *key)` -> array `[column, row, ...]` (VIEW).
    """

    def __init__(
        self, target: int, groups: Sequence[Mapping[Name, np.ndarray]], places: Places, *, root_ahead: int
    ) -> None:
        self.target = target
        self.root_ahead = root_ahead
        self.groups = tuple(groups)
        self._places = places
        self._next_done = [group["next", "done"] for group in groups]
        self._root_done = [group["root", "done"] for group in groups]
        self._only_next_done = self._next_done[0] if places.is_one_group else None

    def row(self, env_id: int, column: int) -> dict[Name, np.ndarray]:
        """Return one env's row by name (VIEWS, also of scalars)."""
        group, row = self._places.pairs[env_id]
        arrays = self.groups[group].items()
        return {name: array[column, row : row + 1].reshape(array.shape[2:]) for name, array in arrays}

    def find_ended(self, column: int) -> np.ndarray | None:
        """Return the envs whose `next` at a column is done, int64 `[k]`, ascending, fresh; None for none.

        A worker computes `done` from the env's two flags, so True is always the byte 1.
        """
        if self._only_next_done is not None and 1 not in self._only_next_done[column].tobytes():
            return None
        if self._places.is_flat:
            return np.asarray(self._next_done[0][column, :, 0].nonzero()[0])
        ended = None
        for env_ids, done in zip(self._places.env_ids, self._next_done, strict=True):
            if 1 in done[column].tobytes():
                rows = done[column].reshape(len(env_ids), -1).any(1)
                if ended is None:
                    ended = np.zeros(self._places.num_envs, bool)
                ended[env_ids[rows]] = True
        return None if ended is None else np.flatnonzero(ended)

    def next_done_of(self, env_ids: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Return whether the `next` of some envs, each at its own column, is done: bool `[k]`, fresh."""
        return self._done_of(self._next_done, env_ids, columns)

    def root_done_of(self, env_ids: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Return whether the roots of some envs, each at its own column, are done: bool `[k]`, fresh."""
        return self._done_of(self._root_done, env_ids, columns)

    def has_no_done_root(self, column: int) -> bool:
        """Return True if a fast check shows that no root at a column is done (0.2 us); False otherwise."""
        return self._places.is_flat and 1 not in self._root_done[0][column].tobytes()

    def _done_of(self, arrays: list[np.ndarray], env_ids: np.ndarray, columns: np.ndarray) -> np.ndarray:
        if self._places.is_flat:
            done: np.ndarray = arrays[0][columns, env_ids, 0]
            return done
        group_of, row_of = self._places.group_of, self._places.row_of
        places = zip(env_ids, columns, strict=True)
        return np.array([arrays[group_of[i]][column, row_of[i]].any() for i, column in places], bool)


def ring_columns(slab: Slab, places: Places) -> Columns:
    """Return the frames of the ring."""
    return Columns(RING, [group.columns for group in slab.groups], places, root_ahead=0)


def storage_columns(target: int, storage: Storage, places: Places) -> Columns:
    """Return the time steps of a rollout's storage, whose own arrays are `[row, column, ...]`."""
    groups = [
        {name: array.swapaxes(0, 1) for name, array in group.items() if name[0] != "input"} for group in storage.columns
    ]
    return Columns(target, groups, places, root_ahead=1)
