"""Copy values without a fixed shape and dtype as plain data.

Guarantees: the copy shares no memory with the env (envs reuse buffers, and side values are sent only at the end of the
command). It consists of None, bool, numbers, str, bytes, numeric numpy arrays and
lists, tuples and dicts of these. Named tuples and dataclasses become dicts by field name, so that a
`gymnasium.spaces.GraphInstance` comes out as `{"nodes": array, "edges": array or None, "edge_links":
array or None}`; tensors become arrays. Anything else is refused with a message that names its place.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from envherd.workers.errors import SpecError


def snapshot(value: Any, where: str = "value") -> Any:
    """Return a copy of a value as plain data.

    Args:
        value: from the env.
        where: its name, for the message.

    Raises:
        SpecError: some part of it is an object that is not plain data.
    """
    if isinstance(value, np.ndarray):
        return _snapshot_array(value, where)
    if isinstance(value, str):
        return str(value)
    if value is None or isinstance(
        value,
        (bool, int, float, bytes, np.bool_, np.number),
    ):
        return value
    if isinstance(value, tuple):
        if hasattr(value, "_fields"):  # of a named tuple
            return {
                name: snapshot(item, f"{where}.{name}")
                for name, item in zip(value._fields, value, strict=True)
            }
        return tuple(snapshot(item, f"{where}[{i}]") for i, item in enumerate(value))
    if isinstance(value, list):
        return [snapshot(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {
            snapshot(key, f"key of {where}"): snapshot(item, f"{where}[{key!r}]")
            for key, item in value.items()
        }
    return _snapshot_object(value, where)


def _snapshot_array(array: np.ndarray, where: str) -> Any:
    if array.dtype.kind == "O":
        return snapshot(array.item() if array.ndim == 0 else array.tolist(), where)
    if array.dtype.kind not in "biufcSU":
        raise _refusal(where, f"an array of {array.dtype}")
    return array.copy()


def _snapshot_object(value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: snapshot(getattr(value, field.name), f"{where}.{field.name}")
            for field in dataclasses.fields(value)
        }
    if hasattr(value, "__array__"):
        return _snapshot_array(np.array(value), where)
    raise _refusal(where, f"a {type(value).__module__}.{type(value).__qualname__}")


def _refusal(where: str, got: str) -> SpecError:
    return SpecError(
        f"reading {where} failed: expected numbers, text, arrays, or lists, tuples and dicts of them, got {got}. "
        f"Convert it in a wrapper around the env."
    )
