"""Batches as they cross between driver and hosts: arrays by key, if they hold nothing but tensors.

Guarantees: received arrays are only read (they may be views of a shared object store).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_leaf_nontensor

from envherd.executor.batches.hand_out import GroupBatch
from envherd.shm.specs import Key

Leaves = Mapping[Key, np.ndarray]


@dataclass(frozen=True, eq=False)
class Packed:
    """A batch `[k, ...]`.

    Attributes:
        leaves: key -> array; None if the batch holds anything but tensors, or envs of several kinds.
        td: the batch itself, if there are no `leaves`.
    """

    leaves: Leaves | None
    td: TensorDictBase | None = None

    def batch(self, num_rows: int) -> TensorDictBase:
        """Return the batch, in its own memory."""
        if self.leaves is None:
            assert self.td is not None
            return self.td
        td = TensorDict({}, [num_rows])
        for key, value in self.leaves.items():
            td.set(key, torch.from_numpy(value.copy()))
        return td


def pack(td: TensorDictBase, keys: Sequence[Key] | None = None) -> Packed:
    """Return a batch as it crosses (VIEWS of its tensors).

    Args:
        td: the batch, on the CPU.
        keys: of its leaves, which are tensors; None to look for them.
    """
    if keys is None:
        if type(td) is not TensorDict:
            return Packed(None, td)
        found = td.keys(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)
        keys = [key if isinstance(key, tuple) else (key,) for key in found]
    values = [td.get(key) for key in keys]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return Packed(None, td)
    return Packed({key: value.numpy() for key, value in zip(keys, values, strict=True)})


class Rows:
    """The latest row of each env, where it was received: nothing is copied before a batch is made.

    Args:
        section: "next" or "root".
        batches: of each group of equal envs.
        group_of: int `[N]`, the group of each env.
    """

    def __init__(self, section: str, batches: Sequence[GroupBatch], group_of: np.ndarray) -> None:
        self._section, self._batches, self._group_of = section, batches, group_of
        self._packages = np.empty(len(group_of), object)
        self._rows = np.zeros(len(group_of), np.int64)
        self._is_plain = len(batches) == 1 and not batches[0].side_keys
        self._keys = keys_of(batches[0], section)

    def like(self) -> Rows:
        """Return another one for the same envs, without rows."""
        return Rows(self._section, self._batches, self._group_of)

    def put(self, env_ids: np.ndarray, package: Packed | None) -> None:
        """Note that the rows of some envs, in this order, are a package."""
        if package is not None:
            self._packages[env_ids] = package
            self._rows[env_ids] = np.arange(len(env_ids))

    def take_over(self, env_ids: np.ndarray, other: Rows) -> None:
        """Note that the rows of some envs are those noted in another one."""
        self._packages[env_ids], self._rows[env_ids] = other._packages[env_ids], other._rows[env_ids]

    def batch(self, env_ids: np.ndarray) -> TensorDictBase:
        """Return the rows of some envs as a batch `[k]`, in its own memory."""
        if not self._is_plain:
            rows = [self._row(env_id) for env_id in env_ids.tolist()]
            is_one_kind = len(self._batches) == 1
            return torch.stack(rows, 0) if is_one_kind else LazyStackedTensorDict(*rows, stack_dim=0)
        arrays = self.arrays(env_ids)
        shell = self._batches[0].shell(self._section, (len(env_ids),))
        return shell.build([torch.from_numpy(arrays[key]) for key in self._keys])

    def arrays(self, env_ids: np.ndarray) -> dict[Key, np.ndarray]:
        """Return the leaves of some rows, fresh `[k, ...]`, of envs of one kind."""
        members: dict[int, list[int]] = {}
        packages = self._packages[env_ids].tolist()
        for position, package in enumerate(packages):
            members.setdefault(id(package), []).append(position)
        parts = []
        for positions in members.values():
            at = np.array(positions)
            parts.append((packages[positions[0]].leaves, _span(at), _span(self._rows[env_ids[at]])))
        arrays = {}
        for key in self._keys:
            some = packages[0].leaves[key] if packages else np.zeros((0, 1))
            arrays[key] = whole = np.empty((len(env_ids), *some.shape[1:]), some.dtype)
            for leaves, to, rows in parts:
                whole[to] = leaves[key][rows]
        return arrays

    def _row(self, env_id: int) -> TensorDictBase:
        """Return one row, in its own memory."""
        package, row = self._packages[env_id], int(self._rows[env_id])
        batch = self._batches[self._group_of[env_id]]
        if package.leaves is not None:
            values = [package.leaves[key][row : row + 1].copy() for key in keys_of(batch, self._section)]
            return batch.shell(self._section, (1,)).build([torch.from_numpy(value) for value in values])[0]
        td: TensorDictBase = package.td[row]
        if self._section == "root":
            td = td.select(*(leaf.key for leaf in (*batch.spec.observation, *batch.spec.done)))
        return td.clone()


def keys_of(batch: GroupBatch, section: str) -> list[Key]:
    """Return the keys of a section's leaves that are tensors."""
    if section == "root":
        return batch.root_keys
    return [*batch.next_keys, ("interrupted",)] if batch.has_interrupted else batch.next_keys


def _span(ids: np.ndarray) -> slice | np.ndarray:
    """Return ascending ids as a slice if they have no gap."""
    first, count = int(ids[0]), len(ids)
    return slice(first, first + count) if (ids == np.arange(first, first + count)).all() else ids


# ---- rollouts: `next` of a step and the root of the following step are equal, except at ends ---------------

#: Least size of a row in bytes for the comparison to pay, and largest share of differing rows.
_LEAST_BYTES, _MOST_DIFFERENT = 64, 0.5


class Rest(NamedTuple):
    """The rows of a `next` leaf that differ from the root after it.

    Attributes:
        rows: int64 `[m]`, their indices in `[n * T]`.
        values: `[m, ...]`.
    """

    rows: np.ndarray
    values: np.ndarray


def fold(leaves: Leaves) -> tuple[dict[Key, np.ndarray], dict[Key, Rest]]:
    """Separate the `next` leaves that mostly repeat a root, so that each observation crosses once.

    They are compared byte for byte, never inferred from flags, because a policy may have written to the roots.

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
        if not num_rows or after.nbytes < _LEAST_BYTES * num_rows:
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


def unfolded(kept: Leaves, folded: Mapping[Key, Rest], key: Key) -> np.ndarray:
    """Return a leaf `[n, T, ...]`: as received, or rebuilt in fresh memory."""
    if key in kept:
        return kept[key]
    root, rest = kept[key[1:]], folded[key]
    whole = np.empty_like(root)
    whole[:, :-1] = root[:, 1:]
    whole.reshape(-1, *whole.shape[2:])[rest.rows] = rest.values
    return whole
