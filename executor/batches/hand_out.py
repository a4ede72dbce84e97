"""Build TensorDicts from rows of the slab.

Guarantees: a copy, or a frame that is lent, is in memory that nothing else writes to; a view is valid until its frame
is used again (after `ExecutorOptions.ring_frames` steps). Knows nothing of workers; it reads arrays that are complete.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
)

from envherd.executor.batches.fast_tensordict import (
    Shell,
    as_tensor,
    outside_inference_mode,
)
from envherd.executor.batches.memory import (
    Leaves,
    Loans,
    ReusedMemory,
    StepMemory,
    Taken,
    memory_by_count,
    splitter,
)
from envherd.executor.batches.transfer import Mover, apart
from envherd.shm.slab import (
    GroupSlab,
    Place,
    fields_of,
    input_leaves,
    next_leaves,
    root_leaves,
)
from envherd.shm.specs import Key
from envherd.workers.protocol import Op

#: The members of a group among some envs.
Members = np.ndarray | slice


_move = outside_inference_mode(torch.Tensor.to)


class GroupBatch:
    """Hands out the rows of one group of equal envs.

    Args:
        slab: the group's arrays.
        num_frames: of the slab.
        device: of the batches; None or the CPU does not move them.
        has_interrupted: add an `interrupted` leaf to every `next`.
        mover: moves frames to the device; None on the CPU.
        loans: frames that are handed out themselves; None copies all.

    Attributes:
        memory: for the `next` of a step, on the CPU.
        native: reads rows of the ring in C; None if Python must.
    """

    native: Any = None

    def __init__(
        self,
        slab: GroupSlab,
        num_frames: int,
        device: torch.device | None,
        *,
        has_interrupted: bool,
        mover: Mover | None = None,
        loans: Loans | None = None,
    ) -> None:
        self.slab = slab
        spec = slab.spec
        self.spec = spec
        self.num_rows = len(slab.plan.env_ids)
        self._all_rows = np.arange(self.num_rows)
        self.device = device
        self.is_on_cpu = device is None or device.type == "cpu"
        self.next_keys = [leaf.key for leaf in next_leaves(spec)]
        self.root_keys = [leaf.key for leaf in root_leaves(spec)]
        self.side_keys = {
            i: leaf.key for i, leaf in enumerate(spec.observation) if leaf.is_side
        }
        #: Root leaf i is the same array as next leaf `root_in_next[i]` when nothing was reset.
        self.root_in_next = [self.next_keys.index(key) for key in self.root_keys]
        self._fields = [f for f in slab.plan.frame if f.name[0] == "next"]
        self._split = splitter(self._fields, slab.plan.next_nbytes)
        self.memory = StepMemory(
            ReusedMemory(slab.plan.next_nbytes, self._split),
            loans,
        )
        self._mended_memory = ReusedMemory(slab.plan.next_nbytes, self._split)
        self._root_memory = memory_by_count(
            lambda count: fields_of("root", root_leaves(spec), (count,)),
            self.num_rows,
        )
        self.next_bytes = [slab.next_bytes(column) for column in range(num_frames)]
        self._mover = mover
        self._sources = [as_tensor(frame) for frame in self.next_bytes]
        self._sizes = np.diff(
            [*(f.offset for f in self._fields), slab.plan.next_nbytes]
        ).tolist()
        self._views = [
            [as_tensor(slab.columns[f.name][c]) for f in self._fields]
            for c in range(num_frames)
        ]
        self.next_arrays = [slab.columns["next", *key] for key in self.next_keys]
        self.root_arrays = [slab.columns["root", *key] for key in self.root_keys]
        self._shells: dict[tuple[str, tuple[int, ...]], Shell] = {}
        #: Section -> key -> index of the leaf.
        self._members = {
            "next": {key: i for i, key in enumerate(self.next_keys)},
            "root": {key: i for i, key in enumerate(self.root_keys)},
            "root over next": dict(zip(self.root_keys, self.root_in_next, strict=True)),
            "before": {
                key: i
                for i, key in enumerate(
                    [*self.root_keys, *(leaf.key for leaf in input_leaves(spec))]
                )
            },
            "nothing": {},
        }
        if has_interrupted:
            self._members["next"]["interrupted",] = len(self.next_keys)

    def shell(self, section: str, lead: tuple[int, ...]) -> Shell:
        """Return the nesting of a section for leading dimensions `lead`.

        Args:
            section: "next", "root", "before" (the leaves of a root, then inputs), "nothing", or "root over next": a
                root over the leaves of a `next`, for rows that were not reset.
            lead: `[n]`.
        """
        cached = self._shells.get((section, lead))
        if cached is None:
            cached = self._shells[section, lead] = Shell(
                self._members[section],
                dict(self.spec.groups),
                lead,
                self.spec.batch_shape,
                self.device,
            )
        return cached

    def next_views(self, column: int) -> Leaves:
        """Return the `next` leaves of a frame (VIEW)."""
        return self._views[column]

    def next_copies(self, column: int) -> Leaves:
        """Return copies of the `next` leaves of a frame, on the device; a frame that is lent is its own copy."""
        if self._mover is not None:
            return apart(
                self._mover.move(self._sources[column], column),
                self._sizes,
                self._views[0],
            )
        buffer, leaves = self.memory.take(column)
        # None of a frame that is lent.
        if buffer is not None:
            buffer[:] = self.next_bytes[column]
        return leaves

    def next_at(self, columns: np.ndarray, rows: np.ndarray) -> Leaves:
        """Return the `next` leaves of some rows, each from its own column: copies `[k, ...]`, on the device."""
        return self.to_tensors([array[columns, rows] for array in self.next_arrays])

    def present_roots(self, env_ids: np.ndarray) -> Leaves:
        """Return the present roots of envs, whose rows are in the ring: copies `[k, ...]`, on the CPU; by C."""
        memory, leaves = self._root_memory(len(env_ids)).take()
        is_read = self.native.roots(env_ids, memory)
        assert is_read
        return leaves

    def roots_after(
        self,
        leaves: Leaves,
        column: int,
        reset_rows: np.ndarray | None,
    ) -> Leaves:
        """Return the root leaves after a step: those of `next`, or of the reset for the rows that were reset.

        Without reset rows the leaves ARE those of `next`, as `step_mdp` shares them; with some, they are copies.
        """
        if reset_rows is not None and self.is_on_cpu:
            return self.mended_roots(column, reset_rows)
        roots = [leaves[index] for index in self.root_in_next]
        if reset_rows is None:
            return roots
        return [
            self._mend(leaf, array[column], reset_rows)
            for leaf, array in zip(roots, self.root_arrays, strict=True)
        ]

    def mended_roots(self, column: int, reset_rows: np.ndarray) -> Leaves:
        """Return the root leaves after a step with resets, copies on the CPU."""
        if self.native is not None:
            return self.present_roots(self._all_rows)
        buffer, leaves = self._mended_memory.take()
        buffer[:] = self.next_bytes[column]
        arrays = self._split(buffer)
        for index, array in zip(self.root_in_next, self.root_arrays, strict=True):
            arrays[index][reset_rows] = array[column][reset_rows]
        return [leaves[index] for index in self.root_in_next]

    @outside_inference_mode
    def _mend(
        self,
        leaf: torch.Tensor,
        roots: np.ndarray,
        rows: np.ndarray,
    ) -> torch.Tensor:
        mended = leaf.clone()
        mended[torch.from_numpy(rows).to(mended.device)] = torch.from_numpy(
            roots[rows]
        ).to(mended.device)
        return mended

    @outside_inference_mode
    def to_tensors(self, arrays: Sequence[np.ndarray]) -> Leaves:
        """Return arrays as tensors on the device (cpu: no copy)."""
        return self.to_device([*map(torch.from_numpy, arrays)])

    def to_device(self, tensors: Leaves) -> Leaves:
        """Return tensors of the CPU on the device (cpu: themselves)."""
        if self.is_on_cpu:
            return tensors
        return [_move(tensor, self.device) for tensor in tensors]


def add_side(
    td: TensorDictBase,
    keys: Mapping[int, Key],
    values: Mapping[int, Sequence[Any]],
    env_ids: Collection[int],
) -> None:
    """Put copies of side-channel leaves of some envs into their batch, as non-tensor data.

    Args:
        td: the batch.
        keys: by index of the leaf.
        values: env id -> one value for each index.
        env_ids: of the envs.
    """
    for index, key in keys.items():
        rows = [values[env_id][index] for env_id in env_ids]
        td.set(key, non_tensor(rows, td.batch_size))


def non_tensor(values: Any, shape: Sequence[int]) -> Any:
    """Return copies of nested lists of values as non-tensor data of a batch shape.

    An env of rows that was never reset has None in place of its list.
    """
    # A stack of nothing has no further axes.
    if not shape or 0 in shape:
        # A deep copy, because the executor hands the same values out again.
        return NonTensorData(copy.deepcopy(values), batch_size=shape)
    if values is None:
        values = [None] * shape[0]
    return NonTensorStack(*(non_tensor(value, shape[1:]) for value in values))


def stack_groups(
    tds: Sequence[TensorDictBase],
    places: Sequence[Place],
) -> TensorDictBase:
    """Return one batch in env order from one batch per group: itself if there is one group, else a lazy stack."""
    if len(tds) == 1 and [place.row for place in places] == list(range(len(places))):
        return tds[0]
    return LazyStackedTensorDict(
        *(tds[place.group][place.row] for place in places),
        stack_dim=0,
    )


# ---- step data ---------------------------------------------------------------------------------
# The batches of a step of all envs of one kind, compiled for these envs.

#: A batch, and the root after it; None without a root.
WithRoot = tuple[TensorDictBase, TensorDictBase | None]
#: The batches of a step, created before their memory is filled: the memory of `next`, or None for the frame's own; that
#: of `interrupted`, or None; the `next` batch; the root, or None. A plain tuple, because each step creates one.
Draft = tuple[np.ndarray | None, np.ndarray | None, TensorDict, TensorDict | None]


class StepBatches:
    """The batches of a step of all envs, which are one group: made while the workers step, filled afterwards.

    Args:
        batch: the group.
        next_shell: over the leaves of its `next`.
        root_over_next: over the same leaves, for a step after which no env was reset.
        root_shell: over the leaves of its root.
        is_copy: hand out copies of steps, not views of the ring.
        interrupted: the latest flags, bool `[N, *B, 1]` (VIEW); each `next` gets a copy. None for no such leaf.

    Attributes:
        draft: op -> `column -> draft`: creates the batches of a step before its rows exist; `finish` fills them.
    """

    def __init__(
        self,
        batch: GroupBatch,
        next_shell: Shell,
        root_over_next: Shell,
        root_shell: Shell,
        *,
        is_copy: bool,
        interrupted: np.ndarray | None = None,
    ) -> None:
        self._batch = batch
        self._build_next = next_shell.build
        self._build_over_next = root_over_next.build
        self._build_root = root_shell.build
        self._is_copy = is_copy
        self._interrupted = interrupted
        self.draft = {
            op: self._drafter(has_root=op == Op.STEP_RESET)
            for op in (Op.STEP, Op.STEP_RESET)
        }

    def _drafter(self, *, has_root: bool) -> Callable[[int], Draft]:
        """Return the function that drafts the batches of a step to a column, for `draft`."""
        # Names of the closure, because attributes take longer.
        build_next = self._build_next
        build_root = self._build_over_next
        take: Callable[[int], Taken] = self._take
        if self._is_copy:
            take = self._batch.memory.take
        interrupted = self._interrupted

        def draft(column: int) -> Draft:
            buffer, leaves = take(column)
            flags = None
            if interrupted is not None:
                flags = np.empty_like(interrupted)
                leaves = [*leaves, *self._batch.to_tensors([flags])]
            next_td = build_next(leaves)
            return buffer, flags, next_td, build_root(leaves) if has_root else None

        return draft

    def _take(self, column: int) -> Taken:
        """Return a column's leaves as views, in place of memory for copies."""
        return None, self._batch.next_views(column)

    def finish(
        self,
        draft: Draft,
        column: int,
        reset_ids: np.ndarray | None,
    ) -> WithRoot:
        """Return the `next` batch `[N]` of a step, and the root after it.

        Args:
            draft: of this step.
            column: of the ring.
            reset_ids: int64 `[k]`, envs that were reset after the step; None for none.

        Returns:
            Copies, or the frame that is lent, or views if the executor hands out views. The root shares the leaves of
            `next` unless an env was reset.
        """
        buffer, flags, next_td, root = draft
        if flags is not None:
            flags[...] = self._interrupted
        if buffer is not None:
            buffer[:] = self._batch.next_bytes[column]
        if reset_ids is not None and root is not None:
            root = self._build_root(self._batch.mended_roots(column, reset_ids))
        return next_td, root
