"""The infos of a vector env from columns: as `VectorEnv._add_info` makes them env by env, but a key at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from envherd.executor.protocol.info_reader import Part
from envherd.workers.info_rows import Field, Kind, Schema, compile_reader

#: `(records, env_ids)` -> the value of a key for all envs; `env_ids` are int64 `[k]`, or a slice for all.
_Read = Callable[[np.ndarray, Any], Any]
_ALL = slice(None)
#: Kinds of values that Gymnasium puts into arrays of objects, as it does numpy's bools.
_OBJECTS = (Kind.NONE, Kind.TEXT, Kind.LIST, Kind.TUPLE)


class Columns:
    """Adds infos of one schema to those of a vector env, where no others have its keys."""

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self._readers: dict[Schema, _Read | None] = {}

    def add(self, infos: dict[str, Any], part: Part) -> bool:
        """Add infos; return False if they must be added env by env, and nothing was added."""
        schema = part.schema
        if schema is None:
            return False
        if schema not in self._readers:
            self._readers[schema] = None if _has_special_key(schema.root) else self._dict_reader(schema.root)
        read = self._readers[schema]
        if read is None or any(key in infos or f"_{key}" in infos for key in (schema.root.keys if infos else ())):
            return False
        infos.update(read(part.records, _ALL if len(part.env_ids) == self._num_envs else part.env_ids))
        return True

    def _dict_reader(self, field: Field) -> _Read:
        """Return what reads the arrays of a dict's entries, each with its mask."""
        nobody = np.zeros(self._num_envs, bool)
        entries = [(key, f"_{key}", self._reader(item)) for key, item in zip(field.keys, field.items, strict=True)]

        def read(records: np.ndarray, env_ids: Any) -> dict[str, Any]:
            infos = {}
            for key, mask_key, read_one in entries:
                infos[key] = read_one(records, env_ids)
                infos[mask_key] = mask = nobody.copy()
                mask[env_ids] = True
            return infos

        return read

    def _reader(self, field: Field) -> _Read:
        if field.kind == Kind.DICT:
            return self._dict_reader(field)
        name, values_of = str(field.place), None
        blank = np.zeros((self._num_envs, *field.shape), field.dtype or object)
        if field.kind in _OBJECTS or (field.kind == Kind.SCALAR and field.dtype == "|b1"):
            blank, values_of = np.full(self._num_envs, None, object), compile_reader(field)

        def read(records: np.ndarray, env_ids: Any) -> np.ndarray:
            array = blank.copy()
            array[env_ids] = (
                records[name] if values_of is None else np.fromiter(values_of(records), object, len(records))
            )
            return array

        return read


def _has_special_key(field: Field) -> bool:
    is_special = any(key.startswith("_") or key == "final_obs" for key in field.keys)
    return is_special or any(map(_has_special_key, field.items))
