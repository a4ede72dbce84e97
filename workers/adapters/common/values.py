"""Values that families share: generators, options of resets, rewards and flags, values without a fixed shape."""

import contextlib
import copy
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from envherd.workers.errors import SpecError

# ---- generators --------------------------------------------------------------------------------
# Give each env its own state of the process's global random generators.


class OwnGenerators:
    """An env's own state of the global generators, swapped in and out (2 us for torch's alone; 2-core x86, 2026-11).

    Args:
        read: returns the state of the generators.
        restore: sets it.

    Attributes:
        state: of the env's generators, while they are not swapped in.
    """

    def __init__(self, read: Callable[[], Any], restore: Callable[[Any], Any]) -> None:
        self._read = read
        self._restore = restore
        self.state = self._outer = read()

    def __enter__(self) -> None:
        self._outer = self._read()
        self._restore(self.state)

    def __exit__(self, *error: object) -> None:
        self.state = self._read()
        self._restore(self._outer)


@contextlib.contextmanager
def seeded_random(seed: int) -> Iterator[None]:
    """Seed python's global generator for a while, and restore the caller's state after it."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


# ---- reset options -----------------------------------------------------------------------------
# The `options` of a reset, for envs with Gymnasium's `reset` signature.


def own_options(options: Mapping[str, Any] | None, kind: str) -> Any:
    """Return a copy, for one env, of the `options` that the caller passed to `reset`; None if there are none.

    Args:
        options: keyword arguments of the reset.
        kind: of env, for the message.

    Raises:
        TypeError: a keyword other than `options`.
    """
    if not options:
        return None
    check_keywords(options, kind)
    return copy.deepcopy(options["options"])


def check_keywords(options: Mapping[str, Any], kind: str) -> None:
    """Refuse keyword arguments of a reset other than `options`.

    Args:
        options: keyword arguments of the reset.
        kind: of env, for the message.
    """
    unknown = [name for name in options if name != "options"]
    if unknown:
        raise TypeError(
            f"reset failed: expected no keyword but `options` for a {kind}, got `{unknown[0]}`. "
            f"Put it into reset(options={{{unknown[0]!r}: ...}}), which the env receives. "
            f"To reset some envs only, set td['_reset'] to a mask."
        )


# ---- scalars -----------------------------------------------------------------------------------
# Convert the rewards and flags that envs return into what a batch stores; refuse ambiguous values.

#: Types that need no closer look; a set, because isinstance with numpy's abstract types takes 0.3 us.
NUMBERS: frozenset[Any] = frozenset(
    (float, int, bool, np.float64, np.float32, np.int64, np.int32, np.bool_)
)


def as_float(value: Any, name: str, fix: str = "Fix the env.") -> float:
    """Return a number as a python float.

    Args:
        value: a python or numpy number or bool, or an array (also a tensor) of exactly one.
        name: what it is, for the message.
        fix: what to do about several numbers, for the message.

    Raises:
        SpecError: None, text, several numbers, or anything else.
    """
    if value.__class__ in NUMBERS:
        return float(value)
    array = _as_array(value)
    if array is None or array.size != 1 or array.dtype.kind not in "biuf":
        advice = (
            fix
            if array is not None and array.size > 1 and array.dtype.kind in "biuf"
            else "Fix the env."
        )
        raise SpecError(
            f"step failed: expected one number as the {name}, got {_describe(value, array)}. {advice}"
        )
    return float(array.reshape(()))


def as_flag(value: Any, name: str) -> bool:
    """Return a flag as a python bool: a bool, or a number that is 0 or 1, also in an array (or tensor) of exactly one.

    Raises:
        SpecError: anything else, including None, text and other numbers.
    """
    if value.__class__ is np.bool_ or value.__class__ is bool:
        return bool(value)
    array = _as_array(value)
    if array is None or array.size != 1 or not are_flags(array):
        raise SpecError(
            f"step failed: expected a bool as `{name}`, got {_describe(value, array)}. Return bool(...) from the env."
        )
    return bool(array.reshape(()))


def are_flags(array: np.ndarray) -> bool:
    """Return whether all items of an array are bools, or numbers that are 0 or 1."""
    return array.dtype.kind == "b" or (
        array.dtype.kind in "iuf" and bool(np.isin(array, (0, 1)).all())
    )


def _as_array(value: Any) -> np.ndarray | None:
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError):
        return None


def _describe(value: Any, array: np.ndarray | None) -> str:
    if value is None or isinstance(value, (int, float, str)):
        return repr(value)[:80]
    if isinstance(value, np.generic):
        return f"{value.dtype} {value}"
    if array is None or array.dtype.kind not in "biufc":
        return type(value).__name__
    return f"{type(value).__name__} of {array.dtype} {array.shape}"


def outline(result: Any) -> str:
    """Return how many values of which types a method of an env has returned, for messages."""
    if isinstance(result, (tuple, list)):
        return f"{len(result)} values ({', '.join(type(item).__name__ for item in result[:8])})"
    return type(result).__name__


# ---- side values -------------------------------------------------------------------------------
# Copy values without a fixed shape and dtype as plain data.
#
# Guarantees: the copy shares no memory with the env (envs reuse buffers, and side values are sent only at the end of
# the command). It consists of None, bool, numbers, str, bytes, numeric numpy arrays and lists, tuples and dicts of
# these. Named tuples and dataclasses become dicts by field name, so that a `gymnasium.spaces.GraphInstance` comes out
# as `{"nodes": array, "edges": array or None, "edge_links": array or None}`; tensors become arrays. Anything else is
# refused with a message that names its place.


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
