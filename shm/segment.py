"""A piece of memory that several processes map, a private view of it, and the nameplate at its end.

Guarantees: on Linux a segment is an anonymous memfd. It has no name, so no crash can leave anything in /dev/shm, and
docker's limit of 64 MB there does not apply. It is sealed against resizing (a worker that truncated it would kill every
reader with SIGBUS). `create` refuses a size that exceeds the memory available to this process, and touches all pages,
so running out of memory happens there and not in the middle of a run.
Assumes: `memfd_create` (Linux >= 3.17). Platforms: elsewhere `create_with_name`: memory that has a name. Its owner
removes the name in `close`; if the owner is killed, `multiprocessing`'s resource tracker does. Its pages are reserved
where the system can do so, because a write to a page that cannot be had is fatal.
"""

import contextlib
import ctypes
import errno
import json
import mmap
import os
import secrets
import struct
import sys
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from envherd.shm.cgroups import read_memory
from envherd.shm.finalizer import Finalizer
from envherd.shm.interrupts import ignoring_refusals, uninterrupted
from envherd.shm.platforms import HAS_MEMFD as HAS_MEMFD  # noqa: PLC0414  # re-exported
from envherd.shm.platforms import MAP_SHARED, fcntl, libc, reserve, user_id

# ---- private view ------------------------------------------------------------------------------
# A private view of shared memory (copy-on-write): it shows what others write, until its holder writes there.
#
# A page to which the holder writes is copied first; the shared memory does not change. `has_copies` finds such pages,
# no matter what has written to them, and `follow` drops the copies. `keep` copies pages without a change.
#
# Assumes: Linux, whose private mappings of a file show later writes to pages that were not copied (mmap(2) leaves that
# open), and whose /proc/self/pagemap tells copies from pages of a file. A process that is forked has the same view.

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


# ---- segment -----------------------------------------------------------------------------------

#: Share of the available memory that one segment may take; the rest is for envs and learner.
ADMISSION_MARGIN = 0.9

#: Begin the names of shared memory, before the owner's process id. macOS allows 30 characters.
NAMES = "envherd-"

_MFD_NOEXEC_SEAL = 0x8  # linux/memfd.h; kernels before 6.3 answer EINVAL
_MAP_NORESERVE = 0x4000  # asm-generic/mman.h
_MAP_FIXED = 0x10  # the same, and macOS's sys/mman.h
_PAGE = mmap.PAGESIZE
#: Errors of memory beyond its file system, and beyond the limit on files, which counts shared memory as well.
_TOO_LARGE = (errno.ENOSPC, errno.EFBIG)

with contextlib.suppress(AttributeError):  # then `_map` raises it
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        *[ctypes.c_int] * 3,
        ctypes.c_long,
    ]


