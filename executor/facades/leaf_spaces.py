"""The Gymnasium spaces of leaves, and the leaves of Gymnasium spaces, for facades."""

from collections.abc import Mapping
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
