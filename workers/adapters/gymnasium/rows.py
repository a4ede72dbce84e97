"""Spaces of envs that are themselves a batch: the counterpart, for n rows, of `adapters/gymnasium/spaces.py`.

A leaf of a row's shape `s` becomes one of shape `(n, *s)`, with the same domain for each row. Keys are those of a
single env. Values without a fixed shape are lists of n.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import spaces

from envherd.shm.specs import Key, MultiDiscrete
from envherd.workers.adapters.common.tree import Convert, Leaf
from envherd.workers.adapters.gymnasium.spaces import (
    MakeLeaf,
    Space,
    action_leaf,
    from_indices,
    observation_leaf,
)


def observations_of(num_rows: int) -> MakeLeaf:
    """Return a function that describes the observations of `num_rows` rows, for `observation_tree`."""

    def make_leaf(space: Space, key: Key) -> Leaf:
        row = observation_leaf(space, key)
        if row.spec.is_side:
            return Leaf(row.spec, take=_for_each(row.take))
        # Of all spaces, only a Box of shape () is stored differently.
        take: Convert | None = (
            None if row.take is None else lambda value: np.asarray(value)[:, np.newaxis]
        )
        return Leaf(_of_rows(row, num_rows), take=take)

    return make_leaf


def actions_of(num_rows: int) -> MakeLeaf:
    """Return a function that describes the actions of `num_rows` rows, for `tree_below`."""

    def make_leaf(space: Space, key: Key) -> Leaf:
        row = action_leaf(space, key)
        if row.spec.is_side:
            each = _for_each(row.give)
            return Leaf(row.spec, give=lambda values: tuple(each(values)))
        if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
            return Leaf(_of_rows(row, num_rows), give=from_indices(space))
        return Leaf(
            _of_rows(row, num_rows),
            give=None if row.give is None else lambda value: value[:, 0],
        )

    return make_leaf


def mosaic(frames: Any) -> Any:
    """Return pictures of the same size as one, uint8 `[H, W, 3]`, in a grid as square as possible."""
    pictures = [np.asarray(frame) for frame in frames if frame is not None]
    if not pictures:
        return None
    num_columns = math.ceil(math.sqrt(len(pictures)))
    num_lines = math.ceil(len(pictures) / num_columns)
    pictures += [np.zeros_like(pictures[0])] * (num_lines * num_columns - len(pictures))
    return np.vstack(
        [
            np.hstack(pictures[i * num_columns : (i + 1) * num_columns])
            for i in range(num_lines)
        ]
    )


def _of_rows(row: Leaf, num_rows: int) -> Any:
    domain = row.spec.domain
    if isinstance(domain, MultiDiscrete):
        domain = MultiDiscrete(
            (domain.nvec,) * num_rows,
            (domain.start,) * num_rows if domain.start else (),
        )
    return replace(row.spec, shape=(num_rows, *row.spec.shape), domain=domain)


def _for_each(convert: Convert | None) -> Convert:
    return (
        list
        if convert is None
        else (lambda values: [convert(value) for value in values])
    )
