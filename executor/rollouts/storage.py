"""Rollout storages: memory `[N, T, ...]` that workers write to, lent and reused; and rows of T contiguous steps.

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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from envherd.executor.batches.fast_tensordict import as_tensor, get_leaf
from envherd.executor.batches.transfer import as_array
from envherd.executor.pools.base import Pool
from envherd.executor.rollouts.policy_state import leaf_keys, short
from envherd.shm.platforms import register_at_fork
from envherd.shm.slab import Storage, StoragePlan, plan_storage
from envherd.shm.specs import Key

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


# ---- contiguous rows ---------------------------------------------------------------------------
# Rows of T contiguous steps, for envs that advance independently.


class _Target(NamedTuple):
    """Where a leaf of a batch is written.

    Attributes:
        key: of the leaf, as a policy would write it.
        flat: `[slots * T, ...]` (VIEW).
        dtype: of the leaf.
    """

    key: Any
    flat: np.ndarray
    dtype: torch.dtype


class ContiguousRows:
    """Rows of T steps of one env each: written step by step, and taken when full.

    Args:
        num_envs: N.
        num_steps: T.
        num_more: rows in addition to one per env; more are added when needed.
        flags: keys of the envs' done flags.
    """

    def __init__(
        self,
        num_envs: int,
        num_steps: int,
        num_more: int,
        flags: Sequence[Key],
    ) -> None:
        self.full: list[int] = []
        self._num_steps = num_steps
        self._slots = np.arange(num_envs)
        self._at = np.zeros(num_envs, np.int64)
        self._num_slots = num_envs + num_more
        self._flags = flags
        self._owners = np.arange(self._num_slots) % num_envs  # slot -> env
        # Whether the latest step that was taken has not ended its episode.
        self._is_open = np.zeros(num_envs, bool)
        self._free = list(range(num_envs, self._num_slots))
        self._leaves: dict[Key, torch.Tensor] = {}
        # Leaf names of the batches written last.
        self._names: dict[bool, tuple[str, ...]] = {False: (), True: ()}
        self._targets: dict[bool, list[_Target]] = {}
        self._nested: dict[bool, TensorDictBase] = {}  # how the leaves nest

    def write(
        self,
        env_ids: np.ndarray,
        td: TensorDictBase,
        *,
        is_next: bool,
        **numbers: Any,
    ) -> None:
        """Write entries of the present step of some envs: batch `[k]`, and int64 `[k]` (or one number) by name."""
        names = tuple(td.keys())
        if names != self._names[is_next]:
            self._targets[is_next] = [
                self._target(td, key, is_next=is_next) for key in leaf_keys(td)
            ]
            self._nested.setdefault(is_next, td[:1].exclude("next").copy().cpu())
            self._names[is_next] = names
        index = self._slots[env_ids] * self._num_steps + self._at[env_ids]
        for key, flat, dtype in self._targets[is_next]:
            value: torch.Tensor = get_leaf(td, key)
            array = as_array(value.cpu())
            # Numpy would cast and broadcast.
            if value.dtype is not dtype or array.shape[1:] != flat.shape[1:]:
                raise ValueError(
                    f"collect failed: expected {key!r} to stay {dtype} {list(flat.shape[1:])}, got {value.dtype} "
                    f"{list(array.shape[1:])}. Let the policy return the same dtype and shape in every call."
                )
            flat[index] = array
        for name, value in numbers.items():
            if (name,) not in self._leaves:
                self._leaves[(name,)] = as_tensor(
                    np.zeros((self._num_slots, self._num_steps), np.int64)
                )
            self._leaves[(name,)].numpy().reshape(-1)[index] = value

    def _target(
        self,
        td: TensorDictBase,
        key: Key,
        *,
        is_next: bool,
    ) -> _Target:
        """Return where a leaf of `td` is written."""
        value = td.get(key)
        name = key
        if is_next:
            name = ("next", *key)
        if name not in self._leaves:
            shape = (self._num_slots, self._num_steps, *value.shape[1:])
            # Numpy's zeros take no memory until they are written.
            blank = np.zeros(shape, as_array(value[:0].cpu()).dtype)
            self._leaves[name] = as_tensor(blank, value.dtype)
        leaf = self._leaves[name]
        return _Target(short(key), as_array(leaf.flatten(0, 1)), leaf.dtype)

    def advance(self, env_ids: np.ndarray) -> None:
        """Advance some envs to their next step; full rows are put aside."""
        self._at[env_ids] += 1
        over = (self._at == self._num_steps).nonzero()[0]
        if len(over):
            # Before their envs get other rows: after an interrupt, `repair` finds by it which envs need them.
            self.full += self._slots[over].tolist()
            self._begin_rows(over)

    def _begin_rows(self, env_ids: np.ndarray) -> None:
        # The caller has taken too few of the full rows.
        while len(self._free) < len(env_ids):
            self._add_rows()
        slots = [self._free.pop() for _ in env_ids]
        self._owners[slots] = env_ids
        self._at[env_ids] = 0
        self._slots[env_ids] = slots

    def repair(self) -> None:
        """Complete an `advance` that was interrupted at any line."""
        over = (self._at == self._num_steps).nonzero()[0]
        # Those that the broken-off call has not put aside yet.
        self.full += [
            slot for slot in self._slots[over].tolist() if slot not in self.full
        ]
        self._begin_rows(np.isin(self._slots, self.full).nonzero()[0])

    def cut(self, env_ids: np.ndarray) -> np.ndarray:
        """Mark the latest steps of some envs as truncated: the next step was lost, and another episode begins.

        Returns:
            Those of the envs whose latest step was taken before and has not ended its episode, int64 `[k]`.
        """
        # Rows under way last: they are later than full ones of the same env.
        kept = [*self.full, *self._slots[self._at > 0].tolist()]
        latest = {int(self._owners[slot]): slot for slot in kept}
        for env_id in env_ids.tolist():
            if env_id in latest:
                at = self._num_steps
                if latest[env_id] == self._slots[env_id]:
                    at = int(self._at[env_id])
                self._truncate(latest[env_id], at - 1)
        return np.array(
            [i for i in env_ids.tolist() if i not in latest and self._is_open[i]],
            np.int64,
        )

    def _truncate(self, slot: int, at: int) -> None:
        for key in self._flags:
            truncated = self._leaves.get(("next", *key[:-1], "truncated"))
            done = self._leaves.get(("next", *key[:-1], "done"))
            # Neither exists if an interrupt came before the first step was written.
            if key[-1] == "done" and done is not None:
                if truncated is not None:
                    # An episode that had ended by itself is not truncated.
                    truncated[slot, at] |= ~done[slot, at]
                done[slot, at] = True

    def stand_in(self, env_ids: np.ndarray, **numbers: int) -> None:
        """Complete the present steps of some envs, which were lost, as interrupted ones.

        Their `next` repeats the observation, with reward 0, and is truncated. Entries by name get numbers.
        """
        place = (
            torch.from_numpy(self._slots[env_ids]),
            torch.from_numpy(self._at[env_ids]),
        )
        for key, leaf in self._leaves.items():
            if key[0] == "next":
                # What only `next` has, such as the reward.
                leaf[place] = 0
                if key[1:] in self._leaves:
                    leaf[place] = self._leaves[key[1:]][place]
                if key[1:] in self._flags or key == ("next", "interrupted"):
                    leaf[place] = key[-1] != "terminated"
        for name, number in numbers.items():
            self._leaves[(name,)][place] = number

    def _add_rows(self) -> None:
        # The cached targets are views of the old leaves.
        self._names = {False: (), True: ()}
        for key, leaf in self._leaves.items():
            old = as_array(leaf)
            self._leaves[key] = as_tensor(
                np.concatenate([old, np.zeros_like(old)]),
                leaf.dtype,
            )
        self._owners = np.concatenate([self._owners, self._owners])
        self._num_slots *= 2
        self._free += range(self._num_slots // 2, self._num_slots)

    def drop(self, num_rows: int) -> None:
        """Remove the rows that were full first."""
        # One line: a handler that runs in between would find the rows in both lists, or in none.
        self.full, self._free = self.full[num_rows:], self._free + self.full[:num_rows]

    def first(self, num_rows: int) -> TensorDictBase:
        """Return the rows that were full first, a copy; they stay until they are dropped.

        Returns:
            Batch `[num_rows, T]`, or `[num_rows, T, *B]` if each env is a batch.
        """
        taken = self.full[:num_rows]
        each = self._nested[False].batch_size[1:]
        data = (
            self._nested[False]
            .copy()
            .set("next", self._nested[True].copy())
            .unsqueeze(1)
            .expand(num_rows, self._num_steps, *each)
            .clone(recurse=False)
        )
        for key, leaf in self._leaves.items():
            value = as_tensor(as_array(leaf)[taken], leaf.dtype)
            # Entries by name have one number for all of an env's batch.
            while value.ndim < data.ndim:
                value = value.unsqueeze(-1)
            data.set(
                key,
                value.expand(*data.batch_size, *value.shape[data.ndim :]).contiguous(),
            )
        done = as_array(self._leaves["next", "done"])[taken, -1].reshape(num_rows, -1)
        for slot, flags in zip(taken, done, strict=True):
            self._is_open[self._owners[slot]] = not flags.all()
        data.refine_names(None, "time", ...)
        return data
