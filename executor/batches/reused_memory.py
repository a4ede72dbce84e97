"""Reuse the memory of batches once no reference to it is left: that costs half as much as new tensors.

Guarantees: memory that a caller holds is never overwritten, whether it holds a tensor, a view, a numpy array, a DLPack
capsule or a tensor saved by autograd. All of these hold the storage, whose users torch counts.
Limits: needs a private function of torch that returns this count; without it nothing is reused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch

from envherd.executor.batches import gather as gathering
from envherd.shm.layout import Field

Leaves = list[torch.Tensor]

_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)  # noqa: SLF001
_data_ptr, _detach = torch.Tensor.data_ptr, torch.Tensor.detach
#: Largest batch in bytes whose memory is kept.
_LARGEST_KEPT = 1 << 24
#: Bytes from which a leaf has its own storage. Smaller leaves share one, and pickling one of them pickles all.
_OWN_STORAGE_FROM = 4096


def can_count() -> bool:
    """Return whether torch counts the users of a storage."""
    return _use_count is not None


def splitter(fields: Sequence[Field], nbytes: int) -> Callable[[np.ndarray], list[np.ndarray]]:
    """Return `split(buffer) -> arrays`, which returns the arrays of some fields (VIEWS) of a buffer of `nbytes`."""
    if nbytes > gathering.LARGEST_RECORD:
        return lambda buffer: [np.ndarray(field.shape, field.dtype, buffer, field.offset) for field in fields]
    names = [str(index) for index in range(len(fields))]
    formats, offsets = [(field.dtype, field.shape) for field in fields], [field.offset for field in fields]
    record = np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": nbytes})

    def split(buffer: np.ndarray) -> list[np.ndarray]:
        made = np.ndarray((), record, buffer)
        return [made[name] for name in names]

    return split


class Block:
    """Memory for one batch, and tensors over it.

    Args:
        buffer: uint8 `[nbytes]`.
        split: buffer -> arrays of the leaves (VIEWS).

    Attributes:
        buffer: as given.
    """

    def __init__(self, buffer: np.ndarray, split: Callable[[np.ndarray], Sequence[np.ndarray]]) -> None:
        assert _use_count is not None
        self.buffer = buffer
        self._masters, self._firsts = _masters_of(buffer, split(buffer))  # never handed out; one for each storage
        self._storages = [master.untyped_storage() for master in self._firsts]
        self._addresses = [storage._cdata for storage in self._storages]  # noqa: SLF001
        self._pointers = [*map(_data_ptr, self._firsts)]
        self._users = [*map(_use_count, self._addresses)]  # and references, while no caller holds them
        self._references = [*map(sys.getrefcount, self._storages)]

    @property
    def is_free(self) -> bool:
        """Whether no caller holds any of it."""
        assert _use_count is not None
        return (
            _use_count(self._addresses[0]) == self._users[0]  # who holds a batch usually holds all of it
            and [*map(_use_count, self._addresses)] == self._users
            and [*map(sys.getrefcount, self._storages)] == self._references
        )

    @property
    def is_in_place(self) -> bool:
        """False if `share_memory_` has moved a leaf elsewhere: a new block is needed."""
        return [*map(_data_ptr, self._firsts)] == self._pointers

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

    def __init__(self, nbytes: int, split: Callable[[np.ndarray], Sequence[np.ndarray]]) -> None:
        self._nbytes, self._split = nbytes, split
        self._blocks: list[Block | None] = [None] * self.NUM_BLOCKS
        self._at = 0
        self._is_used = can_count() and 0 < nbytes <= _LARGEST_KEPT

    def take(self) -> tuple[np.ndarray, Leaves]:
        """Return memory for a batch, uint8 `[nbytes]`, and its leaves, whose values are undefined."""
        if self._is_used:
            self._at = at = (self._at + 1) % self.NUM_BLOCKS
            block = self._blocks[at]
            if block is None or ((is_free := block.is_free) and not block.is_in_place):
                block = self._blocks[at] = Block(np.empty(self._nbytes, np.uint8), self._split)
                is_free = True
            if is_free:
                return block.buffer, block.leaves()
        buffer = np.empty(self._nbytes, np.uint8)
        return buffer, [*map(torch.from_numpy, self._split(buffer))]


def _masters_of(buffer: np.ndarray, arrays: Sequence[np.ndarray]) -> tuple[Leaves, Leaves]:
    """Return tensors over arrays of a buffer, and the first one of each storage."""
    whole, start = torch.from_numpy(buffer), _address(buffer)
    masters, firsts = [], []
    is_shared = False
    for array in arrays:
        master = torch.from_numpy(array)
        if array.nbytes < _OWN_STORAGE_FROM:
            offset = _address(array) - start
            master = whole[offset : offset + array.nbytes].view(master.dtype).view(array.shape).detach()
        if array.nbytes >= _OWN_STORAGE_FROM or not is_shared:
            firsts.append(master)
        is_shared = is_shared or array.nbytes < _OWN_STORAGE_FROM
        masters.append(master)
    return masters, firsts


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
