"""Gymnasium's batches of actions as rows of the slab, and rows as Gymnasium's observations, spaces and infos.

Guarantees: an env gets the action that Gymnasium would pass to it; observations have the dtypes, shapes and nesting of
`gymnasium.vector.utils.concatenate`.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from operator import itemgetter
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector.utils import batch_differing_spaces, batch_space, iterate

from envherd.executor.facades.gymnasium.worker import Description, loads
from envherd.executor.facades.rows import Column, LatestColumn
from envherd.executor.facades.spaces import Space, leaf_spaces
from envherd.executor.protocol.engine import Engine
from envherd.executor.protocol.info_reader import Part
from envherd.shm.specs import LeafSpec
from envherd.workers.adapters.common.tree import (
    Leaf,
    builder,
    flattener,
    leaf_specs,
)
from envherd.workers.adapters.gymnasium.spaces import native_tree
from envherd.workers.errors import WorkerLost, WorkerTimeout
from envherd.workers.info_rows import Kind, Schema, SchemaField, compile_reader

# ---- spaces ------------------------------------------------------------------------------------
# The spaces of a vector env: read from its envs, checked as Gymnasium checks them, and batched.
#
# The parent builds no env for that: every env describes itself in its worker.

#: Spaces that Gymnasium can batch.
_STANDARD = (
    spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary,
    spaces.Text, spaces.Graph, spaces.Sequence, spaces.OneOf,
)  # fmt: skip


def check_mode(observation_mode: Any) -> None:
    """Refuse anything but an observation mode, before anything is started.

    Raises:
        ValueError: neither "same" nor "different" nor a pair.
        TypeError: a pair of other objects than spaces.
    """
    if isinstance(observation_mode, tuple) and len(observation_mode) == 2:
        if not all(isinstance(space, spaces.Space) for space in observation_mode):
            kinds = " and ".join(str(type(space)) for space in observation_mode)
            raise TypeError(
                f"Expected both elements of observation_mode to be Spaces, got {kinds}"
            )
    elif observation_mode not in ("same", "different"):
        raise ValueError(
            f"Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch observation "
            f"space, actual got {observation_mode}"
        )


def batch(
    name: str,
    descriptions: list[Description],
    observation_mode: Any,
) -> tuple[Space, Space, Space, Space]:
    """Return the spaces of a vector env: of one observation, of all, of one action, of all.

    Args:
        name: of the vector env's class, for messages.
        descriptions: of its envs.
        observation_mode: "same", "different", or `(observation_space, single_observation_space)`.

    Raises:
        RuntimeError: the envs' spaces do not fit together.
        ValueError, TypeError: they cannot be batched.
    """
    first = descriptions[0]
    num_envs = len(descriptions)
    own = [one.observation_space for one in descriptions]
    if isinstance(observation_mode, tuple):
        observation_space, single = observation_mode
    elif observation_mode == "same":
        single = first.observation_space
        for env_id, space in enumerate(own):
            if space != single:
                raise RuntimeError(
                    f"{name}(..., observation_mode='same') however the sub-environments observation spaces are not "
                    f"equivalent. Those of env 0 and env {env_id} differ. If this is intentional, use "
                    f"`observation_mode='different'` instead."
                )
        observation_space = batch_space(single, num_envs)
    else:
        single = first.observation_space
        observation_space = batch_differing_spaces(own)
    if observation_mode != "same" and not all(
        is_space_dtype_shape_equiv(space, single) for space in own
    ):
        raise RuntimeError(
            f"{name}(..., observation_mode='different' or custom space) however the sub-environments observation "
            f"spaces do not share a common shape and dtype."
        )
    for env_id, one in enumerate(descriptions):
        if one.action_space != first.action_space:
            raise RuntimeError(
                f"Some environments have an action space different from `{first.action_space}`: env {env_id} has "
                f"`{one.action_space}`. In order to batch actions, the action spaces of all environments must be equal."
            )
    return (
        single,
        observation_space,
        first.action_space,
        batch_space(first.action_space, num_envs),
    )


def has_custom(space: Space) -> bool:
    """Return whether a space, or one inside it, is not one of Gymnasium's own."""
    return not all(isinstance(leaf, _STANDARD) for leaf in leaf_spaces(space))


# ---- rows --------------------------------------------------------------------------------------


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


# ---- infos -------------------------------------------------------------------------------------
# The infos of a vector env from columns: as `VectorEnv._add_info` makes them env by env, but a key at a time.

#: `(records, env_ids, others)` -> the value of a key for all envs. The records are of all; `env_ids` are those that
#: have the key, and `others` those that do not, int64 `[k]`; both are None if all have it.
_Read = Callable[[np.ndarray, np.ndarray | None, np.ndarray | None], Any]
#: Kinds of values that Gymnasium puts into arrays of objects, as it does numpy's bools.
_OBJECTS = (Kind.NONE, Kind.TEXT, Kind.LIST, Kind.TUPLE)


