"""Send each observation of a rollout once, although it is in `next` and in the root after it.

`next` of a step and the root of the following step are equal, except after resets and after the last step. So the root
is sent whole, and of `next` only the rows that differ. They are compared byte for byte, never inferred from flags,
because a policy may have written to the roots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from envherd.shm.specs import Key

#: Least size of a row in bytes for the comparison to pay, and largest share of differing rows.
_LEAST_BYTES, _MOST_DIFFERENT = 64, 0.5

Leaves = dict[Key, np.ndarray]


class Rest(NamedTuple):
    """The rows of a `next` leaf that differ from the root after it.

    Attributes:
        rows: int64 `[m]`, their indices in `[n * T]`.
        values: `[m, ...]`.
    """

    rows: np.ndarray
    values: np.ndarray


def fold(leaves: Leaves) -> tuple[Leaves, dict[Key, Rest]]:
    """Separate the `next` leaves that mostly repeat a root.

    Args:
        leaves: each `[n, T, ...]`.

    Returns:
        The leaves to send whole (the same arrays), and the differing rows of the others.
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
    """Return the indices in `[n * T]` whose `next` differs from the following root, and those of the last steps."""
    num_envs, num_steps = after.shape[:2]
    differ = np.ones((num_envs, num_steps), bool)
    for env in range(num_envs):  # env by env, because temporaries are as large as the compared arrays
        ours, theirs = (np.ascontiguousarray(one[env]).reshape(num_steps, -1).view(np.uint8) for one in (after, root))
        differ[env, :-1] = (ours[:-1] != theirs[1:]).any(-1)
    return np.flatnonzero(differ)


def unfolded(kept: Mapping[Key, np.ndarray], folded: Mapping[Key, Rest], key: Key) -> np.ndarray:
    """Return a leaf `[n, T, ...]`: as received, or rebuilt in fresh memory."""
    if key in kept:
        return kept[key]
    root, rest = kept[key[1:]], folded[key]
    whole = np.empty_like(root)
    whole[:, :-1] = root[:, 1:]
    whole.reshape(-1, *whole.shape[2:])[rest.rows] = rest.values
    return whole
