"""The Gymnasium spaces of leaves, the leaves of Gymnasium spaces, and users' actions as arrays, for facades.

A facade's half in a worker imports this, so it loads no torch.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from envherd.shm.specs import (
    Binary,
    Box,
    Discrete,
    Domain,
    Key,
    LeafSpec,
    MultiDiscrete,
)
from envherd.workers.errors import ActionError

Space = spaces.Space[Any]


# ---- of envs that have no Gymnasium spaces themselves ------------------------------------------


def space_of(leaf: LeafSpec, lead: int) -> Space:
    """Return the space of a leaf without its first `lead` dimensions, which are those of the agents."""
    shape = leaf.shape[lead:]
    dtype = np.dtype(leaf.dtype)
    domain = leaf.domain
    # Several indices of one range become a Box.
    if isinstance(domain, Discrete) and shape == ():
        return spaces.Discrete(domain.n, start=domain.start)
    if isinstance(domain, MultiDiscrete) and dtype.kind in "iu":
        return spaces.MultiDiscrete(
            np.broadcast_to(np.asarray(domain.nvec), leaf.shape)[(0,) * lead]
        )
    if isinstance(domain, Binary) and dtype.kind in "iu":
        return spaces.MultiBinary(shape)
    bounds = [
        np.broadcast_to(bound, leaf.shape)[(0,) * lead].astype(dtype)
        for bound in _bounds(domain, dtype)
    ]
    return spaces.Box(bounds[0], bounds[1], shape, dtype.type)


def _bounds(domain: Domain, dtype: np.dtype) -> tuple[Any, Any]:
    if isinstance(domain, Box):
        return domain.low, domain.high
    if isinstance(domain, Discrete):
        return domain.start, domain.start + domain.n - 1
    if dtype.kind in "iu":
        return np.iinfo(dtype).min, np.iinfo(dtype).max
    return (0, 1) if dtype.kind == "b" else (-np.inf, np.inf)


def single_or_dict(found: Mapping[str, Space]) -> Space:
    """Return the only space, or a Dict of all."""
    return next(iter(found.values())) if len(found) == 1 else spaces.Dict(dict(found))


def name_below(key: Key, *prefixes: Key) -> str:
    """Return a key as one name, without the first of the prefixes that it is below."""
    below = (
        key[len(prefix) :]
        for prefix in prefixes
        if key[: len(prefix)] == prefix and len(key) > len(prefix)
    )
    return "/".join(next(below, key))


# ---- of envs that have ---------------------------------------------------------------------------


def inner_spaces(space: Space) -> list[Space]:
    """Return the spaces directly inside a Dict or Tuple space, in its own order; any other space itself."""
    if isinstance(space, spaces.Dict):
        return list(space.spaces.values())
    return list(space.spaces) if isinstance(space, spaces.Tuple) else [space]


def leaf_spaces(space: Space) -> list[Space]:
    """Return the spaces inside Dict and Tuple spaces, depth first, in their own order."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return [leaf for inner in inner_spaces(space) for leaf in leaf_spaces(inner)]
    return [space]


# ---- actions -----------------------------------------------------------------------------------


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
