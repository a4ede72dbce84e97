"""Convert actions of a host library's users to arrays for shared memory."""

from collections.abc import Collection
from typing import Any

import numpy as np

from envherd.workers.errors import ActionError


def fitted(
    values: Any,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    of_agent: str = "",
) -> np.ndarray:
    """Return actions as an array of a shape and dtype; the same array if it is one.

    Args:
        values: array, tensor or lists, with one item for each row.
        shape: of the result, rows first.
        dtype: of the result.
        of_agent: for messages, e.g. " of wolf_0".

    Raises:
        ActionError: the wrong number of values, or values that an integer or bool dtype cannot hold.
    """
    array = as_array(values, of_agent=of_agent)
    # Batches of the space's own dtype are not copied.
    if array.dtype == dtype and array.shape == shape:
        return array
    if array.shape[:1] != shape[:1] or array.size != np.prod(shape, dtype=int):
        raise ActionError(
            f"step failed: expected actions{of_agent} of shape {shape}, got {array.shape}. No env was stepped."
        )
    array = array.reshape(shape)
    cast = as_array(array, dtype, of_agent)
    # Floats may be rounded.
    if dtype.kind in "iub" and not (cast == array).all():
        raise ActionError(
            f"step failed: expected {dtype} actions{of_agent}, got {array.dtype} {array[cast != array].flat[0]}. "
            f"No env was stepped."
        )
    return cast


def as_array(
    values: Any,
    dtype: np.dtype[Any] | None = None,
    of_agent: str = "",
) -> np.ndarray:
    """Return actions as an array, of a dtype if one is passed.

    Raises:
        ActionError: numpy cannot convert them.
    """
    try:
        return np.asarray(values, dtype)
    except (TypeError, ValueError) as error:
        raise ActionError(
            f"step failed: expected actions{of_agent} that are numbers, got {type(values).__name__} that numpy cannot "
            f"convert ({error}). No env was stepped."
        ) from None


def refuse_unknown(actions: Collection[Any], agents: Collection[Any]) -> None:
    """Raise an ActionError if an action is of none of the agents."""
    unknown = set(actions).difference(agents)
    if unknown:
        raise ActionError(
            f"step failed: expected actions of {', '.join(map(str, agents))}, got one of {unknown.pop()}. "
            f"No env was stepped."
        )
