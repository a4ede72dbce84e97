"""Build TensorDicts from rows of the slab.

Guarantees: a copy, or a frame that is lent, is in memory that nothing else writes to; a view is valid until its frame
is used again (after `ExecutorOptions.ring_frames` steps). Knows nothing of workers; it reads arrays that are complete.
"""

import copy
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

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
    LARGEST_RECORD,
    Leaves,
    Loans,
    ReusedMemory,
    StepMemory,
    Taken,
    splitter,
)
from envherd.executor.batches.transfer import Mover, apart
from envherd.shm.slab import GroupSlab, Place, next_leaves, root_leaves
from envherd.shm.specs import Key
from envherd.workers.protocol import Op

#: Number of rows up to which each row of a leaf is copied as bytes (0.2 us; indexing by an array takes 2 us a leaf).
_FEW_ROWS = 8
#: The members of a group among some envs.
Members = np.ndarray | slice


_move = outside_inference_mode(torch.Tensor.to)


class _RootPlace(NamedTuple):
    """Where the bytes of a root leaf are.

    Attributes:
        in_next: its offset in a `next`.
        in_slab: its offset in the slab, in the first frame.
        stride: bytes of a frame.
        nbytes: of a row.
    """

    in_next: int
    in_slab: int
    stride: int
    nbytes: int


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
    """

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
        self.device = device
        self.is_on_cpu = device is None or device.type == "cpu"
        self.next_keys = [leaf.key for leaf in next_leaves(spec)]
        self.root_keys = [leaf.key for leaf in root_leaves(spec)]
        self.side_keys = {
            i: leaf.key for i, leaf in enumerate(spec.observation) if leaf.is_side
        }
        #: Root leaf i is the same array as next leaf `root_in_next[i]` when nothing was reset.
        self.root_in_next = [self.next_keys.index(key) for key in self.root_keys]
        self._done_in_next = self.next_keys.index(("done",))
        self._fields = [f for f in slab.plan.frame if f.name[0] == "next"]
        self._split = splitter(self._fields, slab.plan.next_nbytes)
        self.memory = StepMemory(
            ReusedMemory(slab.plan.next_nbytes, self._split),
            loans,
        )
        self._root_memory = ReusedMemory(slab.plan.next_nbytes, self._split)
        self._bytes = slab.buffer.data
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
        self._nexts = Gatherer(slab.buffer, [self.next_arrays])
        self._roots = Gatherer(
            slab.buffer,
            [[self.next_arrays[i] for i in self.root_in_next], self.root_arrays],
        )
        self._shells: dict[tuple[str, tuple[int, ...]], Shell] = {}
        #: Section -> key -> index of the leaf.
        self._members = {
            "next": {key: i for i, key in enumerate(self.next_keys)},
            "root": {key: i for i, key in enumerate(self.root_keys)},
            "root over next": dict(zip(self.root_keys, self.root_in_next, strict=True)),
        }
        if has_interrupted:
            self._members["next"]["interrupted",] = len(self.next_keys)

    def shell(self, section: str, lead: tuple[int, ...]) -> Shell:
        """Return the nesting of a section for leading dimensions `lead`.

        Args:
            section: "next", "root", or "root over next": a root over the leaves of a `next`, for rows that were not
                reset.
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

    def gather_next(self, columns: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
        """Return the `next` leaves of some rows, each from its own column, as fresh arrays `[k, ...]`."""
        return self._nexts.gather(self._nexts.places(columns, rows))

    def next_at(
        self,
        columns: np.ndarray,
        rows: np.ndarray,
    ) -> tuple[TensorDict, Leaves, np.ndarray]:
        """Return the `next` of some rows, each from its own column; its leaves; and the ended rows."""
        arrays = self.gather_next(columns, rows)
        leaves = self.to_tensors(arrays)
        done = arrays[self._done_in_next]
        ended = done[:, 0]
        # Envs with several rows have more flags: such an env has ended once one of its rows has.
        if done.ndim > 2:
            ended = np.asarray(done.reshape(len(done), -1).any(1))
        return self.shell("next", (len(rows),)).build(leaves), leaves, ended

    def gather_roots(
        self,
        columns: np.ndarray,
        in_root: np.ndarray,
        rows: np.ndarray,
    ) -> list[np.ndarray]:
        """Return the current root leaves of some rows, fresh `[k, ...]`: from a reset's root or a step's `next`."""
        # Most steps have no reset, and then the places need no second section.
        was_reset = None
        if 1 in in_root.tobytes():
            was_reset = in_root
        return self._roots.gather(self._roots.places(columns, rows, was_reset))

    def roots(self, arrays: Sequence[np.ndarray]) -> TensorDict:
        """Return a root batch `[k]` over what `gather_roots` returned (cpu: no copy)."""
        return self.shell("root", (len(arrays[0]),)).build(self.to_tensors(arrays))

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
        """Return the root leaves after a step with resets, copies on the CPU: one memcpy, then the reset rows."""
        buffer, leaves = self._root_memory.take()
        buffer[:] = self.next_bytes[column]
        if len(reset_rows) <= _FEW_ROWS:
            to = buffer.data
            for row in reset_rows.tolist():
                for in_next, in_slab, stride, nbytes in self._root_places:
                    at = in_next + row * nbytes
                    of = in_slab + column * stride + row * nbytes
                    to[at : at + nbytes] = self._bytes[of : of + nbytes]
        else:
            arrays = self._split(buffer)
            for index, array in zip(self.root_in_next, self.root_arrays, strict=True):
                arrays[index][reset_rows] = array[column][reset_rows]
        return [leaves[index] for index in self.root_in_next]

    @functools.cached_property
    def _root_places(self) -> list[_RootPlace]:
        start = self.slab.buffer.__array_interface__["data"][0]
        places = []
        for index, array in zip(self.root_in_next, self.root_arrays, strict=True):
            own = self._fields[index].offset
            offset = array.__array_interface__["data"][0] - start
            places.append(
                _RootPlace(own, offset, array.strides[0], array[0, :1].nbytes)
            )
        return places

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

    def to_tensors(self, arrays: Sequence[np.ndarray]) -> Leaves:
        """Return arrays as tensors on the device (cpu: no copy)."""
        make: Callable[[np.ndarray], torch.Tensor] = torch.from_numpy
        # Slower than torch's own function, so only in the mode that needs it.
        if torch.is_inference_mode_enabled():
            make = as_tensor
        tensors = [*map(make, arrays)]
        if self.is_on_cpu:
            return tensors
        return [_move(tensor, self.device) for tensor in tensors]


class _Gathered(NamedTuple):
    """A leaf whose rows are gathered.

    Attributes:
        shape: of a row.
        dtype: of the leaf.
        records: a record of one row at every byte from its first row on; None of empty rows, and of rows that are too
            large for a record.
        table: place -> record.
        arrays: one of each section.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    records: np.ndarray | None
    table: np.ndarray
    arrays: Sequence[np.ndarray]


class Gatherer:
    """Gathers some rows of each leaf of a group, from several frames, by their addresses in memory.

    Indexing an array `[frame, row, ...]` with two index arrays takes numpy 4 us, whatever the size of the rows. This
    views the slab as overlapping records, one starting at every *byte*, and takes the records at the rows' addresses:
    0.5 us.

    Args:
        buffer: uint8 `[nbytes]`; all arrays are views of it.
        sections: one list of arrays `[num_frames, num_rows, ...]` per section, one array per leaf; a leaf has the same
            shape and dtype in every section.
    """

    def __init__(
        self,
        buffer: np.ndarray,
        sections: Sequence[Sequence[np.ndarray]],
    ) -> None:
        self._num_rows = sections[0][0].shape[1]
        self._section = sections[0][0].shape[0] * self._num_rows
        tables: dict[bytes, np.ndarray] = {}
        self._leaves: list[_Gathered] = []
        for arrays in zip(*sections, strict=True):
            first = arrays[0]
            nbytes = first[0, 0].nbytes
            least = min(array.ctypes.data for array in arrays)
            table = np.concatenate(
                [_addresses(array, array.ctypes.data - least) for array in arrays]
            )
            # One object for equal tables, by which `gather` sees that it has the addresses already.
            table = tables.setdefault(table.tobytes(), table)
            offset = least - buffer.ctypes.data
            records = None
            if 0 < nbytes <= LARGEST_RECORD:
                shape = (len(buffer) - offset - nbytes + 1,)
                records = np.ndarray(shape, f"V{nbytes}", buffer, offset, (1,))
            self._leaves.append(
                _Gathered(first.shape[2:], first.dtype, records, table, arrays)
            )

    def places(
        self,
        columns: np.ndarray,
        rows: np.ndarray,
        sections: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return the places of some rows, int64 `[k]`, for `gather`.

        Args:
            columns: int64 `[k]`, the frame of each.
            rows: int64 `[k]`.
            sections: int64 or bool `[k]`, the section of each; None for the first.
        """
        places = columns * self._num_rows
        places += rows
        if sections is not None:
            places += sections * self._section
        return places

    def gather(self, places: np.ndarray) -> list[np.ndarray]:
        """Return the rows at some places of every leaf, as fresh arrays `[k, ...]`."""
        count = len(places)
        if not count:
            return [np.empty((0, *leaf.shape), leaf.dtype) for leaf in self._leaves]
        table = addresses = None
        gathered: list[np.ndarray] = []
        for shape, dtype, records, own_table, arrays in self._leaves:
            if records is None:
                taken = np.empty((count, *shape), dtype)
                for position, place in enumerate(places.tolist()):
                    section, rest = divmod(place, self._section)
                    taken[position] = arrays[section][divmod(rest, self._num_rows)]
                gathered.append(taken)
                continue
            if own_table is not table:
                table = own_table
                addresses = table[places]
            gathered.append(np.ndarray((count, *shape), dtype, records[addresses]))
        return gathered


def _addresses(array: np.ndarray, start: int) -> np.ndarray:
    """Return the address of every row of an array `[frame, row, ...]` that begins at `start`, int64 `[frame * row]`."""
    frames = np.arange(array.shape[0]) * array.strides[0]
    rows = np.arange(array.shape[1]) * array.strides[1]
    return (start + frames[:, None] + rows).ravel()


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
