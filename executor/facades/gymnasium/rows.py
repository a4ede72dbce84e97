"""Convert Gymnasium's batches of actions to rows of the slab, and rows to Gymnasium's observations.

Guarantees: an env gets the action that Gymnasium would pass to it; observations have the dtypes, shapes and nesting of
`gymnasium.vector.utils.concatenate`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import iterate

from envherd.executor.facades.columns import Column, LatestColumn
from envherd.executor.facades.gymnasium.worker import loads
from envherd.executor.facades.leaf_spaces import Space, leaf_spaces
from envherd.executor.protocol.engine import Engine
from envherd.shm.specs import LeafSpec
from envherd.workers.adapters.common.tree import (
    Leaf,
    builder,
    flattener,
    leaf_specs,
)
from envherd.workers.adapters.gymnasium.spaces import native_tree
from envherd.workers.errors import WorkerLost, WorkerTimeout


class Actions:
    """Takes batches of actions for all envs.

    Arrays of the space's own dtype go through shared memory. Everything else (lists, other dtypes, values of spaces
    that are not arrays) is pickled unchanged, which takes another round trip.

    Args:
        engine: of the envs.
        single_space: the action space of one env.
        space: of the batch.
    """

    def __init__(self, engine: Engine, single_space: Space, space: Space) -> None:
        self._engine = engine
        self._space = space
        tree = native_tree(single_space, "action", space)
        inputs = engine.pool.slab.groups[0].inputs
        keys = [("input", *leaf.key) for leaf in leaf_specs(tree) if not leaf.is_side]
        # If one leaf has no place in shared memory, all leaves of a batch go as objects.
        self._targets = (
            [inputs[key] for key in keys]
            if len(keys) == len(leaf_specs(tree))
            else None
        )
        self._split = flattener(tree, None)
        #: The rows of a space that is one array; None for other spaces.
        self._only = None
        if self._targets and isinstance(tree, Leaf) and tree.take is None:
            self._only = self._targets[0]

    def take(self, actions: Any) -> None:
        """Pass a batch of actions to the envs.

        Raises:
            ValueError: not one action for each env.
            TypeError: not a batch at all.
        """
        only = self._only
        if (
            only is not None
            and actions.__class__ is np.ndarray
            and actions.dtype == only.dtype
            and actions.shape == only.shape
        ):
            # The usual batch, in less time.
            only[...] = actions
        elif self._targets is None or not self._take_arrays(self._targets, actions):
            self._take_objects(actions)

    def _take_arrays(self, targets: list[np.ndarray], actions: Any) -> bool:
        try:
            # Raises if the actions are not nested as the space is.
            values = self._split(actions)
        except (TypeError, LookupError):
            return False
        for target, value in zip(targets, values, strict=True):
            if (
                # Any other dtype goes as objects: a cast could change what the env gets.
                value.__class__ is not np.ndarray
                or value.dtype != target.dtype
                or value.shape != target.shape
            ):
                return False
        for target, value in zip(targets, values, strict=True):
            target[...] = value
        return True

    def _take_objects(self, actions: Any) -> None:
        given = tuple(iterate(self._space, actions))
        num_envs = self._engine.num_envs
        if len(given) != num_envs:
            raise ValueError(
                f"step failed: expected {num_envs} actions, one for each env, got {len(given)}."
            )
        engine = self._engine
        ids = list(range(num_envs))
        while True:
            try:
                engine.ask("each", ids, name="give", args=tuple(given[i] for i in ids))
                return
            except (WorkerLost, WorkerTimeout):
                if engine.options.on_worker_loss != "restart":
                    raise
                # The step reports them.
                lost = engine.pool.blueprint.envs_of(engine.pool.lost)
                ids = [i for i in ids if i not in lost]


class Observations:
    """Hands out the envs' present observations.

    Args:
        engine: of the envs.
        single_space: the observation space of one row.
        leaves: of the observation, in the order of the space; further ones are ignored.
        num_rows: N, or with several agents in an env N times their number.
        is_copy: whether to hand out copies even if a view of the ring is possible.
    """

    def __init__(
        self,
        engine: Engine,
        single_space: Space,
        leaves: Sequence[LeafSpec],
        num_rows: int,
        *,
        is_copy: bool,
    ) -> None:
        self._positions = engine.positions
        self._side = engine.side
        self._ids = engine.all_ids
        seen = leaf_spaces(single_space)
        self._columns = [
            None
            if leaf.is_side
            else LatestColumn(
                engine.positions,
                leaf.key,
                num_rows,
                tuple(space.shape or ()),
            )
            # Leaves of infos and statistics come after those of the space.
            for leaf, space in zip(leaves, seen, strict=False)
        ]
        rows_at = Column.own if is_copy else Column.look
        #: Of each leaf: column of a step -> its rows.
        self._takes: list[Callable[[int], Any]] = [
            partial(self._objects, index)
            if leaf is None
            else partial(rows_at, leaf.after)
            for index, leaf in enumerate(self._columns)
        ]
        #: Of each leaf: row, column of a step -> a copy of the row's value.
        self._takes_of_row: list[Callable[[int, int], Any]] = [
            partial(self._object, index)
            if leaf is None
            # A Box's value is an array, also if its shape is ().
            else partial(
                _row, leaf.after, () if isinstance(space, spaces.Discrete) else (...,)
            )
            for index, (leaf, space) in enumerate(zip(self._columns, seen, strict=True))
        ]
        self._join = builder(native_tree(single_space, ""))

    def after(self, column: int, reset_ids: np.ndarray | None) -> Any:
        """Return the observations after a step of all envs, from a ring column; of a reset, for envs that were reset.

        Args:
            column: of the step.
            reset_ids: int `[k]`, rows that were reset at that column; None for none.

        Returns:
            The caller's own (see `Column.own`); without resets it may be a view of the ring.
        """
        if reset_ids is None:
            return self._join([take(column) for take in self._takes])
        leaves: list[Any] = []
        for index, leaf in enumerate(self._columns):
            if leaf is None:
                leaves.append(self._objects(index))
                continue
            # The memory is the caller's: `own` never returns a view of a frame that is used again.
            rows = leaf.after.own(column)
            fresh = leaf.fresh.look(column)
            # Few rows end at once, and an index of arrays takes the time of eight rows.
            for row in reset_ids.tolist():
                rows[row] = fresh[row]
            leaves.append(rows)
        return self._join(leaves)

    def now(self) -> Any:
        """Return a copy of the envs' present observations, from any column."""
        return self._join(
            [
                self._objects(index) if leaf is None else leaf.read()
                for index, leaf in enumerate(self._columns)
            ]
        )

    def last_of(self, row: int, column: int) -> Any:
        """Return a copy of the observation of one row's latest step, not batched; call it before `after`."""
        return self._join([take(row, column) for take in self._takes_of_row])

    def _object(self, index: int, row: int, _column: int) -> Any:
        return loads(self._side.next[row][index])

    def _objects(self, index: int, _column: int = 0) -> tuple[Any, ...]:
        latest = self._side.latest(self._positions.in_root)
        return tuple(loads(latest[i][index]) for i in self._ids.tolist())


def _row(leaf: Column, tail: tuple[Any, ...], row: int, column: int) -> Any:
    """Return a copy of one row of a leaf."""
    return leaf.look(column)[row, *tail].copy()