class Columns:
    """Adds infos of one schema to those of a vector env."""

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        #: Schema -> its reader; None if its infos must be added env by env.
        self._reader_of: Callable[[Schema], _Read | None] = cache(
            lambda schema: (
                None
                if _has_special_key(schema.root)
                else self._dict_reader(schema.root)
            )
        )

    def add(self, infos: dict[str, Any], part: Part) -> bool:
        """Add infos; return False if they must be added env by env, and nothing was added."""
        schema = part.schema
        read = schema and self._reader_of(schema)
        if not (schema and read):
            return False
        env_ids = others = None
        if len(part.env_ids) < self._num_envs:
            is_other = np.ones(self._num_envs, bool)
            is_other[part.env_ids] = False
            env_ids = part.env_ids
            others = np.flatnonzero(is_other)
        own = read(part.records, env_ids, others)
        # Envs with other infos may have some of the keys, as after a reset.
        shared = infos.keys() & own.keys()
        if not all(_are_alike(infos[key], own[key]) for key in shared):
            return False
        for key in shared:
            infos[key][env_ids] = own.pop(key)[env_ids]
        infos.update(own)
        return True

    def copies(self, parts: Sequence[Part]) -> list[tuple[str, Callable[[], Any]]]:
        """Return the functions that copy each entry of the infos in some parts, as long as their records are written.

        An empty list unless all envs have the same numbers: then infos must be added by `add`.
        """
        first = parts[0]
        schema = first.schema
        if schema is None or len(first.env_ids) < self._num_envs or len(parts) > 1:
            return []
        root = schema.root
        if _has_special_key(root) or not all(map(_is_number, root.items)):
            return []
        mask = np.ones(self._num_envs, bool)
        copies = []
        for key, item in zip(root.keys, root.items, strict=True):
            copies.append((key, first.records[str(item.place)].copy))
            # The caller owns each mask.
            copies.append((f"_{key}", mask.copy))
        return copies

    def _dict_reader(self, field: SchemaField) -> _Read:
        """Return what reads the arrays of a dict's entries, each with its mask."""
        everybody = np.ones(self._num_envs, bool)
        entries = [
            (key, f"_{key}", self._reader(item))
            for key, item in zip(field.keys, field.items, strict=True)
        ]

        def read(
            records: np.ndarray,
            env_ids: np.ndarray | None,
            others: np.ndarray | None,
        ) -> dict[str, Any]:
            mask = everybody.copy()
            infos = {}
            if others is not None:
                mask[others] = False
            for key, mask_key, read_one in entries:
                infos[key] = read_one(records, env_ids, others)
                # The caller owns each mask.
                infos[mask_key] = mask.copy()
            return infos

        return read

    def _reader(self, field: SchemaField) -> _Read:
        if field.kind == Kind.DICT:
            return self._dict_reader(field)
        if not _is_number(field):
            return _object_reader(field)
        values_of = itemgetter(str(field.place))

        def read(
            records: np.ndarray,
            _: np.ndarray | None,
            others: np.ndarray | None,
        ) -> np.ndarray:
            array = values_of(records).copy()
            # Their bytes are of other infos.
            if others is not None:
                array[others] = 0
            return array

        return read


def _are_alike(one: Any, other: Any) -> bool:
    """Return whether values of some envs in one array may be replaced by those of another."""
    return (
        one.__class__ is other.__class__ is np.ndarray
        and one.dtype == other.dtype
        and one.shape == other.shape
    )


def _object_reader(field: SchemaField) -> _Read:
    """Return what reads a field as an array of objects, None for envs that do not have it."""
    read_values = compile_reader(field)

    def read(
        records: np.ndarray,
        env_ids: np.ndarray | None,
        _: np.ndarray | None,
    ) -> np.ndarray:
        if env_ids is None:
            return np.fromiter(read_values(records), object, len(records))
        array = np.full(len(records), None, object)
        values = read_values(records[env_ids])
        array[env_ids] = np.fromiter(values, object, len(values))
        return array

    return read


def _is_number(field: SchemaField) -> bool:
    """Return whether a field is an array of numbers for all envs, and no array of objects or dict."""
    is_bool = field.kind == Kind.SCALAR and field.dtype == "|b1"
    return not (is_bool or field.kind == Kind.DICT or field.kind in _OBJECTS)


def _has_special_key(field: SchemaField) -> bool:
    is_special = any(key.startswith("_") or key == "final_obs" for key in field.keys)
    return is_special or any(map(_has_special_key, field.items))
