"""Rollouts as they cross from hosts to the driver: arrays by key, and each observation once.

`next` of a step and the root of the following step are equal, except at ends. They are compared byte for byte, never
inferred from flags, because a policy may have written to the roots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_leaf_nontensor

from envherd.shm.specs import Key

#: Least size of a row in bytes for the comparison to pay, and largest share of differing rows.
_LEAST_BYTES, _MOST_DIFFERENT = 64, 0.5


@dataclass(frozen=True, eq=False)
class Folded:
    """A rollout `[n, T, *B]`.

    Attributes:
        leaves: key -> array `[n, T, ...]`.
        repeated: key of a `next` leaf that repeats a root -> rows that differ, int64 `[m]` of `[n * T]`, and their
            values `[m, ...]`.
        batch_size: of the rollout.
        td: the rollout itself, if it holds anything but tensors, or envs of several kinds; else None.
    """

    leaves: dict[Key, np.ndarray]
    repeated: dict[Key, tuple[np.ndarray, np.ndarray]]
    batch_size: tuple[int, ...]
    td: TensorDictBase | None = None

    @property
    def keys(self) -> list[Key]:
        """The keys of all leaves."""
        return [*self.leaves, *self.repeated]

    def leaf(self, key: Key) -> np.ndarray:
        """Return a leaf `[n, T, ...]`: as received, or rebuilt in fresh memory."""
        if key in self.leaves:
            return self.leaves[key]
        root, (rows, values) = self.leaves[key[1:]], self.repeated[key]
        whole = np.empty_like(root)
        whole[:, :-1] = root[:, 1:]
        whole.reshape(-1, *whole.shape[2:])[rows] = values
        return whole


def fold(td: TensorDictBase) -> Folded:
    """Return a rollout on the CPU as it crosses (VIEWS)."""
    shape = tuple(td.batch_size)
    if type(td) is not TensorDict:
        return Folded({}, {}, shape, td)
    found = {key: td.get(key) for key in td.keys(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)}
    if not all(isinstance(value, torch.Tensor) for value in found.values()):
        return Folded({}, {}, shape, td)
    leaves = {key if isinstance(key, tuple) else (key,): value.numpy() for key, value in found.items()}
    folded = Folded(leaves, {}, shape)
    for key, after in [*leaves.items()]:
        root = leaves.get(key[1:]) if key[0] == "next" else None
        if root is None or (root.shape, root.dtype) != (after.shape, after.dtype):
            continue
        num_rows = after.shape[0] * after.shape[1]
        if after.nbytes < _LEAST_BYTES * num_rows:
            continue
        rows = _different(root, after)
        if len(rows) < _MOST_DIFFERENT * num_rows:
            folded.repeated[key] = rows, after.reshape(num_rows, *after.shape[2:])[rows]
            del leaves[key]
    return folded


def _different(root: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return the indices in `[n * T]` whose `next` differs from the following root, and those of the last steps."""
    differ = np.ones(after.shape[:2], bool)
    for env in range(len(after)):  # env by env, because temporaries are as large as the compared arrays
        ours, theirs = (
            np.ascontiguousarray(one[env]).reshape(len(one[env]), -1).view(np.uint8) for one in (after, root)
        )
        differ[env, :-1] = (ours[:-1] != theirs[1:]).any(-1)
    return np.flatnonzero(differ)


def unfold(parts: Sequence[Folded]) -> TensorDictBase:
    """Return the rollouts of several hosts as one batch, in its own memory."""
    first = parts[0]
    if len(parts) == 1 and first.td is not None:
        return first.td
    if first.td is not None or any(part.td is not None or {*part.keys} != {*first.keys} for part in parts):
        rows = [row for part in parts for row in unfold([part]).unbind(0)]
        return LazyStackedTensorDict(*rows, stack_dim=0)
    data = TensorDict({}, (sum(part.batch_size[0] for part in parts), *first.batch_size[1:]))
    for key in first.keys:
        data.set(key, torch.from_numpy(np.concatenate([part.leaf(key) for part in parts])))
    data.refine_names(None, "time", ...)
    return data
