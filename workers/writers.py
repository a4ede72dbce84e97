"""Writers: one closure per leaf that checks a value against its spec and stores it at a column.

Guarantees: a value is stored only if it has the leaf's shape, and the leaf's dtype or one that casts to it within its
kind (float64 to float32, int64 to int32, which many envs need). A scalar is never broadcast over an array, a float
never becomes an integer, an integer never becomes another one, None never becomes NaN. An array may be passed as the
tuple of its rows, which saves stacking them first. In the common case, an array of the right dtype and shape, the check
is one comparison.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from envherd.shm.specs import LeafSpec
from envherd.workers.errors import SpecError

Writer = Callable[[int, Any], None]

#: Number of columns up to which a writer keeps a view of each column, which saves 100 ns per value.
_MOST_VIEWS = 1024


def coerce(leaf: LeafSpec, value: Any) -> Any:
    """Return a value in the shape and dtype of the leaf's array.

    Raises:
        SpecError: wrong shape, or a dtype that does not cast within its kind.
    """
    dtype = np.dtype(leaf.dtype)
    if value is None:
        raise _mismatch(leaf, "None")
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise _mismatch(leaf, f"something ragged ({error})") from None
    # Others would be converted by their code or their text, such as "1" to 1.
    if array.dtype.kind not in "biufc":
        raise _mismatch(leaf, f"{type(value).__name__} of dtype {array.dtype}")
    if array.shape != leaf.shape or not _casts(array, dtype):
        got = f"{array.dtype} {array.shape}"
        if _are_integers(array, dtype):
            got = f"{got} with values from {array.min()} to {array.max()}"
        raise _mismatch(leaf, got)
    return array.astype(dtype)


def _are_integers(array: np.ndarray, dtype: np.dtype) -> bool:
    """Return whether an array has integers, for an integer dtype."""
    return array.dtype.kind in "iu" and dtype.kind in "iu" and array.size > 0


def _casts(array: np.ndarray, dtype: np.dtype) -> bool:
    """Return whether values cast to a dtype within its kind, or are integers in its range."""
    if not _are_integers(array, dtype):
        return np.can_cast(array.dtype, dtype, "same_kind")
    if np.can_cast(array.dtype, dtype):
        return True
    limits = np.iinfo(dtype)
    return int(array.min()) >= limits.min and int(array.max()) <= limits.max


def _mismatch(leaf: LeafSpec, got: str) -> SpecError:
    return SpecError(
        f"writing {'/'.join(leaf.key)} failed: expected {leaf.dtype} {leaf.shape}, got {got}. "
        f"The env breaks its own spec: fix the env or the space it declares."
    )


def not_finite(leaf: LeafSpec, values: Any, is_finite: Any) -> SpecError:
    """Return the error for values of a leaf that `check_finite` refuses; it has the first one."""
    at = tuple(map(int, np.argwhere(~np.asarray(is_finite))[0]))
    where = f" at {at}" if values.size != 1 else ""
    return SpecError(
        f"writing {'/'.join(leaf.key)} failed: expected finite values (check_finite=True), got {values[at]}{where}. "
        f"Fix the env."
    )


def writer_for(
    leaf: LeafSpec,
    array: np.ndarray,
    *,
    check_finite: bool = False,
) -> Writer:
    """Return a writer of one leaf.

    Args:
        leaf: its spec; not a side leaf.
        array: `[column, *leaf.shape]`, where it is stored (VIEW).
        check_finite: refuse NaN and infinities of float leaves.
    """
    if check_finite and np.dtype(leaf.dtype).kind in "fc":
        return _finite_writer(leaf, array)
    if leaf.shape == (1,) and leaf.dtype in ("float32", "float64"):
        return _single_float_writer(leaf, array)
    if leaf.shape == ():
        return _scalar_writer(leaf, array)
    return _array_writer(leaf, array)


def _array_writer(leaf: LeafSpec, array: np.ndarray) -> Writer:
    shape = leaf.shape
    dtype = np.dtype(leaf.dtype)
    # A local, as all others: a look-up of `np.ndarray` takes as long as the comparison.
    ndarray = np.ndarray
    columns = list(array) if len(array) <= _MOST_VIEWS else array

    def is_row(value: Any) -> bool:
        return (
            value.__class__ is ndarray
            and value.dtype is dtype
            and value.shape == shape[1:]
        )

    def write(column: int, value: Any) -> None:
        if value.__class__ is ndarray and value.dtype is dtype and value.shape == shape:
            columns[column][...] = value
        elif (
            value.__class__ is tuple
            and len(value) == shape[0]
            and all(map(is_row, value))
        ):
            for place, row in zip(columns[column], value, strict=True):
                place[...] = row
        else:
            array[column] = coerce(leaf, value)

    return write


def _single_float_writer(leaf: LeafSpec, array: np.ndarray) -> Writer:
    """Return a writer for leaves such as the reward: it also accepts a float for an array of one."""
    # 30 ns a value; numpy takes 60.
    flat: Any = array[:, 0].data

    def write(column: int, value: Any) -> None:
        if value.__class__ is float:
            flat[column] = value
        elif np.shape(value) == () and value is not None:
            flat[column] = coerce(
                LeafSpec(leaf.key, (), leaf.dtype, leaf.domain),
                value,
            )
        else:
            array[column] = coerce(leaf, value)

    return write


def _scalar_writer(leaf: LeafSpec, array: np.ndarray) -> Writer:
    kind: type | None = {"i": int, "u": int, "f": float}.get(
        np.dtype(leaf.dtype).kind, bool
    )
    if kind is int and leaf.dtype != "int64":
        kind = None  # `coerce` checks the range

    def write(column: int, value: Any) -> None:
        if value.__class__ is kind:
            array[column] = value
        else:
            array[column] = coerce(leaf, value)

    return write


def _finite_writer(leaf: LeafSpec, array: np.ndarray) -> Writer:
    inner = writer_for(leaf, array)

    def write(column: int, value: Any) -> None:
        inner(column, value)
        # Of the stored value: a large float64 becomes infinite as a float32.
        is_finite = np.isfinite(array[column])
        if not is_finite.all():
            raise not_finite(leaf, array[column], is_finite)

    return write
