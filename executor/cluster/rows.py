"""Rows as they cross between driver and hosts: of each kind of env the ids, and one array for each leaf.

Both sides have them in a slab, so nothing but arrays crosses, and Ray sends arrays without pickling them.
Guarantees: what is read is fresh memory, and what is received is only copied (it may be a view of a shared store).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from envherd.executor.protocol.positions import Places
from envherd.shm.layout import Name
from envherd.shm.slab import Slab

#: Env ids, int64 `[k]`, and their arrays `[k, ...]` by name.
Part = tuple[np.ndarray, dict[Name, np.ndarray]]


def read(
    slab: Slab, places: Places, env_ids: np.ndarray, section: str, columns: np.ndarray | None = None, *, first: int = 0
) -> list[Part]:
    """Return rows of some envs.

    Args:
        slab: of these envs.
        places: of the slab.
        env_ids: int64 `[k]`.
        section: "next" or "root" of a frame, or "input" or "reset_mask".
        columns: int64 `[N]`, the frame of each env.
        first: is subtracted from the ids that are returned.
    """
    parts = []
    for index, group in enumerate(slab.groups):
        own = env_ids if places.is_one_group else env_ids[places.group_of[env_ids] == index]
        rows = places.row_of[own]
        at = rows if columns is None else (columns[own], rows)
        source = group.inputs if columns is None else group.columns
        arrays = {name: array[at] for name, array in source.items() if name[0] == section}
        if len(own) and arrays:
            parts.append((own - first, arrays))
    return parts


def write(
    slab: Slab, places: Places, parts: Sequence[Part], columns: np.ndarray | None = None, *, first: int = 0
) -> None:
    """Write rows; `first` is added to their ids. See `read`."""
    for ids, arrays in parts:
        env_ids = ids + first
        group, rows = slab.groups[places.group_of[env_ids[0]]], places.row_of[env_ids]
        for name, values in arrays.items():
            if columns is None:
                group.inputs[name][rows] = values
            else:
                group.columns[name][columns[env_ids], rows] = values
