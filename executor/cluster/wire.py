"""How a share of a batch crosses between machines: inputs one way, rows the other, one contiguous buffer each.

Guarantees: pure arithmetic over arrays; both ends lay a buffer out alike because they know the same specs. A buffer
that was received is only read (it may be a view of a shared object store), and nothing of it is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from envherd.shm.layout import Layout, Name, lay_out, view
from envherd.shm.slab import GroupPlan, Slab, SlabPlan, Storage, input_requests, section_requests

#: Env ids of the share, int `[k]`; None for all of them.
Ids = np.ndarray | None
#: One column for all rows, or int `[k]`.
Columns = int | np.ndarray
_Index = slice | np.ndarray


class DriverMemory:
    """Memory for a rollout, of the driver's own; its arrays know when nobody uses them any more."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = np.empty(nbytes, np.uint8).data

    def array(self) -> np.ndarray:
        """Return the bytes as uint8 `[nbytes]`, a VIEW that lives as long as what is made of it."""
        return np.frombuffer(self._bytes, np.uint8)

    def close(self) -> None:
        """Nothing to give back: the memory goes with its last view."""


class _Part(NamedTuple):
    """What of a batch of envs belongs to one group of equal ones."""

    size: int
    positions: _Index  # in the batch
    rows: _Index  # in the arrays of this end


