"""Legal actions, drawn from a spec."""

from __future__ import annotations

from typing import Any

import numpy as np

from envherd.shm.specs import Box, Discrete, LeafSpec, MultiDiscrete, OneHot

_WIDEST = 1e3  # of a float leaf without bounds: far enough out for tests, and finite


def draw(leaf: LeafSpec, rng: np.random.Generator) -> Any:
    """Return a legal value of an action leaf, uniformly drawn."""
    domain = leaf.domain
    if isinstance(domain, Discrete):
        return rng.integers(domain.n, size=leaf.shape)
    if isinstance(domain, MultiDiscrete):
        return rng.integers(np.broadcast_to(np.asarray(domain.nvec), leaf.shape))
    if isinstance(domain, OneHot):
        return np.eye(domain.n, dtype=leaf.dtype)[rng.integers(domain.n, size=leaf.shape[:-1])]
    if leaf.is_side:
        raise ValueError(f"drawing an action failed: {leaf} has no uniform distribution. Give `actions`.")
    if np.dtype(leaf.dtype).kind in "iub":
        least, most = (domain.low, domain.high) if isinstance(domain, Box) else (np.array(0), np.array(1))
        return rng.integers(least, most, endpoint=True, size=leaf.shape).astype(leaf.dtype)
    low, high = (domain.low, domain.high) if isinstance(domain, Box) else (np.array(-1.0), np.array(1.0))
    low, high = np.maximum(low, -_WIDEST, dtype=np.float64), np.minimum(high, _WIDEST, dtype=np.float64)
    return rng.uniform(low, high, size=leaf.shape).astype(leaf.dtype)
