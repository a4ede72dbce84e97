"""Shared by the adapter tests: store values like a worker, and draw actions from a spec."""

from typing import Any

import numpy as np

from envherd.shm.specs import Binary, Box, Discrete, Key, LeafSpec, MultiDiscrete
from envherd.workers.writers import writer_for


def stored(leaves: tuple[LeafSpec, ...], values: list[Any]) -> dict[Key, Any]:
    """Return `{key: array or side value}` after the worker's own writers have checked and copied the values."""
    assert len(values) == len(leaves)
    rows = {}
    for leaf, value in zip(leaves, values, strict=True):
        if leaf.is_side:
            rows[leaf.key] = value
            continue
        column = np.zeros((1, *leaf.shape), leaf.dtype)
        writer_for(leaf, column)(0, value)
        rows[leaf.key] = column[0]
    return rows


def drawn(leaf: LeafSpec, rng: np.random.Generator) -> Any:
    """Return a legal action for a leaf, as the worker hands it to an adapter."""
    domain = leaf.domain
    if isinstance(domain, Discrete):
        return int(rng.integers(domain.n))
    if isinstance(domain, MultiDiscrete):
        return rng.integers(np.asarray(domain.nvec)).astype(leaf.dtype)
    if isinstance(domain, Binary):
        return rng.integers(2, size=leaf.shape).astype(leaf.dtype)
    low, high = (domain.low, domain.high) if isinstance(domain, Box) else (-1, 1)
    if np.dtype(leaf.dtype).kind in "iu":
        return rng.integers(low, high, endpoint=True, size=leaf.shape).astype(
            leaf.dtype
        )
    unit = rng.uniform(-1, 1, size=leaf.shape)
    is_bounded = np.isfinite(low) & np.isfinite(high)
    with np.errstate(invalid="ignore"):
        spread = np.where(
            is_bounded, low + (unit + 1) / 2 * (np.asarray(high) - low), unit
        )
    return spread.astype(leaf.dtype)
