"""A nameplate: plain data at the end of a segment that tells other processes of the same user what the segment is.

The last 16 bytes of the segment are the length of the text and a mark. The text, JSON, lies directly before them.

Guarantees: the nameplate lives as long as the memory, so nothing is left behind.
Platforms: `find` needs Linux's `/proc`.
"""

import contextlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from envherd.shm.interrupts import ignoring_refusals
from envherd.shm.platforms import user_id
from envherd.shm.segment import Segment

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


def create_named(
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
        label: names the segment in /proc, where `find` looks for it.
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


def change(memory: np.ndarray, **entries: Any) -> None:
    """Replace entries of the nameplate of a segment, given its bytes; the new text must not be longer."""
    end = len(memory) - _TRAILER.size
    begin = end - _TRAILER.unpack(memory.data[end:])[0]
    text = json.dumps(json.loads(memory[begin:end].tobytes()) | entries).encode()
    memory.data[begin:end] = text.rjust(end - begin)


def find(label: str) -> Iterator[Plate]:
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
