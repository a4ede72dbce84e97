"""The infos of a vector env from columns: as `VectorEnv._add_info` makes them env by env, but a key at a time."""

from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np

from envherd.executor.protocol.info_reader import Part
from envherd.workers.info_rows import Kind, Schema, SchemaField, compile_reader

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
