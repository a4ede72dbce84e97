"""The Gymnasium space of a leaf, for hosts of envs that have no Gymnasium spaces themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from envherd.shm.specs import Binary, Box, Discrete, Domain, LeafSpec, MultiDiscrete

Space = spaces.Space[Any]


def space_of(leaf: LeafSpec, lead: int) -> Space:
    """Return the space of a leaf without its first `lead` dimensions, which are those of the agents."""
    shape, dtype, domain = leaf.shape[lead:], np.dtype(leaf.dtype), leaf.domain
    if isinstance(domain, Discrete) and shape == ():
        return spaces.Discrete(domain.n, start=domain.start)
    if isinstance(domain, MultiDiscrete) and dtype.kind in "iu":
        return spaces.MultiDiscrete(np.broadcast_to(np.asarray(domain.nvec), leaf.shape)[(0,) * lead])
    if isinstance(domain, Binary) and dtype.kind in "iu":
        return spaces.MultiBinary(shape)
    low, high = (np.broadcast_to(bound, leaf.shape)[(0,) * lead] for bound in _bounds(domain, dtype))
    return spaces.Box(low.astype(dtype), high.astype(dtype), shape, dtype.type)


def _bounds(domain: Domain, dtype: np.dtype) -> tuple[Any, Any]:
    if isinstance(domain, Box):
        return domain.low, domain.high
    if isinstance(domain, Discrete):
        return domain.start, domain.start + domain.n - 1
    if dtype.kind in "iu":
        return np.iinfo(dtype).min, np.iinfo(dtype).max
    return (0, 1) if dtype.kind == "b" else (-np.inf, np.inf)
