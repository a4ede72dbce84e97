"""One leaf of all envs' rows for facades: an array `[num_rows, *shape]` from one ring column or several.

Also the statistics of ended episodes, for facades that put them into infos.

Guarantees: methods return copies, unless they are documented to return a VIEW.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from envherd.executor.batches.memory import Loans
from envherd.executor.protocol.positions import Positions
from envherd.shm.slab import Slab, next_leaves
from envherd.shm.specs import EPISODE_KEYS, Key


class Column:
    """One leaf of all rows, at any ring column: `[num_rows, *shape]` from the arrays of one or several groups.

    Args:
        slab: of the envs.
        section: "next" or "root".
        keys: of the leaf, in each group of equal envs.
        num_rows: in all; each env has `num_rows / num_envs` consecutive ones.
        shape: of a row.
        loans: for `own`, of a leaf of "next".
    """

    def __init__(
        self,
        slab: Slab,
        section: str,
        keys: Sequence[Sequence[str]],
        num_rows: int,
        shape: tuple[int, ...],
        loans: Loans | None = None,
    ) -> None:
        # One view for each column of the ring: indexing a list is faster than indexing an array in each step.
        self._views = [
            list(group.columns[section, *key])
            for group, key in zip(slab.groups, keys, strict=True)
        ]
        self._env_ids = [np.array(group.plan.env_ids) for group in slab.groups]
        self._shape = (num_rows, *shape)
        self._num_envs = slab.plan.num_envs
        self._only = self._views[0]
        self._is_plain = len(self._views) == 1 and all(
            view.flags.c_contiguous for view in self._only
        )
        if self._is_plain:
            # With one group of equal envs, a column of its array has all rows in order.
            self._only = [view.reshape(self._shape) for view in self._only]
        self._loans = loans if self._is_plain else None
        if self._loans is not None:
            self._index = [leaf.key for leaf in next_leaves(slab.groups[0].spec)].index(
                tuple(keys[0])
            )

    def own(self, column: int) -> np.ndarray:
        """Return all rows at a column, for the caller: copied, or the frame itself if it can be lent."""
        if self._loans is not None and column >= self._loans.first:
            return self._loans.array(column, self._index).reshape(self._shape)
        return self.read(column)

    def read(self, column: int) -> np.ndarray:
        """Return all rows at a column, copied."""
        first = self._only[column]
        if len(self._views) == 1:
            return first.copy().reshape(self._shape)
        # The envs of a group need not be consecutive.
        gathered = np.empty((self._num_envs, *first.shape[1:]), first.dtype)
        for views, env_ids in zip(self._views, self._env_ids, strict=True):
            gathered[env_ids] = views[column]
        return gathered.reshape(self._shape)

    def read_each(self, columns: np.ndarray) -> np.ndarray:
        """Return the rows of each env at its own column, int64 `[num_envs]`, copied."""
        # Most often, all envs are at the same column.
        read = self.read(int(columns[0]))
        for column in set(columns.tolist()) - {int(columns[0])}:
            # An env has several consecutive rows if its agents have rows.
            is_there = np.repeat(columns == column, len(read) // self._num_envs)
            read[is_there] = self.look(column)[is_there]
        return read

    def look(self, column: int) -> np.ndarray:
        """Return all rows at a column, as a VIEW if possible."""
        return self._only[column] if self._is_plain else self.read(column)


class LatestColumn:
    """One leaf of the envs' present observations; see `Column`.

    Args:
        positions: of the envs.
        key: of the leaf, the same in all groups.
        num_rows: see `Column`.
        shape: see `Column`.

    Attributes:
        after: the leaf of "next".
        fresh: the leaf of "root", which is present after a reset.
    """

    def __init__(
        self,
        positions: Positions,
        key: Key,
        num_rows: int,
        shape: tuple[int, ...],
    ) -> None:
        self._positions = positions
        self._repeats = num_rows // positions.slab.plan.num_envs
        keys = [key] * len(positions.slab.groups)
        self.after = Column(
            positions.slab,
            "next",
            keys,
            num_rows,
            shape,
            positions.loans,
        )
        # Only frames of "next" can be lent.
        self.fresh = Column(positions.slab, "root", keys, num_rows, shape)

    def read(self) -> np.ndarray:
        """Return all rows, copied."""
        positions = self._positions
        rows = self.after.read_each(positions.columns)
        in_root = positions.in_root
        if in_root.any():
            is_fresh = np.repeat(in_root, self._repeats)
            rows[is_fresh] = self.fresh.read_each(positions.columns)[is_fresh]
        return rows


#: Column of a step -> returns float64 `[N, agents]`, lengths int64 `[N]` and seconds float64 `[N]`; own memory.
ReadEpisodes = Callable[[int], tuple[np.ndarray, ...]]


def episode_reader(slab: Slab, num_agents: int = 1) -> ReadEpisodes | None:
    """Return the function that reads returns, lengths and times of a step; None if the envs have no statistics.

    Args:
        slab: of envs, perhaps with `ExecutorOptions.episode_statistics`.
        num_agents: rows of an env, each with its own return.
    """
    keys: list[Any] = [group.spec.metadata.get(EPISODE_KEYS) for group in slab.groups]
    if not keys[0]:
        return None
    # The place among an env's keys: returns are first, length and time last.
    kinds = ((0, (num_agents,), np.float64), (-2, (), np.int64), (-1, (), np.float64))
    columns = [
        (
            Column(
                slab,
                "next",
                [own[place] for own in keys],
                slab.plan.num_envs,
                shape,
            ),
            dtype,
        )
        for place, shape, dtype in kinds
    ]
    return lambda column: tuple(
        leaf.read(column).astype(dtype) for leaf, dtype in columns
    )
