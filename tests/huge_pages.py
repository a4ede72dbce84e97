"""Put this process's memory into huge pages, which are cheap to fork: a session's helper imports this last.

It forks thousands of workers. With torch, a fork copies 60,000 entries of pages, and the end of the worker drops them;
of pages of 2 MiB there are hundreds. Before Linux 6.1 nothing happens.
"""

import ctypes
from pathlib import Path

_COLLAPSE = 25  # MADV_COLLAPSE, linux/mman.h

advise = ctypes.CDLL(None).madvise
advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
for line in Path("/proc/self/maps").read_text().splitlines():
    span, access, _offset, _device, inode, *_name = line.split()
    if access.startswith("rw") and inode == "0":
        first, end = (int(bound, 16) for bound in span.split("-"))
        advise(first, end - first, _COLLAPSE)