class _NamedMemory(shared_memory.SharedMemory):
    """Memory with a name. Arrays over `bytes` keep the mapping after `close`, which frees the descriptor."""

    def __init__(self, name: str, *, create: bool = False, size: int = 0) -> None:
        try:
            super().__init__(name, create, size)
        except BaseException:  # as when the resource tracker cannot be started
            if create:
                self.remove()
            raise

    def bytes(self) -> Any:
        """Return its bytes; where that is possible, by `_map`, whose mapping keeps no descriptor."""
        with contextlib.suppress(AttributeError, OSError):
            return _map(self._fd, self.size)  # type: ignore[attr-defined]
        return self.buf

    def reserve(self) -> None:
        """Take its pages now.

        Raises:
            OSError: there are too few.
        """
        reserve(self._fd, self.size)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Let go of the mapping and the descriptor. Idempotent."""
        self._buf = self._mmap = None
        super().close()

    def remove(self) -> None:
        """Let go of it, and remove its name. Idempotent."""
        self.close()
        with ignoring_refusals():  # it may be gone
            self.unlink()


class Segment:
    """A mapped piece of shared memory; call `create` or `attach`.

    Attributes:
        nbytes: size in bytes, a multiple of the page size.
        fd: file descriptor (memfd), or -1 for a named segment.
        name: name of a named segment, or None.
    """

    def __init__(
        self,
        nbytes: int,
        mapping: Any,
        *,
        fd: int = -1,
        named: _NamedMemory | None = None,
        is_owner: bool,
    ) -> None:
        self.nbytes = nbytes
        self.fd = fd
        self.name = None if named is None else named.name
        self._mapping = mapping
        self._private_view: PrivateView | None = None
        #: Also runs if an interrupt drops the segment without `close`.
        self._release: Callable[[], Any]
        # One line each: a failure at the line comes before the finalizer, so the caller must close the descriptor.
        if named is None:
            self._release = weakref.finalize(self, os.close, fd)
        else:
            self._release = Finalizer(
                self,
                _release_named,
                named,
                os.getpid() if is_owner else None,
            )

    @classmethod
    def create(
        cls,
        nbytes: int,
        label: str = "envherd",
        *,
        is_prefaulted: bool = True,
        num_sparse: int = 0,
    ) -> "Segment":
        """Create a segment of zeros.

        Args:
            nbytes: wanted size; rounded up to whole pages.
            label: shown in /proc/<pid>/maps.
            is_prefaulted: touch every page now.
            num_sparse: bytes at the end that may never be used: they are not touched, and need not be available.

        Raises:
            MemoryError: it would take more than `ADMISSION_MARGIN` of the available memory, or than a file may have.
        """
        size = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        # Before it is created: touching pages that there are not ends in a kill, not in an exception.
        admit(size - num_sparse)
        if not HAS_MEMFD:
            return cls.create_with_name(nbytes)
        with uninterrupted(), _within_limits(size):
            fd = _create_memfd(label)
            try:
                os.ftruncate(fd, size)
                fcntl.fcntl(
                    fd,
                    fcntl.F_ADD_SEALS,
                    fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
                )
                segment = cls(size, _map(fd, size), fd=fd, is_owner=True)
            except BaseException:
                os.close(fd)
                raise
        try:
            if is_prefaulted:
                segment.array()[: size - num_sparse : _PAGE] = 0
            return segment
        except BaseException:
            segment.close()
            raise

    @classmethod
    def create_with_name(cls, nbytes: int, label: str = "", **_: Any) -> "Segment":  # noqa: ARG003  # as `create`
        """Create a segment of zeros that other processes attach by its name, on any platform, with pages reserved."""
        size = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        admit(size)
        with uninterrupted(), _within_limits(size):
            memory = _NamedMemory(
                f"{NAMES}{os.getpid()}-{secrets.token_hex(4)}",
                create=True,
                size=size,
            )
            try:
                memory.reserve()
                return cls(size, memory.bytes(), named=memory, is_owner=True)
            except BaseException:
                memory.remove()
                raise

    @classmethod
    def attach(cls, nbytes: int, *, fd: int = -1, name: str | None = None) -> "Segment":
        """Map an existing segment by descriptor (which becomes the segment's own) or by name."""
        if name is not None:
            memory = _NamedMemory(name=name)
            return cls(nbytes, memory.bytes(), named=memory, is_owner=False)
        return cls(nbytes, _map(fd, nbytes), fd=fd, is_owner=False)

    def array(self) -> np.ndarray:
        """Return the bytes as uint8 `[nbytes]`: a VIEW that keeps the mapping alive."""
        return np.frombuffer(self._mapping, np.uint8, self.nbytes)

    def private_view(self, start: int) -> PrivateView | None:
        """Return a private view of the bytes from `start` on (a page); None where that is not possible."""
        if self.fd < 0 or start >= self.nbytes:
            return None
        with ignoring_refusals():
            self._private_view = open_view(
                _map(
                    self.fd,
                    self.nbytes - start,
                    mmap.MAP_PRIVATE | _MAP_NORESERVE,
                    start,
                )
            )
        return self._private_view

    def close(self) -> None:
        """Release this process's handle; views keep the memory alive. Idempotent."""
        if self._private_view is not None:
            self._private_view.close()
        self._release()
        self.fd = -1
        self._mapping = None


def _release_named(memory: _NamedMemory, owner: int | None) -> None:
    """Let go of named memory; remove its name in the process that owns it, not in a fork of that."""
    if os.getpid() == owner:
        memory.remove()
    else:
        memory.close()


@contextlib.contextmanager
def _within_limits(nbytes: int) -> Iterator[None]:
    """Raise MemoryError if the system refuses memory of that size, and its error with advice if it refuses a file."""
    try:
        yield
    except OSError as error:
        if error.errno not in _TOO_LARGE:
            raise OSError(
                error.errno,
                f"shared memory failed: expected {nbytes / 2**20:.3f} MiB, got {error.strerror}. Raise the limit if "
                f"too many files are open (ulimit -n), or close executors that are not used",
            ) from error
        raise MemoryError(
            f"shared memory failed: expected {nbytes / 2**20:.3f} MiB, got {error}. Use fewer envs or shorter "
            f"rollouts, a larger /dev/shm (docker --shm-size=1g), or a higher limit on files (ulimit -f)."
        ) from None


def admit(nbytes: int) -> None:
    """Raise MemoryError, with the numbers, if `nbytes` bytes do not fit into the memory now available."""
    available = available_bytes()
    if available is not None and nbytes > available * ADMISSION_MARGIN:
        raise MemoryError(
            f"shared memory failed: expected at most {ADMISSION_MARGIN:.0%} of the {available / 2**20:.0f} MiB "
            f"available, got {nbytes / 2**20:.0f} MiB. Use fewer envs, shorter rollouts, or drop observation keys."
        )


def available_bytes() -> int | None:
    """Return the bytes this process may still take: the smaller of MemAvailable and the room in its control groups."""
    return min(
        (
            room
            for room in (_meminfo_available(), read_memory().room)
            if room is not None
        ),
        default=None,
    )


def _map(fd: int, nbytes: int, flags: int = MAP_SHARED, start: int = 0) -> Any:
    """Map a descriptor; return an object with the buffer protocol, which unmaps the memory when it is freed.

    Python's own `mmap` keeps a copy of the descriptor for as long as the mapping lives (until 3.13): a
    program that keeps its rollouts would run out of descriptors. So `mmap` takes the addresses without a file, and the
    descriptor is mapped over them. `mmap` unmaps them when it is freed, in C. A finalizer in Python would lose a Ctrl-C
    that arrives in it, because Python drops what a finalizer raises.
    """
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE)
    except OSError as error:
        raise MemoryError(
            f"mapping shared memory failed: expected {nbytes / 2**20:.0f} MiB of address space, got {error}. "
            f"Use fewer envs or shorter rollouts, or raise the limit (ulimit -v)."
        ) from None
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
    mapped = libc.mmap(
        address,
        nbytes,
        mmap.PROT_READ | mmap.PROT_WRITE,
        flags | _MAP_FIXED,
        fd,
        start,
    )
    if mapped != address:
        raise OSError(ctypes.get_errno(), f"mmap of {nbytes} bytes failed")
    return memory


