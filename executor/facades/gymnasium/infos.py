"""The infos of a vector env from columns: as `VectorEnv._add_info` makes them env by env, but a key at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from envherd.executor.protocol.info_reader import Part
from envherd.workers.info_rows import Field, Kind, Schema, compile_reader

#: `(records, env_ids)` -> the value of a key for all envs; `env_ids` are int64 `[k]`, or None for all.
_Read = Callable[[np.ndarray, np.ndarray | None], Any]

#: Kinds of values that Gymnasium puts into arrays of objects, as it does numpy's bools.
_OBJECTS = (Kind.NONE, Kind.TEXT, Kind.LIST, Kind.TUPLE)


class Columns:
    """Adds infos of one schema to those of a vector env, where no others have its keys."""

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self._all = np.ones(num_envs, bool)
        self._compiled: dict[Schema, tuple[set[str], _Read] | None] = {}

    def add(self, infos: dict[str, Any], part: Part) -> bool:
        """Add infos; return False if they must be added env by env, and nothing was added."""
        schema = part.schema
        if schema is None:
            return False
        if schema not in self._compiled:
            self._compiled[schema] = self._compile(schema.root)
        compiled = self._compiled[schema]
        if compiled is None or not compiled[0].isdisjoint(infos):
            return False
        infos.update(compiled[1](part.records, None if len(part.env_ids) == self._num_envs else part.env_ids))
        return True

    def _compile(self, root: Field) -> tuple[set[str], _Read] | None:
        """Return the names of a schema's arrays and masks, and what reads them; None if a name has its own meaning."""
        if _has_special_key(root):
            return None
        return {name for key in root.keys for name in (key, f"_{key}")}, self._reader(root)

    def _reader(self, field: Field) -> _Read:
        if field.kind == Kind.DICT:
            return self._dict_reader(field)
        if field.kind in (Kind.NONE, Kind.TEXT, Kind.LIST, Kind.TUPLE) or (
            field.kind == Kind.SCALAR and field.dtype == "|b1"
        ):
            return self._object_reader(field)
        name, num_envs = str(field.place), self._num_envs

        def read(records: np.ndarray, env_ids: np.ndarray | None) -> np.ndarray:
            column = records[name]
            if env_ids is None:
                return column.copy()
            array = np.zeros((num_envs, *column.shape[1:]), column.dtype)
            array[env_ids] = column
            return array

        return read

    def _dict_reader(self, field: Field) -> _Read:
        entries = [(key, f"_{key}", self._reader(item)) for key, item in zip(field.keys, field.items, strict=True)]
        full = self._all

        def read(records: np.ndarray, env_ids: np.ndarray | None) -> dict[str, Any]:
            infos = {}
            for key, mask_key, read_one in entries:
                infos[key] = read_one(records, env_ids)
                mask = full.copy()
                if env_ids is not None:
                    mask[:] = False
                    mask[env_ids] = True
                infos[mask_key] = mask
            return infos

        return read

    def _object_reader(self, field: Field) -> _Read:
        values_of, num_envs = compile_reader(field), self._num_envs

        def read(records: np.ndarray, env_ids: np.ndarray | None) -> np.ndarray:
            array = np.full(num_envs, None, object)
            for env_id, value in zip(range(num_envs) if env_ids is None else env_ids, values_of(records)):  # noqa: B905
                array[env_id] = value
            return array

        return read


def _has_special_key(field: Field) -> bool:
    is_special = any(key.startswith("_") or key == "final_obs" for key in field.keys)
    return is_special or any(map(_has_special_key, field.items))
