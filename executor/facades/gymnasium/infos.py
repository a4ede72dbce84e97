"""The infos of a vector env from columns: as `VectorEnv._add_info` makes them env by env, but a key at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np

from envherd.executor.protocol.info_reader import Part
from envherd.workers.info_rows import Kind, Schema, SchemaField, compile_reader

#: `(records, env_ids)` -> the value of a key for all envs. The records are of all; `env_ids` are those that have the
#: key, int64 `[k]`, or None for all.
_Read = Callable[[np.ndarray, np.ndarray | None], Any]
#: Kinds of values that Gymnasium puts into arrays of objects, as it does numpy's bools.
_OBJECTS = (Kind.NONE, Kind.TEXT, Kind.LIST, Kind.TUPLE)


class Columns:
    """Adds infos of one schema to those of a vector env, where no others have its keys."""

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self._reader_of = cache(self._schema_reader)

    def add(self, infos: dict[str, Any], part: Part) -> bool:
        """Add infos; return False if they must be added env by env, and nothing was added."""
        schema = part.schema
        read = schema and self._reader_of(schema)
        if not (schema and read) or any(
            key in infos or f"_{key}" in infos for key in schema.root.keys if infos
        ):
            return False
        infos.update(
            read(
                part.records,
                None if len(part.env_ids) == self._num_envs else part.env_ids,
            )
        )
        return True

    def _schema_reader(self, schema: Schema) -> _Read | None:
        return None if _has_special_key(schema.root) else self._dict_reader(schema.root)

    def _dict_reader(self, field: SchemaField) -> _Read:
        """Return what reads the arrays of a dict's entries, each with its mask."""
        nobody = np.zeros(self._num_envs, bool)
        entries = [
            (key, f"_{key}", self._reader(item))
            for key, item in zip(field.keys, field.items, strict=True)
        ]

        def read(records: np.ndarray, env_ids: np.ndarray | None) -> dict[str, Any]:
            mask, infos = nobody.copy(), {}
            mask[slice(None) if env_ids is None else env_ids] = True
            for key, mask_key, read_one in entries:
                infos[key] = read_one(records, env_ids)
                infos[mask_key] = mask.copy()
            return infos

        return read

    def _reader(self, field: SchemaField) -> _Read:
        if field.kind == Kind.DICT:
            return self._dict_reader(field)
        values_of: Any = itemgetter(str(field.place))
        blank = np.zeros((self._num_envs, *field.shape), field.dtype or object)
        if field.kind in _OBJECTS or (
            field.kind == Kind.SCALAR and field.dtype == "|b1"
        ):
            blank, values_of = (
                np.full(self._num_envs, None, object),
                _object_reader(field),
            )

        def read(records: np.ndarray, env_ids: np.ndarray | None) -> Any:
            if env_ids is None:
                return values_of(records).copy()
            array = blank.copy()
            array[env_ids] = values_of(records[env_ids])
            return array

        return read


def _object_reader(field: SchemaField) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function that returns the values of a field in some records, as an array of objects."""
    read = compile_reader(field)
    return lambda records: np.fromiter(read(records), object, len(records))


def _has_special_key(field: SchemaField) -> bool:
    is_special = any(key.startswith("_") or key == "final_obs" for key in field.keys)
    return is_special or any(map(_has_special_key, field.items))