def _create_memfd(label: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    # First without the right to execute it, which a hardened system demands and an old kernel does not know.
    with ignoring_refusals():
        return os.memfd_create(label, flags | _MFD_NOEXEC_SEAL)
    return os.memfd_create(label, flags)


def _meminfo_available() -> int | None:
    with ignoring_refusals():
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


# ---- nameplate ---------------------------------------------------------------------------------
# A nameplate: plain data at the end of a segment that tells other processes of the same user what the segment is.
#
# The last 16 bytes of the segment are the length of the text and a mark. The text, JSON, lies directly before them.
#
# Guarantees: the nameplate lives as long as the memory, so nothing is left behind.
# Platforms: `find_plates` needs Linux's `/proc`.

_TRAILER = struct.Struct("<q8s")
_MARK = b"envherd\x01"
#: Bytes; a text is shorter.
_MOST = 2**24


class Plate(NamedTuple):
    """A nameplate that was found.

    Attributes:
        pid: process that has the segment.
        path: where the segment can be opened.
        inode: of the segment; identifies it.
        content: what the segment's creator wrote.
    """

    pid: int
    path: str
    inode: int
    content: dict[str, Any]


def create_with_plate(
    nbytes: int,
    label: str,
    content: dict[str, Any],
    *,
    num_sparse: int = 0,
    create: Callable[..., Segment] = Segment.create,
) -> Segment:
    """Return a new segment of at least `nbytes` bytes, with a nameplate after them.

    Args:
        nbytes: for the creator's own use.
        label: names the segment in /proc, where `find_plates` looks for it.
        content: JSON-serialisable.
        num_sparse: bytes at the end that need not be available.
        create: makes the segment.

    Raises:
        MemoryError: it would take too much of the available memory.
    """
    text = json.dumps(content).encode()
    segment = create(nbytes + len(text) + _TRAILER.size, label, num_sparse=num_sparse)
    memory = segment.array().data
    end = segment.nbytes - _TRAILER.size
    memory[end - len(text) : end] = text
    memory[end:] = _TRAILER.pack(len(text), _MARK)
    return segment


def change_plate(memory: np.ndarray, **entries: Any) -> None:
    """Replace entries of the nameplate of a segment, given its bytes; the new text must not be longer."""
    end = len(memory) - _TRAILER.size
    begin = end - _TRAILER.unpack(memory.data[end:])[0]
    text = json.dumps(json.loads(memory[begin:end].tobytes()) | entries).encode()
    memory.data[begin:end] = text.rjust(end - begin)


def find_plates(label: str) -> Iterator[Plate]:
    """Yield the nameplates of all segments with a label in this user's processes.

    Workers hold the segments of their executor, and a forked process those of its parent, so the content should name
    the owner. Processes that end meanwhile, or that cannot be inspected, are left out.
    """
    entries: list[os.DirEntry[str]] = []
    with ignoring_refusals():
        entries = list(os.scandir("/proc"))
    for entry in entries:
        if not entry.name.isdecimal():
            continue
        with ignoring_refusals():
            if entry.stat().st_uid == user_id():
                yield from _of_process(int(entry.name), label)


def _of_process(pid: int, label: str) -> Iterator[Plate]:
    target = f"/memfd:{label} (deleted)"
    seen = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        with contextlib.suppress(ValueError), ignoring_refusals():
            if os.readlink(path) != target:
                continue
            inode = os.stat(path).st_ino
            if inode not in seen and isinstance(content := _read(path), dict):
                seen.add(inode)
                yield Plate(pid, path, inode, content)


def _read(path: str) -> Any:
    """Return the JSON at the place of a segment's nameplate; None if it has none.

    Raises:
        OSError: it cannot be read. ValueError: it is no JSON.
    """
    with Path(path).open("rb") as file:
        end = file.seek(-_TRAILER.size, os.SEEK_END)
        length, mark = _TRAILER.unpack(file.read(_TRAILER.size))
        if mark != _MARK or not 0 < length < min(end, _MOST):
            return None
        file.seek(end - length)
        return json.loads(file.read(length))
