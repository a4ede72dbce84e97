"""Gather rows of several frames by their addresses in memory.

Indexing an array `[frame, row, ...]` with two index arrays takes numpy 4 us, whatever the size of the rows. This module
views the slab as overlapping records, one starting at every *byte*, and takes the records at the rows' addresses: 0.5
us.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Bytes of a record that numpy can describe.
LARGEST_RECORD = 2**31 - 1


class Gatherer:
    """Gathers some rows of each leaf of a group.

    Args:
        buffer: uint8 `[nbytes]`; all arrays are views of it.
        sections: one list of arrays `[num_frames, num_rows, ...]` per section, one array per leaf; a leaf has the same
            shape and dtype in every section.
    """

    def __init__(self, buffer: np.ndarray, sections: Sequence[Sequence[np.ndarray]]) -> None:
        num_frames, self._num_rows = sections[0][0].shape[:2]
        self._section = num_frames * self._num_rows
        start = buffer.ctypes.data
        tables: dict[bytes, np.ndarray] = {}
        #: (row shape, dtype, records of one row at every byte from its first row on, place -> record) of each leaf.
        self._leaves: list[tuple[tuple[int, ...], np.dtype, np.ndarray | None, np.ndarray]] = []
        #: Index of a leaf without records -> its arrays.
        self._larger: dict[int, Sequence[np.ndarray]] = {}
        for arrays in zip(*sections, strict=True):
            first = arrays[0]
            nbytes = first[0, 0].nbytes
            least = min(array.ctypes.data for array in arrays)
            table = np.concatenate([_addresses(array, array.ctypes.data - least) for array in arrays])
            table = tables.setdefault(table.tobytes(), table)  # leaves of one size often have the same table
            offset = least - start
            length = len(buffer) - offset - nbytes + 1
            records = None
            if 0 < nbytes <= LARGEST_RECORD:
                records = np.ndarray((length,), f"V{nbytes}", buffer, offset, (1,))
            elif nbytes:
                self._larger[len(self._leaves)] = arrays
            self._leaves.append((first.shape[2:], first.dtype, records, table))

    def places(self, columns: np.ndarray, rows: np.ndarray, sections: np.ndarray | None = None) -> np.ndarray:
        """Return the places of some rows, int64 `[k]`, for `gather`.

        Args:
            columns: int64 `[k]`, the frame of each.
            rows: int64 `[k]`.
            sections: int64 or bool `[k]`, the section of each; None for the first.
        """
        places = columns * self._num_rows
        places += rows
        if sections is not None:
            places += sections * self._section
        return places

    def gather(self, places: np.ndarray) -> list[np.ndarray]:
        """Return the rows at some places of every leaf, as fresh arrays `[k, ...]`."""
        count = len(places)
        if not count:
            return [np.empty((0, *shape), dtype) for shape, dtype, _, _ in self._leaves]
        new, addresses, table = np.ndarray, None, None
        gathered: list[np.ndarray] = []
        for shape, dtype, records, own_table in self._leaves:
            if records is None:
                gathered.append(self._gather_larger(len(gathered), places, np.empty((count, *shape), dtype)))
                continue
            if own_table is not table:
                table = own_table
                addresses = table[places]
            gathered.append(new((count, *shape), dtype, records[addresses]))
        return gathered

    def _gather_larger(self, index: int, places: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the rows of a leaf without records, whose rows are empty or too large for a record."""
        arrays = self._larger.get(index, ())
        for position, place in enumerate(places.tolist() if arrays else ()):
            section, rest = divmod(place, self._section)
            rows[position] = arrays[section][divmod(rest, self._num_rows)]
        return rows


def _addresses(array: np.ndarray, start: int) -> np.ndarray:
    """Return the address of every row of an array `[frame, row, ...]` that begins at `start`, int64 `[frame * row]`."""
    frames, rows = (np.arange(n) * stride for n, stride in zip(array.shape[:2], array.strides[:2], strict=True))
    return (start + frames[:, None] + rows).ravel()
