"""Pure arithmetic: which bytes belong to which array.

Guarantees: fields never overlap, each starts on a 128-byte boundary (two cache lines, so that no two
writers share one, and any dtype view of it is legal), and the same requests give the same layout in
every process. Knows nothing of memory, processes or envs.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

#: Bytes. Two 64-byte lines: adjacent-line prefetchers fetch pairs, and torch views need at most 64.
ALIGNMENT = 128

Name = tuple[str, ...]


def align(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Return the smallest multiple of `alignment` that is at least `nbytes`."""
    return -(-nbytes // alignment) * alignment


@dataclass(frozen=True)
class Field:
    """One array: its name, shape, dtype name, and offset in bytes from the start of its layout, once it has one."""

    name: Name
    shape: tuple[int, ...]
    dtype: str
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the array, without padding."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Layout:
    """Fields in order of offset, and the bytes they take together (a multiple of `ALIGNMENT`)."""

    fields: tuple[Field, ...]
    nbytes: int

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)


def lay_out(wanted: Iterable[Field], start: int = 0) -> Layout:
    """Place arrays one after the other, each aligned.

    Args:
        wanted: the arrays, without offsets; they may have no elements.
        start: offset of the first field, bytes; itself aligned up.

    Returns:
        The layout; `nbytes` counts from offset 0 and so includes `start`.

    Raises:
        ValueError: a name came twice, or a dimension is negative.
    """
    fields: list[Field] = []
    seen: set[Name] = set()
    offset = align(start)
    for field in wanted:
        if field.name in seen:
            raise ValueError(
                f"lay_out failed: expected unique names, got {field.name} twice."
            )
        if any(n < 0 for n in field.shape):
            raise ValueError(
                f"lay_out failed: expected dimensions >= 0, got {field.shape} for {field.name}."
            )
        seen.add(field.name)
        fields.append(replace(field, dtype=np.dtype(field.dtype).name, offset=offset))
        offset = align(offset + field.nbytes)
    return Layout(tuple(fields), offset)


def view(buffer: np.ndarray, field: Field, base: int = 0) -> np.ndarray:
    """Return a field as an array: a VIEW of `buffer` (uint8, 1-d), `base` bytes further on."""
    return np.ndarray(field.shape, field.dtype, buffer, base + field.offset)


def strided_view(
    buffer: np.ndarray,
    field: Field,
    base: int,
    count: int,
    stride: int,
) -> np.ndarray:
    """Return `count` repetitions of a field, `stride` bytes apart, as one array `[count, *shape]` (VIEW)."""
    inner = np.ndarray(field.shape, field.dtype).strides
    return np.ndarray(
        (count, *field.shape),
        field.dtype,
        buffer,
        base + field.offset,
        (stride, *inner),
    )
