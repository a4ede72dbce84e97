"""Rollout storages: memory `[N, T, ...]` that workers write to directly, lent to callers and reused.

The storage of a returned rollout belongs to the caller as long as any of its tensors lives. Then it is reused, which
saves the page faults of fresh memory (94 us against 6 us for a batch of 8 images of 84x84x4). Workers keep the latest
`_MAX_ATTACHED` storages mapped, used or free. Older ones belong only to the caller, so a program that keeps all its
rollouts uses up only memory, and no descriptors.

Guarantees: a storage whose tensors a forked process may hold is never reused. (It stays shared memory: each process
sees the other's changes in place.) The last tensor may be freed in any thread, at any instant.
Assumes: `lend`, `find` and `settle` are called by one thread at a time; forks are made by `os.fork`.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import torch
from tensordict import TensorDictBase

from envherd.shm.slab import Storage, StoragePlan, plan_storage

if TYPE_CHECKING:
    from envherd.executor.pools.base import Pool, StorageMemory

_MAX_ATTACHED = 4

#: Incremented before and after each fork of this process; identifies storages that were lent before a fork.
_num_forks = 0


def _count_fork() -> None:
    global _num_forks  # noqa: PLW0603  # hooks are of the process, as forks are
    _num_forks += 1


os.register_at_fork(before=_count_fork, after_in_parent=_count_fork)


class Lease:
    """One storage in use by one rollout.

    Attributes:
        target: its number in commands.
        lent_at: `_num_forks` when it was lent.
        storage: its arrays.
        tensors: per group, name -> tensor `[n, T, ...]` over the same memory.
        roots: per group, T tuples of the root's leaves `[n, ...]` (VIEWS), in the order of `root_leaves`.
    """

    def __init__(self, target: int, num_columns: int, memory: StorageMemory, plan: StoragePlan) -> None:
        self.target = target
        self.num_columns = num_columns
        self.memory = memory
        self.plan = plan
        self.lent_at = 0

    def open(self) -> np.ndarray:
        """Create the arrays; return the buffer, which is freed once they are unused."""
        buffer: np.ndarray = self.memory.array()
        self.storage = Storage(self.plan, buffer)
        self.tensors = [{n: torch.from_numpy(a) for n, a in group.items()} for group in self.storage.columns]
        self.roots = [
            list(zip(*(t.unbind(1) for n, t in group.items() if n[0] == "root"), strict=True)) for group in self.tensors
        ]
        return buffer

    def shut(self) -> None:
        """Drop the arrays; tensors over them keep their memory."""
        for name in ("storage", "tensors", "roots"):
            vars(self).pop(name, None)

    def holds(self, out: TensorDictBase) -> bool:
        """Return whether the leaves of a batch are exactly these tensors, all of them. The lease must be open."""
        for name, tensor in self.tensors[0].items():
            held = out.get(name if name[0] == "next" else name[1:], None)
            if not isinstance(held, torch.Tensor) or held.shape != tensor.shape or held.stride() != tensor.stride():
                return False
            if held.data_ptr() != tensor.data_ptr():
                return False
        return len(self.tensors) == 1

    @property
    def is_open(self) -> bool:
        """Whether a rollout is using it."""
        return hasattr(self, "roots")

    @property
    def address(self) -> int:
        """The address of its `next/done` of group 0, by which an `out` is recognised."""
        return self.tensors[0]["next", "done"].data_ptr()


class StorageShelf:
    """Creates, lends and reuses storages for one pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._next_target = 1
        self._free: deque[Lease] = deque()
        self._lent: dict[int, Lease] = {}
        #: `(address, target)` of storages whose last tensor was freed: any thread appends, `lend` removes.
        self._returned: deque[tuple[int, int]] = deque()

    def lend(self, num_columns: int) -> Lease:
        """Return an open storage of `num_columns` columns, used before if one is free."""
        for broken_off in [one for one in self._lent.values() if one.is_open]:
            self.settle(broken_off)
        self._take_back()
        lease = next((one for one in self._free if one.num_columns == num_columns), None)
        if lease is not None:
            self._free.remove(lease)
        else:
            self._make_room()
            lease = self._make(num_columns)
        self._track(lease, lease.open())
        return lease

    def find(self, out: TensorDictBase) -> Lease | None:
        """Return the storage of `out`; None unless it is a whole rollout of this executor."""
        done = out.get(("next", "done"), None)
        lease = self._lent.get(done.data_ptr()) if isinstance(done, torch.Tensor) else None
        if lease is None:
            return None
        lease.open()
        if lease.holds(out):
            return lease
        lease.shut()
        return None

    def settle(self, lease: Lease) -> None:
        """End a rollout: from now on only the caller's tensors keep the storage."""
        if self._pool.holds_storages:  # until it closes
            self._pool.detach_storage(lease.target)
            self._lent.pop(lease.address, None)
        lease.shut()

    def _make(self, num_columns: int) -> Lease:
        plan = plan_storage(self._pool.plan, num_columns)
        target = self._next_target
        self._next_target += 1
        return Lease(target, num_columns, self._pool.attach_storage(target, plan), plan)

    def _track(self, lease: Lease, buffer: np.ndarray) -> None:
        address = lease.address
        self._lent[address], lease.lent_at = lease, _num_forks
        if not self._pool.holds_storages:
            weakref.finalize(buffer, self._returned.append, (address, lease.target)).atexit = False

    def _take_back(self) -> None:
        """Mark storages without live tensors as free; drop those that a forked process may hold."""
        while self._returned:
            address, target = self._returned[0]
            lease = self._lent.get(address)
            if lease is not None and lease.target == target:  # otherwise it belonged only to the caller
                if lease.lent_at == _num_forks:
                    self._free.append(lease)
                else:
                    self._pool.detach_storage(target)
                del self._lent[address]
            self._returned.popleft()

    def _make_room(self) -> None:
        """Make workers forget the oldest storages, free ones first."""
        while len(self._free) + len(self._lent) >= _MAX_ATTACHED:
            oldest = self._free.popleft() if self._free else self._lent.pop(next(iter(self._lent)))
            self._pool.detach_storage(oldest.target)
