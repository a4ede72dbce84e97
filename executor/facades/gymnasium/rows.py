"""Between Gymnasium's batches and the slab's rows: actions in, observations out, in Gymnasium's own layout.

Guarantees: an env gets the action that Gymnasium would have given it; what comes out has the dtypes,
shapes and nesting of `gymnasium.vector.utils.concatenate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import iterate

from envherd.executor.protocol.engine import Engine
from envherd.workers.adapters.hosts.gymnasium_native import FIXED, builder, leaf_spaces, loads

Space = spaces.Space[Any]


class Actions:
    """Takes batches of actions for all envs.

    Arrays of the space's own dtype go through shared memory. Everything else (lists, other dtypes, values
    of spaces that are not arrays) is pickled for the env as it is, which takes another round trip.

    Args:
        engine: of the envs.
        single_space: the action space of one env.
        space: of the batch.
    """

    def __init__(self, engine: Engine, single_space: Space, space: Space) -> None:
        self._engine = engine
        self._space = space
        leaves = leaf_spaces(single_space)
        inputs = engine.pool.slab.groups[0].inputs
        self._targets: list[np.ndarray] | None = None
        if all(isinstance(leaf, FIXED) for leaf in leaves):
            self._targets = [inputs["input", "action", str(index)] for index in range(len(leaves))]
        self._is_bare = isinstance(single_space, FIXED)
        self._leaves = _splitter(single_space)

    def take(self, actions: Any) -> None:
        """Hand a batch of actions to the envs.

        Raises:
            ValueError: not one action for each env.
            TypeError: not a batch at all.
        """
        if self._targets is None or not self._take_arrays(self._targets, actions):
            self._take_objects(actions)

    def _take_arrays(self, targets: list[np.ndarray], actions: Any) -> bool:
        values = [actions] if self._is_bare else self._split(actions)
        if values is None:
            return False
        for target, value in zip(targets, values, strict=True):
            if value.__class__ is not np.ndarray or value.dtype != target.dtype or value.shape != target.shape:
                return False
        for target, value in zip(targets, values, strict=True):
            target[...] = value
        return True

    def _split(self, actions: Any) -> list[Any] | None:
        try:
            return list(self._leaves(actions))
        except (TypeError, LookupError):
            return None

    def _take_objects(self, actions: Any) -> None:
        given = tuple(iterate(self._space, actions))
        num_envs = self._engine.num_envs
        if len(given) != num_envs:
            raise ValueError(f"step failed: expected {num_envs} actions, one for each env, got {len(given)}.")
        self._engine.ask("each", list(range(num_envs)), name="give", args=given)


def _splitter(space: Space) -> Callable[[Any], Iterator[Any]]:
    """Return the function that yields the leaves of a batch, which is nested as the single space is."""
    if isinstance(space, spaces.Dict):
        return _entries([(key, _splitter(sub)) for key, sub in space.spaces.items()])
    if isinstance(space, spaces.Tuple):
        return _entries([(index, _splitter(sub)) for index, sub in enumerate(space.spaces)])
    return lambda batch: iter((batch,))


def _entries(parts: list[tuple[Any, Callable[[Any], Iterator[Any]]]]) -> Callable[[Any], Iterator[Any]]:
    def split(batch: Any) -> Iterator[Any]:
        for key, part in parts:
            yield from part(batch[key])

    return split


class Observations:
    """Hands out where the envs are.

    Args:
        engine: of the envs.
        single_space: the observation space of one env.
        is_copy: whether to hand out memory of the caller's own wherever a view of the ring would do.
    """

    def __init__(self, engine: Engine, single_space: Space, *, is_copy: bool) -> None:
        self._positions, self._side = engine.positions, engine.side
        self._ids = engine.all_ids
        self._is_copy = is_copy
        batch = engine.batches.groups[0]
        is_bare = isinstance(single_space, FIXED)
        self._num_leaves = len(leaf_spaces(single_space))
        keys = [("observation", str(index)) for index in range(self._num_leaves)]
        self._next = [batch.next_arrays[batch.next_keys.index(key)] if key in batch.next_keys else None for key in keys]
        self._root = [batch.root_arrays[batch.root_keys.index(key)] if key in batch.root_keys else None for key in keys]
        self._join = builder(single_space)
        self._only_next: list[np.ndarray] | None = None
        self._only_root: list[np.ndarray] = []
        after, fresh = self._next[0], self._root[0]
        if is_bare and after is not None and fresh is not None:
            self._only_next, self._only_root = list(after), list(fresh)

    def after(self, column: int, reset_ids: np.ndarray | None) -> Any:
        """Return what a step of all envs gave, from a ring column; where some were reset, their new observations.

        Args:
            column: of the step.
            reset_ids: int `[k]`, who was reset at that column; None for nobody.

        Returns:
            A copy; without resets perhaps a view of the ring.
        """
        if self._only_next is None:
            return self._at(column) if reset_ids is None else self.now()
        rows = self._only_next[column]
        if reset_ids is None:
            return rows.copy() if self._is_copy else rows
        rows = rows.copy()
        rows[reset_ids] = self._only_root[column][reset_ids]
        return rows

    def _at(self, column: int) -> Any:
        leaves = [
            self._objects(index) if array is None else array[column].copy() if self._is_copy else array[column]
            for index, array in enumerate(self._next)
        ]
        return self._join(iter(leaves))

    def now(self) -> Any:
        """Return where the envs are, wherever that is kept: memory of the caller's own."""
        columns, in_root = self._positions.columns, self._positions.in_root
        column = columns[0]
        is_level = bool((columns == column).all())
        leaves: list[Any] = []
        for index, (after, fresh) in enumerate(zip(self._next, self._root, strict=True)):
            if after is None or fresh is None:
                leaves.append(self._objects(index))
                continue
            if is_level:
                leaf = after[column].copy()
                leaf[in_root] = fresh[column][in_root]
            else:
                leaf = after[columns, self._ids]
                leaf[in_root] = fresh[columns[in_root], self._ids[in_root]]
            leaves.append(leaf)
        return self._join(iter(leaves))

    def last_of(self, env_id: int, column: int) -> Any:
        """Return the observation that one env's latest step gave, not batched: memory of the caller's own."""
        leaves = [
            loads(self._side.next[env_id][index]) if array is None else array[column, env_id].copy()
            for index, array in enumerate(self._next)
        ]
        return self._join(iter(leaves))

    def _objects(self, index: int) -> tuple[Any, ...]:
        latest = self._side.latest(self._positions.in_root)
        return tuple(loads(latest[i][index]) for i in self._ids.tolist())
