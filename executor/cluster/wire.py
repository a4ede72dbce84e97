"""Pack and unpack a share of a batch as lists of arrays: inputs for the host, rows for the driver.

Guarantees: both ends list the same arrays in the same order, because they have the same specs. Received arrays are only
read (they may be views of a shared object store), and no reference to them is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from envherd.shm.layout import Name
from envherd.shm.slab import Slab, SlabPlan, Storage

#: Env ids of the share, int `[k]`; None for all of them.
Ids = np.ndarray | None
#: One column for all rows, or int `[k]`.
Columns = int | np.ndarray
_Index = slice | np.ndarray


class DriverMemory:
    """Memory of the driver for a rollout; its arrays keep it alive."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = np.empty(nbytes, np.uint8).data

    def array(self) -> np.ndarray:
        """Return the bytes as uint8 `[nbytes]`, a VIEW that keeps the memory alive."""
        return np.frombuffer(self._bytes, np.uint8)

    def close(self) -> None:
        """Do nothing: the memory is freed with its last view."""


class WireRows:
    """One end of the connection: its arrays, and the share's rows in them.

    Args:
        slab: the arrays at this end: of the share alone, or of the whole batch.
        plan: of the share.
        first_env_id: id in `slab` of the share's env 0.

    Attributes:
        groups: per group of equal envs of the share: its number at this end, and the ids of its envs there, int `[k]`.
        has_masks: whether resets read inputs: the reset masks of envs that are batches themselves.
    """

    def __init__(self, slab: Slab, plan: SlabPlan, first_env_id: int = 0) -> None:
        self._slab = slab
        self._group_of = np.zeros(plan.num_envs, np.int64)
        self._row_of = np.zeros(plan.num_envs, np.int64)
        self.groups: list[tuple[int, np.ndarray]] = []
        self._all: list[tuple[_Index, _Index]] = []
        for index, group in enumerate(plan.groups):
            env_ids = np.array(group.env_ids)
            places = [slab.plan.place(env_id) for env_id in (first_env_id + env_ids).tolist()]
            self._group_of[env_ids] = index
            self._row_of[env_ids] = rows = np.array([row for _, row in places])
            self.groups.append((places[0][0], first_env_id + env_ids))
            self._all.append((_span(env_ids), _span(rows)))
        self.has_masks = any(group.spec.batch_shape for group in plan.groups)

    def pack_inputs(self, ids: Ids) -> list[np.ndarray]:
        """Return the inputs of the next commands of some envs, own memory."""
        return [array[rows].copy() for array, _, rows in self._inputs(ids)]

    def unpack_inputs(self, values: Sequence[np.ndarray], ids: Ids) -> None:
        """Write the result of the other end's `pack_inputs`."""
        for (array, _, rows), value in zip(self._inputs(ids), values, strict=True):
            array[rows] = value

    def pack_rows(self, section: str, ids: Ids, columns: Columns) -> list[np.ndarray]:
        """Return the `next` or the `root` of some envs; VIEWS of the ring if all have one column and no gaps.

        Args:
            section: "next" or "root".
            ids: of the envs.
            columns: of the ring.
        """
        return [
            self._slab.groups[group].columns[name][_at(columns, positions), rows]
            for group, name, positions, rows in self._rows(section, ids)
        ]

    def unpack_rows(self, section: str, values: Sequence[np.ndarray], ids: Ids, columns: Columns) -> None:
        """Write the result of `pack_rows` to ring columns of this end, which may differ from the other's."""
        for (group, name, positions, rows), value in zip(self._rows(section, ids), values, strict=True):
            self._slab.groups[group].columns[name][_at(columns, positions), rows] = value

    def unpack_to_storage(
        self, nexts: Sequence[np.ndarray], ids: Ids, roots: Sequence[np.ndarray], root_ids: Ids, at: tuple[Storage, int]
    ) -> None:
        """Write the `next` of envs, and the root that follows, to a rollout storage.

        Args:
            nexts: from `pack_rows`, of the envs `ids`, which were stepped.
            ids: see `nexts`.
            roots: likewise, of the envs that were reset after the step; the roots of the others are their `next`.
            root_ids: see `roots`.
            at: the storage of the whole batch, and the column of the step.
        """
        storage, column = at
        has_following = column + 1 < storage.plan.num_columns
        for section, values, concerned in (("next", nexts, ids), ("root", roots, root_ids)):
            for (group, name, _, rows), value in zip(self._rows(section, concerned), values, strict=True):
                arrays = storage.columns[group]
                if section == "next":
                    arrays[name][rows, column] = value
                root = ("root", *name[1:])
                if has_following and root in arrays:
                    arrays[root][rows, column + 1] = value

    def _inputs(self, ids: Ids) -> Iterator[tuple[np.ndarray, _Index, _Index]]:
        for group, positions, rows in self._parts(ids):
            for array in self._slab.groups[group].inputs.values():
                yield array, positions, rows

    def _rows(self, section: str, ids: Ids) -> Iterator[tuple[int, Name, _Index, _Index]]:
        for group, positions, rows in self._parts(ids):
            for name in self._slab.groups[group].columns:
                if name[0] == section:
                    yield group, name, positions, rows

    def _parts(self, ids: Ids) -> Iterator[tuple[int, _Index, _Index]]:
        """Yield for each group with members in `ids`: its number here, their positions in `ids`, their rows here."""
        for index, (group, _) in enumerate(self.groups):
            positions, rows = self._all[index]
            if ids is not None:
                positions = np.flatnonzero(self._group_of[ids] == index)
                rows = self._row_of[ids[positions]]
                if not len(rows):
                    continue
            yield group, positions, rows


def _at(columns: Columns, positions: _Index) -> Columns:
    return columns[positions] if isinstance(columns, np.ndarray) else columns


def _span(ids: np.ndarray) -> _Index:
    """Return ascending ids as a slice if they have no gap."""
    first, last = int(ids[0]), int(ids[-1])
    return slice(first, last + 1) if last - first + 1 == len(ids) else ids