class End:
    """One end: the arrays there, and which of their rows are the share's.

    Args:
        slab: the arrays at this end: of the share alone, or of the whole batch.
        plan: of the share.
        first_env_id: what the share's env 0 is called in `slab`.
    """

    def __init__(self, slab: Slab, plan: SlabPlan, first_env_id: int = 0) -> None:
        self._slab = slab
        self._groups = plan.groups
        self._group_of = np.zeros(plan.num_envs, np.int64)
        self._row_of = np.zeros(plan.num_envs, np.int64)
        self._homes: list[int] = []
        self._rows: list[np.ndarray] = []
        for index, group in enumerate(plan.groups):
            env_ids = list(group.env_ids)
            self._group_of[env_ids] = index
            self._row_of[env_ids] = np.arange(len(env_ids))
            places = [slab.plan.place(first_env_id + env_id) for env_id in env_ids]
            self._homes.append(places[0][0])
            self._rows.append(np.array([row for _, row in places]))
        self._all = [
            _Part(len(rows), _span(np.array(group.env_ids)), _span(rows))
            for group, rows in zip(plan.groups, self._rows, strict=True)
        ]
        self._layouts: dict[tuple[str, tuple[int, ...], int], list[Layout]] = {}

    # ---- inputs ------------------------------------------------------------------------------

    def pack_inputs(self, ids: Ids) -> np.ndarray:
        """Return what the next step of some envs reads: uint8 `[nbytes]`, own memory."""
        parts = self._parts(ids)
        layouts = self._lay_out("input", parts)
        buffer = np.empty(layouts[-1].nbytes, np.uint8)
        for home, part, layout in zip(self._homes, parts, layouts, strict=True):
            arrays = self._slab.groups[home].inputs
            for field in layout:
                view(buffer, field)[...] = arrays[field.name][part.rows]
        return buffer

    def unpack_inputs(self, buffer: np.ndarray, ids: Ids) -> None:
        """Write what `pack_inputs` returned at the other end."""
        parts = self._parts(ids)
        for home, part, layout in zip(self._homes, parts, self._lay_out("input", parts), strict=True):
            arrays = self._slab.groups[home].inputs
            for field in layout:
                arrays[field.name][part.rows] = view(buffer, field)

    # ---- rows --------------------------------------------------------------------------------

    def pack_rows(self, ids: Ids, columns: Columns, root_ids: Ids, root_columns: Columns) -> np.ndarray:
        """Return the `next` of some envs and the `root` of some: uint8 `[nbytes]`.

        Args:
            ids: whose `next`, at `columns`.
            columns: of the ring.
            root_ids: whose `root`, at `root_columns`.
            root_columns: of the ring.

        Returns:
            Own memory; a VIEW of the ring for the `next` of one group of envs at one column, with no root.
        """
        if ids is None and isinstance(columns, int) and len(self._groups) == 1 and _is_none(root_ids):
            return self._slab.groups[self._homes[0]].next_bytes(columns)
        nexts, roots = self._parts(ids), self._parts(root_ids)
        next_layouts = self._lay_out("next", nexts)
        root_layouts = self._lay_out("root", roots, next_layouts[-1].nbytes)
        buffer = np.empty(root_layouts[-1].nbytes, np.uint8)
        for parts, layouts, at in ((nexts, next_layouts, columns), (roots, root_layouts, root_columns)):
            for home, part, layout in zip(self._homes, parts, layouts, strict=True):
                arrays = self._slab.groups[home].columns
                for field in layout if part.size else ():
                    view(buffer, field)[...] = arrays[field.name][_at(at, part), part.rows]
        return buffer

    def unpack_to_ring(self, buffer: np.ndarray, nexts: tuple[Ids, Columns], roots: tuple[Ids, Columns]) -> None:
        """Write what `pack_rows` returned to ring columns of this end, which need not be the other's."""
        for (home, name), values, part, at in self._read(buffer, nexts, roots):
            self._slab.groups[home].columns[name][_at(at, part), part.rows] = values

    def unpack_to_storage(self, buffer: np.ndarray, ids: Ids, root_ids: Ids, storage: Storage, column: int) -> None:
        """Write the `next` of envs, and the root that follows, to a rollout storage.

        Args:
            buffer: of `pack_rows`.
            ids: who was stepped.
            root_ids: who was reset after the step; the roots of the others are their `next`.
            storage: of the whole batch, as `slab` is.
            column: of the step.
        """
        has_following = column + 1 < storage.plan.num_columns
        for (home, name), values, part, _ in self._read(buffer, (ids, column), (root_ids, column)):
            arrays = storage.columns[home]
            root = ("root", *name[1:])
            if name[0] == "next":
                arrays[name][part.rows, column] = values
            if has_following and root in arrays:  # all `next` come before the first `root`
                arrays[root][part.rows, column + 1] = values

    def _read(
        self, buffer: np.ndarray, nexts: tuple[Ids, Columns], roots: tuple[Ids, Columns]
    ) -> Iterator[tuple[tuple[int, Name], np.ndarray, _Part, Columns]]:
        start = 0
        for section, (ids, columns) in (("next", nexts), ("root", roots)):
            parts = self._parts(ids)
            layouts = self._lay_out(section, parts, start)
            start = layouts[-1].nbytes
            for home, part, layout in zip(self._homes, parts, layouts, strict=True):
                for field in layout if part.size else ():
                    yield (home, field.name), view(buffer, field), part, columns

    # ---- arithmetic --------------------------------------------------------------------------

    def _parts(self, ids: Ids) -> list[_Part]:
        if ids is None:
            return self._all
        parts = []
        for index, rows in enumerate(self._rows):
            positions = np.flatnonzero(self._group_of[ids] == index)
            parts.append(_Part(len(positions), positions, rows[self._row_of[ids[positions]]]))
        return parts

    def _lay_out(self, section: str, parts: list[_Part], start: int = 0) -> list[Layout]:
        """Return a layout for each group, one behind the other; the last one's `nbytes` is the end of all."""
        key = (section, tuple(part.size for part in parts), start)
        found = self._layouts.get(key)
        if found is None:
            found = []
            for group, part in zip(self._groups, parts, strict=True):
                found.append(lay_out(_requests(group, section, part.size), start))
                start = found[-1].nbytes
            self._layouts[key] = found
        return found


def _requests(group: GroupPlan, section: str, count: int) -> list[tuple[Name, tuple[int, ...], str]]:
    if section == "input":
        return input_requests(group.spec, (count,))
    return [request for request in section_requests(group.spec, (count,)) if request[0][0] == section]


def _at(columns: Columns, part: _Part) -> Columns:
    return columns if isinstance(columns, int) else columns[part.positions]


def _is_none(ids: Ids) -> bool:
    return ids is not None and not len(ids)


def _span(ids: np.ndarray) -> _Index:
    """Return ascending ids as a slice if they have no gap."""
    first, last = int(ids[0]), int(ids[-1])
    return slice(first, last + 1) if last - first + 1 == len(ids) else ids
