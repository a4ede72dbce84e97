"""Statistics of measured numbers: ratios within rounds, quartiles. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

#: Quantile levels that are kept of a distribution of batch times.
LEVELS = tuple(np.linspace(0.0, 1.0, 101).tolist())


class Quartiles(NamedTuple):
    """The median and the quartiles of some numbers."""

    low: float
    mid: float
    high: float


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return the quartiles of at least one number."""
    low, mid, high = np.quantile(np.asarray(values, float), (0.25, 0.5, 0.75)).tolist()
    return Quartiles(low, mid, high)


def per_round(
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    valid: Sequence[bool] | None = None,
) -> Quartiles | None:
    """Return the quartiles of `ours / theirs`, divided round by round.

    Args:
        ours: one number per round, in the order of the rounds.
        theirs: likewise.
        valid: rounds that count; all if not given.

    Returns:
        None if no round counts.
    """
    keep = [True] * len(ours) if valid is None else valid
    found = [
        one / other
        for one, other, kept in zip(ours, theirs, keep, strict=True)
        if kept and other > 0
    ]
    return quartiles(found) if found else None


def of_totals(
    ours: Sequence[tuple[float, float]],
    theirs: Sequence[tuple[float, float]],
    *,
    num_draws: int = 400,
) -> Quartiles | None:
    """Return the ratio of two rates over all rounds together, and its quartiles by bootstrap.

    For work that is unevenly spread (a reset in one slot of five), so that the median round has none of it.

    Args:
        ours: `(amount, seconds)` of each round.
        theirs: likewise.
        num_draws: number of bootstrap samples.
    """
    if not ours or not theirs:
        return None
    mine, other = np.asarray(ours, float), np.asarray(theirs, float)
    if mine[:, 0].sum() <= 0 or other[:, 0].sum() <= 0:
        return None
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(num_draws):
        a, b = (
            mine[rng.integers(len(mine), size=len(mine))],
            other[rng.integers(len(other), size=len(other))],
        )
        if a[:, 0].sum() > 0 and b[:, 0].sum() > 0:
            drawn.append(_rate(a) / _rate(b))
    spread = quartiles(drawn)
    return Quartiles(spread.low, _rate(mine) / _rate(other), spread.high)


def _rate(rounds: np.ndarray) -> float:
    amount, seconds = rounds.sum(axis=0)
    return float(amount / seconds)


def levels_of(values: Sequence[float]) -> list[float]:
    """Return the values at `LEVELS` of a distribution."""
    return np.quantile(np.asarray(values, float), LEVELS).tolist()


def merged_levels(many: Sequence[Sequence[float]]) -> list[float]:
    """Return `LEVELS` of several distributions together, each described by its own levels, with equal weights."""
    return levels_of(np.concatenate([np.asarray(one, float) for one in many]).tolist())
