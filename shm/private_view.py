"""A private view of shared memory (copy-on-write): it shows what others write, until its holder writes there.

A page to which the holder writes is copied first; the shared memory does not change. `has_copies` finds such pages, no
matter what has written to them, and `follow` drops the copies. `keep` copies pages without a change.

Assumes: Linux, whose private mappings of a file show later writes to pages that were not copied (mmap(2) leaves that
open), and whose /proc/self/pagemap tells copies from pages of a file. A process that is forked has the same view.
"""

import ctypes
import mmap
import os
import sys
import weakref
from typing import Any

import numpy as np

from envherd.shm.interrupts import ignoring_refusals
from envherd.shm.platforms import libc

# Advice of asm-generic/mman-common.h.
_MADV_DONTNEED = 4
_MADV_POPULATE_WRITE = 23
# An entry of pagemap describes a page: Documentation/admin-guide/mm/pagemap.rst in Linux's sources.
_ENTRY_BYTES = 8
#: The highest byte of entries of pages that were not copied: not mapped (0), or of a file (bit 61) and present (63) or
#: in swap (62), maybe mapped only once (56).
_FOLLOWING = bytes([0x00, 0xA0, 0xA1, 0x60, 0x61])
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class PrivateView:
    """A private, copy-on-write mapping of a part of a segment.

    Args:
        memory: a private mapping of shared memory, an object with the buffer protocol.
        pagemap: descriptor of /proc/self/pagemap, which `close` closes.

    Attributes:
        array: the bytes, uint8 (VIEW, which keeps the mapping alive).
    """

    def __init__(self, memory: Any, pagemap: int) -> None:
        self.array = np.frombuffer(memory, np.uint8)
        self._address = self.array.__array_interface__["data"][0]
        self._pagemap = pagemap
        self.close = weakref.finalize(self, os.close, pagemap)

    def has_copies(self, start: int, nbytes: int) -> bool:
        """Return whether somebody has written to some bytes of it; `start` is that of a page."""
        first = (self._address + start) // mmap.PAGESIZE
        entries = os.pread(
            self._pagemap,
            -(-nbytes // mmap.PAGESIZE) * _ENTRY_BYTES,
            first * _ENTRY_BYTES,
        )
        return bool(
            entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES].translate(None, _FOLLOWING)
        )

    def keep(self, start: int, nbytes: int) -> None:
        """Copy all pages with some bytes, so that they follow no longer; `start` is that of a page.

        No other Python code runs meanwhile. Before Linux 5.14 it writes to a byte of each page the value that it has.
        """
        madvise = ctypes.PyDLL(None).madvise  # holds the GIL
        if madvise(
            ctypes.c_void_p(self._address + start),
            ctypes.c_size_t(nbytes),
            _MADV_POPULATE_WRITE,
        ):
            self.array[start : start + nbytes : mmap.PAGESIZE] |= 0

    def follow(self, start: int, nbytes: int) -> None:
        """Drop the copies of all pages with some bytes; `start` is that of a page."""
        if libc.madvise(self._address + start, nbytes, _MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise of a private view failed")


def open_view(memory: Any) -> PrivateView | None:
    """Return a view over a private mapping; None where copies of pages cannot be found."""
    if sys.byteorder != "little":
        return None
    with ignoring_refusals():
        view = PrivateView(
            memory,
            os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC),
        )
        view.array[0] = 0
        if view.has_copies(0, 1):  # not everywhere is /proc Linux's own
            view.follow(0, 1)
            return view
        view.close()
    return None
