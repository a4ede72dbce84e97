"""Convert the rewards and flags that envs return into what a batch stores; refuse ambiguous values."""

from typing import Any

import numpy as np

from envherd.workers.errors import SpecError

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
