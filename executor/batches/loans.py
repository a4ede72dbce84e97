"""Lend frames of the slab: a batch is the frame that the workers wrote, without a copy.

The batch is over a private mapping of the frame (copy-on-write). It shows what the workers write, and a page to which
its holder writes is copied first, so the slab always keeps the rows as they were.

Guarantees: a frame is not written again while anybody holds a tensor or an array of it, or anything that refers to
their memory. What a holder writes is never seen by the executor, nor by the next holder of that frame.
Limits: a process that was forked from this one shows later rows in pages to which nobody has written. Needs private
views (`shm.private_view`), and torch's private count of a storage's users; without them nothing is lent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np

from envherd.executor.batches.reused_memory import Block, Leaves, can_count, splitter
from envherd.shm.layout import Field
from envherd.shm.private_view import PrivateView
from envherd.shm.slab import GroupSlab, Slab

#: Buffer, uint8 -> the arrays of the leaves (VIEWS).
Split = Callable[[np.ndarray], Sequence[np.ndarray]]


class _Frame:
    """One lendable frame.

    Args:
        memory: of its `next`, uint8 `[nbytes]`, private.
        split: of a batch.
        fields: of its leaves.
    """

    def __init__(self, memory: np.ndarray, split: Split, fields: Sequence[Field]) -> None:
        self._memory, self._split, self._fields = memory, split, fields
        self._block = Block(memory, split)
        self._arrays: list[np.ndarray] = []
        self._references: list[int] = []

    def is_free(self) -> bool:
        """Return whether nobody holds it."""
        return self._block.is_free and [*map(sys.getrefcount, self._arrays)] == self._references

    def leaves(self) -> Leaves:
        """Return its leaves, which hold it."""
        if not self._block.is_in_place:
            self._block = Block(self._memory, self._split)
        return self._block.leaves()

    def arrays(self) -> list[np.ndarray]:
        """Return its leaves as arrays; views of them hold it."""
        if not self._arrays:
            bounds = [(field, self._memory[field.offset : field.offset + field.nbytes].data) for field in self._fields]
            self._arrays = [np.frombuffer(part, field.dtype) for field, part in bounds]  # each is the base of its views
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
    """

    def __init__(self, slab: GroupSlab, view: PrivateView, first: int) -> None:
        self.first = first
        self._view = view
        self._fields = [field for field in slab.plan.frame if field.name[0] == "next"]
        self._stride, self._nbytes = slab.plan.frame.nbytes, slab.plan.next_nbytes
        self._split = splitter(self._fields, self._nbytes)
        self._found: int | None = None  # by `look_ahead`
        self._frames: list[_Frame | None] = [None] * (len(slab.columns["next", "done"]) - first)

    def pick(self, present: int) -> int:
        """Return the column of a frame that nobody holds; -1 if there is none.

        It is the first one, so that few frames are in use and the processor's caches keep them.

        Args:
            present: the column of the envs' latest rows, which is left out.
        """
        found, self._found = self._found, None
        return self._find(present) if found is None or found == present else found

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

    @property
    def num_lent(self) -> int:
        """Frames that are held now."""
        return sum(frame is not None and not frame.is_free() for frame in self._frames)

    def _at(self, column: int) -> _Frame:
        frame = self._frames[column - self.first]
        assert frame is not None
        return frame


def make_loans(slab: Slab, view: PrivateView | None) -> Loans | None:
    """Return the lendable frames of a slab; None if nothing can be lent."""
    if view is None or not can_count():
        return None
    return Loans(slab.groups[0], view, slab.plan.num_frames - slab.plan.num_lendable)
