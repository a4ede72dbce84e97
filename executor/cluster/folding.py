"""Rollouts cross with every observation once: what a root has in common with the `next` before it is sent once.

`next` at one step and the root of the step after are the same but where an env was reset in between, and after the last
step. So of such a pair the root crosses whole and of `next` only the rows that differ. Whether they are the same is
looked at, byte for byte, and never concluded from flags: a policy may have written to the roots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from envherd.shm.specs import Key

#: Bytes of a row from which on it is worth the look, and share of rows that differ from which on it is not.
_LEAST_BYTES, _MOST_DIFFERENT = 64, 0.5

Leaves = dict[Key, np.ndarray]


class Rest(NamedTuple):
    """What a `next` leaf says that the root after it does not.

    Attributes:
        rows: int64 `[m]`, places in `[n * T]`: of steps whose `next` is not the root after them.
        values: `[m, ...]`.
    """

    rows: np.ndarray
    values: np.ndarray


def fold(leaves: Leaves) -> tuple[Leaves, dict[Key, Rest]]:
    """Take out the `next` leaves that mostly repeat a root.

    Args:
        leaves: each `[n, T, ...]`.

    Returns:
        The leaves that cross whole (the same arrays), and what is left of the others.
    """
    kept, folded = dict(leaves), {}
    for key, after in leaves.items():
        root = leaves.get(key[1:]) if key[0] == "next" else None
        if root is None or (root.shape, root.dtype) != (after.shape, after.dtype):
            continue
        num_rows = after.shape[0] * after.shape[1]
        if not num_rows or after.nbytes < _LEAST_BYTES * num_rows or after.dtype.hasobject:
            continue
        rows = _different(root, after)
        if len(rows) < _MOST_DIFFERENT * num_rows:
            folded[key] = Rest(rows, after.reshape(num_rows, *after.shape[2:])[rows])
            del kept[key]
    return kept, folded


def _different(root: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return the places in `[n * T]` whose `next` is not the root of the step after, and the last steps'."""
    num_envs, num_steps = after.shape[:2]
    differ = np.ones((num_envs, num_steps), bool)
    for env in range(num_envs):  # one by one: what is made on the way is as large as what is compared
        ours, theirs = (np.ascontiguousarray(one[env]).reshape(num_steps, -1).view(np.uint8) for one in (after, root))
        differ[env, :-1] = (ours[:-1] != theirs[1:]).any(-1)
    return np.flatnonzero(differ)


def unfolded(kept: Mapping[Key, np.ndarray], folded: Mapping[Key, Rest], key: Key) -> np.ndarray:
    """Return a leaf `[n, T, ...]`: as it crossed, or put together again in fresh memory."""
    if key in kept:
        return kept[key]
    root, rest = kept[key[1:]], folded[key]
    whole = np.empty_like(root)
    whole[:, :-1] = root[:, 1:]
    whole.reshape(-1, *whole.shape[2:])[rest.rows] = rest.values
    return whole
