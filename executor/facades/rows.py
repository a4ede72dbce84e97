"""One leaf of all envs' rows for facades: an array `[num_rows, *shape]` from one ring column or several.

Also the statistics of ended episodes, for facades that put them into infos.

Guarantees: methods return copies, unless they are documented to return a VIEW.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from envherd.executor.batches.memory import Loans
from envherd.executor.protocol.positions import Positions
from envherd.shm.slab import Slab, next_leaves
from envherd.shm.specs import (
    EPISODE_KEYS,
    Binary,
    Box,
    Discrete,
    Domain,
    Key,
    LeafSpec,
    MultiDiscrete,
)
from envherd.workers.errors import ActionError


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
        if positions.in_root.any():
            is_fresh = np.repeat(positions.in_root, self._repeats)
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


# ---- fitting -----------------------------------------------------------------------------------
# Convert actions of a host library's users to arrays for shared memory.


def fitted(
    values: Any,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    of_agent: str = "",
) -> np.ndarray:
    """Return actions as an array of a shape and dtype; the same array if it is one.

    Args:
        values: array, tensor or lists, with one item for each row.
        shape: of the result, rows first.
        dtype: of the result.
        of_agent: for messages, e.g. " of wolf_0".

    Raises:
        ActionError: the wrong number of values, or values that an integer or bool dtype cannot hold.
    """
    array = as_array(values, of_agent=of_agent)
    # Batches of the space's own dtype are not copied.
    if array.dtype == dtype and array.shape == shape:
        return array
    if array.shape[:1] != shape[:1] or array.size != np.prod(shape, dtype=int):
        raise ActionError(
            f"step failed: expected actions{of_agent} of shape {shape}, got {array.shape}. No env was stepped."
        )
    array = array.reshape(shape)
    cast = as_array(array, dtype, of_agent)
    # Floats may be rounded.
    if dtype.kind in "iub" and not (cast == array).all():
        raise ActionError(
            f"step failed: expected {dtype} actions{of_agent}, got {array.dtype} {array[cast != array].flat[0]}. "
            f"No env was stepped."
        )
    return cast


def as_array(
    values: Any,
    dtype: np.dtype[Any] | None = None,
    of_agent: str = "",
) -> np.ndarray:
    """Return actions as an array, of a dtype if one is passed.

    Raises:
        ActionError: numpy cannot convert them.
    """
    try:
        return np.asarray(values, dtype)
    except (TypeError, ValueError) as error:
        raise ActionError(
            f"step failed: expected actions{of_agent} that are numbers, got {type(values).__name__} that numpy cannot "
            f"convert ({error}). No env was stepped."
        ) from None


def refuse_unknown(actions: Collection[Any], agents: Collection[Any]) -> None:
    """Raise an ActionError if an action is of none of the agents."""
    unknown = set(actions).difference(agents)
    if unknown:
        raise ActionError(
            f"step failed: expected actions of {', '.join(map(str, agents))}, got one of {unknown.pop()}. "
            f"No env was stepped."
        )


# ---- leaf spaces -------------------------------------------------------------------------------
# The Gymnasium spaces of leaves, and the leaves of Gymnasium spaces, for facades.

Space = spaces.Space[Any]


# ---- of envs that have no Gymnasium spaces themselves ------------------------------------------


def space_of(leaf: LeafSpec, lead: int) -> Space:
    """Return the space of a leaf without its first `lead` dimensions, which are those of the agents."""
    shape = leaf.shape[lead:]
    dtype = np.dtype(leaf.dtype)
    domain = leaf.domain
    # Several indices of one range become a Box.
    if isinstance(domain, Discrete) and shape == ():
        return spaces.Discrete(domain.n, start=domain.start)
    if isinstance(domain, MultiDiscrete) and dtype.kind in "iu":
        return spaces.MultiDiscrete(
            np.broadcast_to(np.asarray(domain.nvec), leaf.shape)[(0,) * lead]
        )
    if isinstance(domain, Binary) and dtype.kind in "iu":
        return spaces.MultiBinary(shape)
    bounds = [
        np.broadcast_to(bound, leaf.shape)[(0,) * lead].astype(dtype)
        for bound in _bounds(domain, dtype)
    ]
    return spaces.Box(bounds[0], bounds[1], shape, dtype.type)


def _bounds(domain: Domain, dtype: np.dtype) -> tuple[Any, Any]:
    if isinstance(domain, Box):
        return domain.low, domain.high
    if isinstance(domain, Discrete):
        return domain.start, domain.start + domain.n - 1
    if dtype.kind in "iu":
        return np.iinfo(dtype).min, np.iinfo(dtype).max
    return (0, 1) if dtype.kind == "b" else (-np.inf, np.inf)


def single_or_dict(found: Mapping[str, Space]) -> Space:
    """Return the only space, or a Dict of all."""
    return next(iter(found.values())) if len(found) == 1 else spaces.Dict(dict(found))


def name_below(key: Key, *prefixes: Key) -> str:
    """Return a key as one name, without the first of the prefixes that it is below."""
    below = (
        key[len(prefix) :]
        for prefix in prefixes
        if key[: len(prefix)] == prefix and len(key) > len(prefix)
    )
    return "/".join(next(below, key))


# ---- of envs that have ---------------------------------------------------------------------------


def inner_spaces(space: Space) -> list[Space]:
    """Return the spaces directly inside a Dict or Tuple space, in its own order; any other space itself."""
    if isinstance(space, spaces.Dict):
        return list(space.spaces.values())
    return list(space.spaces) if isinstance(space, spaces.Tuple) else [space]


def leaf_spaces(space: Space) -> list[Space]:
    """Return the spaces inside Dict and Tuple spaces, depth first, in their own order."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return [leaf for inner in inner_spaces(space) for leaf in leaf_spaces(inner)]
    return [space]
