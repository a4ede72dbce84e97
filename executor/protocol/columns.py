"""Columns that workers write rows to: the frames of the ring, or the time steps of a rollout's storage.

A command names a target and a column. Both kinds of target are read here with one index order, `[column, row, ...]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from envherd.shm.layout import Name
from envherd.shm.slab import Slab, Storage
from envherd.workers.protocol import RING


class Columns:
    """The arrays of one target.

    Attributes:
        target: the number by which workers know it.
        root_ahead: how many columns after its `next` the root that follows a step is: 0 in the ring, 1 in a storage.
        groups: per group, `("next" | "root", *key)` -> array `[column, row, ...]` (VIEW).
        next_done, root_done: per group, whether the env is done, bool `[column, row, ...]` (VIEW).
    """

    def __init__(self, target: int, groups: Sequence[Mapping[Name, np.ndarray]], *, root_ahead: int) -> None:
        self.target = target
        self.root_ahead = root_ahead
        self.groups = tuple(groups)
        self.next_done = [group["next", "done"] for group in groups]
        self.root_done = [group["root", "done"] for group in groups]

    def row(self, group: int, row: int, column: int) -> dict[Name, np.ndarray]:
        """Return one env's row by name (VIEWS, also of scalars)."""
        arrays = self.groups[group].items()
        return {name: array[column, row : row + 1].reshape(array.shape[2:]) for name, array in arrays}


def ring_columns(slab: Slab) -> Columns:
    """Return the frames of the ring."""
    return Columns(RING, [group.columns for group in slab.groups], root_ahead=0)


def storage_columns(target: int, storage: Storage) -> Columns:
    """Return the time steps of a rollout's storage, whose own arrays are `[row, column, ...]`."""
    groups = [
        {name: array.swapaxes(0, 1) for name, array in group.items() if name[0] != "input"} for group in storage.columns
    ]
    return Columns(target, groups, root_ahead=1)
