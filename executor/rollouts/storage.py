"""Rollout storages: memory `[N, T, ...]` that workers write to directly, lent to callers and reused.

The storage of a returned rollout belongs to the caller as long as any of its tensors lives. Then it is reused, which
saves the page faults of fresh memory (94 us against 6 us for a batch of 8 images of 84x84x4). Workers keep the latest
`_MAX_ATTACHED` storages mapped, used or free. Older ones belong only to the caller, so a program that keeps all its
rollouts uses up only memory, and no descriptors.

Guarantees: a storage whose tensors a forked process may hold is never reused. (It stays shared memory: each process
sees the other's changes in place.) The last tensor may be freed in any thread, at any instant. After an interrupt at
any line, no storage is in use twice, and the next `lend` completes what was broken off.
Assumes: `lend`, `find` and `end_rollout` are called by one thread at a time; forks are made by `os.fork`.
"""

import itertools
import weakref
from collections.abc import Callable

import numpy as np
import torch
from tensordict import TensorDictBase

from envherd.executor.batches.fast_tensordict import as_tensor
from envherd.executor.pools.base import Pool
from envherd.shm.platforms import register_at_fork
from envherd.shm.slab import Storage, StoragePlan, plan_storage

_MAX_ATTACHED = 4

#: Incremented before and after each fork of this process; identifies storages that were lent before a fork.
_num_forks = 0


def _count_fork() -> None:
    global _num_forks  # noqa: PLW0603  # hooks are of the process, as forks are
    _num_forks += 1


register_at_fork(before=_count_fork, after_in_parent=_count_fork)


class Lease:
    """One storage that workers map, in use by one rollout or by the caller, or free.

    Attributes:
        target: its number in commands.
        number: of its latest use; numbers increase.
        lent_at: `_num_forks` at that time.
        address: of its `next/done` of group 0, by which an `out` is recognised.
        memory: returns the bytes of its memory, a new VIEW each time; None until workers map it.
        is_leaving: it must not be used again, because workers may have forgotten it.
        storage: its arrays.
        tensors: per group, name -> tensor `[n, T, ...]` over the same memory.
        roots: per group, T tuples of the root's leaves `[n, ...]` (VIEWS), in the order of `root_leaves`.
    """

    number = lent_at = address = 0
    is_leaving = False
    # The buffer of its latest use.
    _in_use: Callable[[], np.ndarray | None] = staticmethod(lambda: None)

    def __init__(self, target: int, num_columns: int, plan: StoragePlan) -> None:
        self.target = target
        self.num_columns = num_columns
        self.plan = plan
        self.memory: Callable[[], np.ndarray] | None = None

    def lend(self, number: int) -> None:
        """Open it for a new use, which ends when the last of the tensors is freed."""
        self._in_use = weakref.ref(self.open())
        self.number = number
        self.lent_at = _num_forks

    def open(self) -> np.ndarray:
        """Create the arrays; return the buffer, which is freed once they are unused."""
        assert self.memory is not None
        buffer = self.memory()
        self.storage = Storage(self.plan, buffer)
        self.tensors = [
            {n: as_tensor(a) for n, a in group.items()}
            for group in self.storage.columns
        ]
        self.address = self.tensors[0]["next", "done"].data_ptr()
        self.roots = [
            list(
                zip(
                    *(t.unbind(1) for n, t in group.items() if n[0] == "root"),
                    strict=True,
                )
            )
            for group in self.tensors
        ]
        return buffer

    def shut(self) -> None:
        """Drop the arrays; tensors over them keep their memory."""
        for name in ("storage", "tensors", "roots"):
            vars(self).pop(name, None)

    def holds(self, out: TensorDictBase) -> bool:
        """Return whether the leaves of a batch are exactly these tensors, all of them. The lease must be open."""
        for name, tensor in self.tensors[0].items():
            # A batch has the root's leaves and the inputs without their section.
            held = out.get(name if name[0] == "next" else name[1:], None)
            if (
                not isinstance(held, torch.Tensor)
                or held.shape != tensor.shape
                or held.stride() != tensor.stride()
                or held.data_ptr() != tensor.data_ptr()
            ):
                return False
        return len(self.tensors) == 1

    @property
    def is_open(self) -> bool:
        """Whether a rollout is using it."""
        return hasattr(self, "roots")

    @property
    def is_free(self) -> bool:
        """Whether none of its tensors lives."""
        return self._in_use() is None


class StorageShelf:
    """Creates, lends and reuses storages for one pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._targets = itertools.count(1)
        self._numbers = itertools.count(1)
        self._leases: list[Lease] = []

    def lend(self, num_columns: int) -> Lease:
        """Return an open storage of `num_columns` columns, used before if one is free."""
        for broken_off in [one for one in self._leases if one.is_open]:
            self.end_rollout(broken_off)
        for lease in list(self._leases):
            if lease.is_leaving or (lease.is_free and lease.lent_at != _num_forks):
                self._drop(lease)
        fitting = (
            one
            for one in self._leases
            if one.is_free and one.num_columns == num_columns
        )
        lease = next(fitting, None) or self._make(num_columns)
        lease.lend(next(self._numbers))
        return lease

    def find(self, out: TensorDictBase | None, num_columns: int) -> Lease | None:
        """Return the storage of `out`; None unless it is a whole rollout of this executor with `num_columns`."""
        done = None
        if out is not None and out.batch_size[1] == num_columns:
            done = out.get(("next", "done"), None)
        for lease in self._leases:
            if lease.is_free or lease.is_leaving or not isinstance(done, torch.Tensor):
                continue
            if lease.address == done.data_ptr():
                lease.open()
                if lease.holds(out):
                    return lease
                lease.shut()
        return None

    def end_rollout(self, lease: Lease) -> None:
        """End a rollout: from now on only the caller's tensors keep the storage."""
        # Such a pool would keep the memory until it closes.
        if self._pool.holds_storages:
            self._drop(lease)
        lease.shut()

    def _make(self, num_columns: int) -> Lease:
        """Create a storage; workers forget the oldest ones, free ones first."""
        while len(self._leases) >= _MAX_ATTACHED:
            self._drop(min(self._leases, key=lambda one: (not one.is_free, one.number)))
        lease = Lease(
            next(self._targets),
            num_columns,
            plan_storage(self._pool.plan, num_columns),
        )
        # Until all workers map it: after an interrupt, `lend` drops it.
        lease.is_leaving = True
        self._leases.append(lease)
        lease.memory = self._pool.attach_storage(lease.target, lease.plan)
        lease.lent_at = _num_forks
        # Now that all workers map it, it may be lent.
        lease.is_leaving = False
        return lease

    def _drop(self, lease: Lease) -> None:
        """Make workers forget a storage."""
        # Before workers forget it: after an interrupt, `lend` drops it again.
        lease.is_leaving = True
        self._pool.detach_storage(lease.target)
        if lease in self._leases:
            self._leases.remove(lease)
