"""Reuse the memory of batches once no reference to it is left: that costs half as much as new tensors.

Guarantees: memory that a caller holds is never overwritten, whether it holds a tensor, a view, a numpy array, a DLPack
capsule or a tensor saved by autograd. All of these hold the storage, whose users torch counts.
Limits: needs a private function of torch that returns this count; without it nothing is reused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

Leaves = list[torch.Tensor]

_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)  # noqa: SLF001
_data_ptr, _detach = torch.Tensor.data_ptr, torch.Tensor.detach
#: Largest batch in bytes whose memory is kept.
_LARGEST_KEPT = 1 << 24
#: Bytes from which a leaf has its own storage. Smaller leaves share one, and pickling one of them pickles all.
_OWN_STORAGE_FROM = 4096


class _Block(NamedTuple):
    """Memory for one batch.

    Attributes:
        buffer: uint8 `[nbytes]`.
        masters: tensors over the buffer, never handed out.
        firsts: one of them for each storage.
        storages: those storages.
        addresses: torch's handles of the storages.
        pointers: addresses of their data.
        users, references: their numbers of users and of references while no caller holds them.
    """

    buffer: np.ndarray
    masters: Leaves
    firsts: Leaves
    storages: list[torch.UntypedStorage]
    addresses: list[int]
    pointers: list[int]
    users: list[int]
    references: list[int]


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
        self._blocks: list[_Block | None] = [None] * self.NUM_BLOCKS
        self._at = 0
        self._is_used = _use_count is not None and 0 < nbytes <= _LARGEST_KEPT

    def take(self) -> tuple[np.ndarray, Leaves]:
        """Return memory for a batch, uint8 `[nbytes]`, and its leaves, whose values are undefined."""
        if self._is_used:
            self._at = at = (self._at + 1) % self.NUM_BLOCKS
            block = self._blocks[at]
            if block is None:
                block = self._blocks[at] = self._make()
            if (
                [*map(_use_count, block.addresses)] == block.users  # type: ignore[arg-type]
                and [*map(sys.getrefcount, block.storages)] == block.references
            ):
                if [*map(_data_ptr, block.firsts)] == block.pointers:
                    return block.buffer, [*map(_detach, block.masters)]
                self._blocks[at] = None  # `share_memory_` has moved it
        buffer = np.empty(self._nbytes, np.uint8)
        return buffer, [*map(torch.from_numpy, self._split(buffer))]

    def _make(self) -> _Block:
        buffer = np.empty(self._nbytes, np.uint8)
        masters, firsts = _masters_of(buffer, self._split(buffer))
        storages = [master.untyped_storage() for master in firsts]
        addresses = [storage._cdata for storage in storages]  # noqa: SLF001
        assert _use_count is not None
        pointers, users = [*map(_data_ptr, firsts)], [*map(_use_count, addresses)]
        return _Block(buffer, masters, firsts, storages, addresses, pointers, users, [*map(sys.getrefcount, storages)])


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
