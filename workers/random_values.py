"""Draw legal values of a leaf uniformly, for the executor, probes and contract tests."""

from collections.abc import Callable
from typing import Any

import numpy as np

from envherd.shm.specs import (
    Binary,
    Box,
    Discrete,
    EnvSpec,
    Key,
    LeafSpec,
    MultiDiscrete,
    OneHot,
)

#: Width of the interval sampled where a Box has no bound on a side.
_UNBOUNDED_WIDTH = 2.0

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def draw(leaf: LeafSpec, rng: np.random.Generator) -> np.ndarray:
    """Return a legal value of an action leaf, uniformly drawn.

    Raises:
        ValueError: the leaf has no uniform distribution.
    """
    draw_values = drawer(leaf)
    if draw_values is None:
        raise ValueError(
            f"drawing an action failed: {leaf} has no uniform distribution. Give `actions`."
        )
    return draw_values(rng, leaf.shape)


def draw_masked(
    rng: np.random.Generator,
    mask: np.ndarray,
    leaf: LeafSpec,
) -> np.ndarray:
    """Return indices `[...]` drawn uniformly from those that a mask `[..., n]` allows; 0 if it allows none."""
    order = np.where(mask.astype(bool), rng.random(mask.shape), -1.0)
    return np.asarray(order.argmax(-1), leaf.dtype)


def mask_key(spec: EnvSpec, leaf: LeafSpec) -> Key | None:
    """Return the key of an action's mask, if the env observes one of the right shape."""
    if not isinstance(leaf.domain, Discrete) or leaf.key[-1] != "action":
        return None
    key = (*leaf.key[:-1], "action_mask")
    shape = (*leaf.shape, leaf.domain.n)
    return (
        key
        if any(seen.key == key and seen.shape == shape for seen in spec.observation)
        else None
    )


def drawer(leaf: LeafSpec) -> Draw | None:
    """Return a function that draws legal values of a leaf: `draw(rng, shape) -> array [*shape]`.

    None for a leaf without a fixed shape, which has no uniform distribution.
    """
    dtype = np.dtype(leaf.dtype) if leaf.dtype else np.dtype(object)
    domain = leaf.domain
    if isinstance(domain, Discrete):
        return lambda rng, shape: rng.integers(0, domain.n, shape, dtype=dtype)
    if isinstance(domain, MultiDiscrete):
        nvec = np.asarray(domain.nvec)
        # A copy: for uint64, numpy reads a broadcast array of bounds in another order than it writes the values.
        return lambda rng, shape: rng.integers(
            0,
            np.broadcast_to(nvec, shape).copy(),
            dtype=dtype,
        )
    if isinstance(domain, Binary):
        return lambda rng, shape: rng.integers(0, 2, shape).astype(dtype)
    if isinstance(domain, OneHot):
        return lambda rng, shape: np.eye(domain.n, dtype=dtype)[
            rng.integers(0, domain.n, shape[:-1])
        ]
    if leaf.is_side:
        return None
    if isinstance(domain, Box):
        return _box_drawer(domain, dtype)
    return lambda rng, shape: rng.uniform(-1.0, 1.0, shape).astype(dtype)


def _box_drawer(domain: Box, dtype: np.dtype) -> Draw:
    if dtype.kind in "iu":
        return _integer_drawer(domain, dtype)
    low = np.asarray(domain.low, np.float64)
    high = np.asarray(domain.high, np.float64)
    has_low = np.isfinite(low)
    has_high = np.isfinite(high)
    safe_low: Any = np.where(
        has_low,
        low,
        np.where(has_high, high - _UNBOUNDED_WIDTH, -_UNBOUNDED_WIDTH / 2),
    )
    safe_high: Any = np.where(
        has_high,
        high,
        np.where(has_low, low + _UNBOUNDED_WIDTH, _UNBOUNDED_WIDTH / 2),
    )
    low_cast = safe_low.astype(dtype)
    high_cast = safe_high.astype(dtype)
    # Numpy accepts no interval wider than the largest float.
    with np.errstate(over="ignore"):
        scale = 1 if np.isfinite(safe_high - safe_low).all() else 2
    low = safe_low / scale
    high = safe_high / scale
    return lambda rng, shape: np.clip(
        (scale * rng.uniform(low, high, shape)).astype(dtype),
        low_cast,
        high_cast,
    )


def _integer_drawer(domain: Box, dtype: np.dtype) -> Draw:
    """Return the drawer of a Box of integers, exact up to the ends of a wide dtype."""
    wide = np.dtype(np.uint64 if dtype == np.uint64 else np.int64)
    low, high = np.broadcast_arrays(domain.low, domain.high)
    if low.dtype.kind == "f" or high.dtype.kind == "f":  # perhaps without a bound
        bounds = np.array(
            [
                _integer_bounds(*ends, np.iinfo(dtype))
                for ends in zip(low.flat, high.flat, strict=True)
            ],
            wide,
        ).reshape(-1, 2)
        low = bounds[:, 0].reshape(low.shape)
        high = bounds[:, 1].reshape(high.shape)
    lowest = low.astype(wide)
    highest = high.astype(wide)
    return lambda rng, shape: rng.integers(
        lowest,
        highest,
        shape,
        dtype=wide.type,
        endpoint=True,
    ).astype(dtype)


def _integer_bounds(low: Any, high: Any, limits: Any) -> tuple[int, int]:
    """Return bounds as Python integers; an infinite one is put `_UNBOUNDED_WIDTH` from the other, or from 0."""
    width = int(_UNBOUNDED_WIDTH)
    below = int(high) - width if np.isfinite(high) else -width // 2
    first = int(low) if np.isfinite(low) else below
    last = int(high) if np.isfinite(high) else first + width
    return max(first, limits.min), min(last, limits.max)
