"""Memory for batches: blocks that are used again, and frames of the slab that are lent.

A block is used again once no reference to it is left: that costs half as much as new tensors. A lent frame is the one
that the workers wrote, without a copy. The batch is over a private mapping of it (copy-on-write): it shows what the
workers write, and a page to which its holder writes is copied first, so the slab always keeps the rows as they were.

Guarantees: memory that a caller holds is never overwritten, whether it holds a tensor, a view, a numpy array, a DLPack
capsule or a tensor saved by autograd. All of these hold the storage, whose users torch counts. A frame is not written
again while anybody holds it. What a holder writes is never seen by the executor, nor by the next holder of that frame.
A fork copies the frames that are held, because the child may hold them longer than this process does.
Limits: only forks by Python are noticed (`os.fork`, multiprocessing). Needs a private function of torch that returns
this count; without it nothing is reused or lent. Lending also needs private views (`shm.segment`).
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np
import torch

from envherd.executor.batches.fast_tensordict import as_tensor
from envherd.shm.platforms import register_at_fork
from envherd.shm.segment import PrivateView
from envherd.shm.slab import Field, GroupSlab, Slab, lay_out

Leaves = list[torch.Tensor]
#: Memory that the caller fills, uint8 `[nbytes]`, or None if there is nothing to fill; and the leaves over it.
Taken = tuple[np.ndarray | None, Leaves]
#: Buffer, uint8 -> the arrays of the leaves (VIEWS).
Split = Callable[[np.ndarray], Sequence[np.ndarray]]

#: The number of users of a storage; None if torch has no such function.
_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)  # noqa: SLF001
_data_ptr = torch.Tensor.data_ptr
_detach = torch.Tensor.detach
#: Bytes of a record that numpy can describe.
LARGEST_RECORD = 2**31 - 1
#: Largest batch in bytes whose memory is kept; and half of the bytes that are kept for batches of different sizes, as
#: where a receive takes the envs that are ready.
_LARGEST_KEPT = 1 << 24
#: The number of batch sizes for which memory is kept in any case.
_LEAST_KEPT = 4
#: Largest storage in bytes that leaves share: neighbours of one dtype. Saving or sending a leaf writes all of its
#: storage, and torch does not save a storage as two dtypes. One for each leaf would cost a step 0.1 us more a leaf.
_LARGEST_SHARED = 1024


def splitter(
    fields: Sequence[Field],
    nbytes: int,
) -> Callable[[np.ndarray], list[np.ndarray]]:
    """Return `split(buffer) -> arrays`, which returns the arrays of some fields (VIEWS) of a buffer of `nbytes`."""
    if nbytes > LARGEST_RECORD:
        return lambda buffer: [
            np.ndarray(
                field.shape,
                field.dtype,
                buffer,
                field.offset,
            )
            for field in fields
        ]
    names = [str(index) for index in range(len(fields))]
    # One record of all fields: numpy then makes their arrays faster than one by one.
    record = np.dtype(
        {
            "names": names,
            "formats": [(field.dtype, field.shape) for field in fields],
            "offsets": [field.offset for field in fields],
            "itemsize": nbytes,
        }
    )

    def split(buffer: np.ndarray) -> list[np.ndarray]:
        made = np.ndarray((), record, buffer)
        return [made[name] for name in names]

    return split


class BatchMemory:
    """Memory for one batch, and tensors over it.

    Args:
        buffer: uint8 `[nbytes]`.
        split: buffer -> arrays of the leaves (VIEWS).

    Attributes:
        buffer: as given.
    """

    def __init__(self, buffer: np.ndarray, split: Split) -> None:
        assert _use_count is not None
        self.buffer = buffer
        # The masters are never handed out; there is one first for each storage.
        self._masters, self._firsts = _masters_of(buffer, split(buffer))
        self._storages = [master.untyped_storage() for master in self._firsts]
        self._addresses = [storage._cdata for storage in self._storages]  # noqa: SLF001
        self._pointers = [*map(_data_ptr, self._firsts)]
        # The users and references of each storage while no caller holds it.
        self._users = [*map(_use_count, self._addresses)]
        self._references = [*map(sys.getrefcount, self._storages)]

    @property
    def is_free(self) -> bool:
        """Whether no caller holds any of it."""
        assert _use_count is not None
        return (
            # Who holds a batch usually holds all of it.
            _use_count(self._addresses[0]) == self._users[0]
            and [*map(_use_count, self._addresses)] == self._users
            and [*map(sys.getrefcount, self._storages)] == self._references
        )

    @property
    def is_in_place(self) -> bool:
        """False if `share_memory_` has moved a leaf elsewhere: a new block is needed."""
        return [*map(_data_ptr, self._firsts)] == self._pointers

    def hold(self) -> Leaves:
        """Return one tensor over each storage."""
        return [*map(_detach, self._firsts)]

    @property
    def is_free_but_for_hold(self) -> bool:
        """Whether nobody holds any of it besides what one `hold` has returned."""
        assert _use_count is not None
        users = [users - 1 for users in map(_use_count, self._addresses)]
        return (
            users == self._users
            and [*map(sys.getrefcount, self._storages)] == self._references
        )

    def leaves(self) -> Leaves:
        """Return tensors over the memory, which hold it."""
        return [*map(_detach, self._masters)]


class ReusedMemory:
    """Blocks of memory for batches of one kind.

    Args:
        nbytes: of a batch.
        split: buffer, uint8 `[nbytes]` -> arrays of the leaves (VIEWS).
    """

    #: A loop that holds the latest batch alone needs two.
    NUM_BLOCKS = 3

    def __init__(self, nbytes: int, split: Split) -> None:
        self._nbytes = nbytes
        self._split = split
        self._blocks: list[BatchMemory | None] = [None] * self.NUM_BLOCKS
        self._at = 0
        self._is_used = _use_count is not None and 0 < nbytes <= _LARGEST_KEPT

    def take(self) -> tuple[np.ndarray, Leaves]:
        """Return memory for a batch, uint8 `[nbytes]`, and its leaves, whose values are undefined."""
        if self._is_used:
            self._at = at = (self._at + 1) % self.NUM_BLOCKS
            block = self._blocks[at]
            if block is None or ((is_free := block.is_free) and not block.is_in_place):
                block = self._blocks[at] = BatchMemory(
                    np.empty(self._nbytes, np.uint8),
                    self._split,
                )
                is_free = True
            if is_free:
                return block.buffer, block.leaves()
        buffer = np.empty(self._nbytes, np.uint8)
        return buffer, [*map(as_tensor, self._split(buffer))]


def memory_by_count(
    fields_of_rows: Callable[[int], Sequence[Field]],
    most_rows: int,
) -> Callable[[int], ReusedMemory]:
    """Return a function from a number of rows to memory for batches of that many, with all leaves in one block.

    Args:
        fields_of_rows: number of rows -> the fields of a batch, without offsets.
        most_rows: of a batch.
    """

    def make(count: int) -> ReusedMemory:
        layout = lay_out(fields_of_rows(count))
        return ReusedMemory(layout.nbytes, splitter(layout.fields, layout.nbytes))

    # At least a few sizes of large batches, and all sizes of small ones.
    largest = ReusedMemory.NUM_BLOCKS * lay_out(fields_of_rows(most_rows)).nbytes
    return lru_cache(max(_LEAST_KEPT, 2 * _LARGEST_KEPT // largest))(make)


def _masters_of(
    buffer: np.ndarray,
    arrays: Sequence[np.ndarray],
) -> tuple[Leaves, Leaves]:
    """Return tensors over arrays of a buffer, and the first one of each storage."""
    masters: Leaves = []
    firsts: Leaves = []
    for run in _runs(arrays):
        start = _address(run[0])
        size = _address(run[-1]) + run[-1].nbytes - start
        offset = start - _address(buffer)
        whole = as_tensor(buffer[offset : offset + size].view(run[0].dtype))
        for array in run:
            first = (_address(array) - start) // array.itemsize
            masters.append(whole[first : first + array.size].view(array.shape).detach())
        firsts.append(masters[-len(run)])
    return masters, firsts


def _runs(arrays: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """Return arrays of a buffer in groups that share a storage of at most `_LARGEST_SHARED` bytes."""
    runs: list[list[np.ndarray]] = []
    for array in arrays:
        if (
            runs
            and array.dtype == runs[-1][0].dtype
            and _address(array) + array.nbytes - _address(runs[-1][0])
            <= _LARGEST_SHARED
        ):
            runs[-1].append(array)
        else:
            runs.append([array])
    return runs


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


class _Frame:
    """One lendable frame.

    Args:
        memory: of its `next`, uint8 `[nbytes]`, private.
        split: of a batch.
        fields: of its leaves.
    """

    def __init__(
        self,
        memory: np.ndarray,
        split: Split,
        fields: Sequence[Field],
    ) -> None:
        self._memory = memory
        self._split = split
        self._fields = fields
        self._block = BatchMemory(memory, split)
        self._arrays: list[np.ndarray] = []
        self._references: list[int] = []

    def is_free(self) -> bool:
        """Return whether nobody holds it."""
        return (
            self._block.is_free
            and [*map(sys.getrefcount, self._arrays)] == self._references
        )

    def keep(self, is_written: Callable[[], bool], copy: Callable[[], None]) -> None:
        """Copy it if somebody holds it and it is complete."""
        # Held before it is looked at: another thread does not pick a frame that is held.
        hold = self._block.hold()
        if (
            not self._block.is_free_but_for_hold
            or [*map(sys.getrefcount, self._arrays)] != self._references
        ) and not is_written():
            copy()
        del hold

    def leaves(self) -> Leaves:
        """Return its leaves, which hold it."""
        # A holder has moved a leaf elsewhere by `share_memory_`.
        if not self._block.is_in_place:
            self._block = BatchMemory(self._memory, self._split)
        return self._block.leaves()

    def arrays(self) -> list[np.ndarray]:
        """Return its leaves as arrays; views of them hold it."""
        if not self._arrays:
            bounds = [
                (field, self._memory[field.offset : field.offset + field.nbytes].data)
                for field in self._fields
            ]
            # Each is the base of its views, which numpy counts as its references.
            self._arrays = [np.frombuffer(part, field.dtype) for field, part in bounds]
            self._references = [*map(sys.getrefcount, self._arrays)]
        return self._arrays


class Loans:
    """The lendable frames of one executor; see the module.

    Args:
        slab: of the envs, which are equal.
        view: of all lendable frames.
        first: column of the first of them.

    Attributes:
        first: as given.
        is_written: returns whether workers may be writing to a column.
    """

    is_written: Callable[[int], bool]

    def __init__(self, slab: GroupSlab, view: PrivateView, first: int) -> None:
        self.first = first
        self._view = view
        self._fields = [field for field in slab.plan.frame if field.name[0] == "next"]
        self._stride = slab.plan.frame.nbytes
        self._nbytes = slab.plan.next_nbytes
        self._split = splitter(self._fields, self._nbytes)
        self._found: int | None = None  # by `look_ahead`
        self._frames: list[_Frame | None] = [None] * (
            len(slab.columns["next", "done"]) - first
        )
        _all_loans.add(self)

    def pick(self, present: int) -> int:
        """Return the column of a frame that nobody holds; -1 if there is none.

        It is the first one, so that few frames are in use and the processor's caches keep them.

        Args:
            present: the column of the envs' latest rows, which is left out.
        """
        found = self._found
        # It holds once: then the caller gets this frame.
        self._found = None
        if found is None or found == present:
            return self._find(present)
        return found

    def look_ahead(self, present: int) -> None:
        """Find the frame for the next `pick`, while the caller waits for workers: nobody can begin to hold it.

        If there is none, the next `pick` does not look again (12 held frames take 4 us): one that is given back until
        then is used a step later.
        """
        self._found = self._find(present)

    def _find(self, present: int) -> int:
        for index, frame in enumerate(self._frames):
            column = self.first + index
            if column == present:
                continue
            start = index * self._stride
            if frame is None:
                memory = self._view.array[start : start + self._nbytes]
                self._frames[index] = _Frame(memory, self._split, self._fields)
            elif not frame.is_free():
                continue
            # Its last holder has written to it: show what the workers write again.
            elif self._view.has_copies(start, self._nbytes):
                self._view.follow(start, self._nbytes)
            return column
        return -1

    def leaves(self, column: int) -> Leaves:
        """Return the `next` leaves of a frame that was picked; they hold it."""
        return self._at(column).leaves()

    def array(self, column: int, index: int) -> np.ndarray:
        """Return a `next` leaf of such a frame, an array of one dimension; only views of it hold the frame."""
        return self._at(column).arrays()[index]

    def keep_held(self) -> None:
        """Copy the frames that are held, so that they stay what they are in a process that is forked now."""
        for index, frame in enumerate(self._frames):
            if frame is not None:
                is_written = partial(self.is_written, self.first + index)
                frame.keep(
                    is_written,
                    partial(self._view.keep, index * self._stride, self._nbytes),
                )

    @property
    def num_lent(self) -> int:
        """Frames that are held now."""
        return sum(frame is not None and not frame.is_free() for frame in self._frames)

    def _at(self, column: int) -> _Frame:
        frame = self._frames[column - self.first]
        assert frame is not None
        return frame


_all_loans: weakref.WeakSet[Loans] = weakref.WeakSet()


def _keep_held() -> None:
    for loans in list(_all_loans):
        loans.keep_held()


register_at_fork(before=_keep_held)


class StepMemory:
    """Memory for the `next` of a step of all envs of one group: the frame itself, if it is lent, or a block.

    Args:
        blocks: used again.
        loans: frames that can be lent; None for none.
    """

    def __init__(self, blocks: ReusedMemory, loans: Loans | None) -> None:
        self._blocks = blocks
        self._loans = loans

    def take(self, column: int) -> Taken:
        """Return memory for the rows of a column, uint8 `[nbytes]`, and its leaves, before or after they are written.

        The caller fills the memory from the frame with one memcpy. It is None if the frame itself is lent.
        """
        if (loans := self._loans) is not None:
            # Here, because the workers step meanwhile: the search costs the caller no time.
            loans.look_ahead(column)
            if column >= loans.first:
                return None, loans.leaves(column)
        return self._blocks.take()


def make_loans(slab: Slab, view: PrivateView | None) -> Loans | None:
    """Return the lendable frames of a slab; None if nothing can be lent."""
    if view is None or _use_count is None:
        return None
    return Loans(slab.groups[0], view, slab.plan.num_frames - slab.plan.num_lendable)
