"""Waking the parent once for several answers, instead of for each.

A parent that waits for the first K of some envs has nothing to do before the K-th has answered, and where it shares the
processors with its workers, each time that it is woken earlier is time taken from them. So it says at how many answers
it wants to be woken, and each worker counts its own and looks at the sum of all.

Guarantees: once the wanted number of answers has been counted, the worker that counted last finds out, or the parent
in `expect`. Both write first and read then, with a full fence in between on x86-64. Elsewhere the two may miss each
other; the parent, which never sleeps for long at a time, then finds the answers late by a slice.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np


class Tally:
    """The parent's side.

    Args:
        words: of the slab: `answered` and `ring_at`, int64 `[workers]` each.
    """

    def __init__(self, words: Mapping[str, np.ndarray]) -> None:
        self._answered, self._ring_at = words["answered"], words["ring_at"]
        self._fence = threading.Lock()

    def total(self) -> int:
        """Return how many answers all workers have counted, ever."""
        return sum(self._answered.tolist())  # of a few, in a tenth of numpy's time

    def expect(self, total: int) -> bool:
        """Ask for a ring once this number of answers has been counted; return False if they have been by now."""
        self._ring_at.fill(total)
        with self._fence:
            return self.total() < total


class Counter:
    """A worker's side.

    Args:
        words: of the slab: `answered` and `ring_at`, int64 `[workers]` each.
        worker_id: who counts.
    """

    def __init__(self, words: Mapping[str, memoryview], worker_id: int) -> None:
        self._answered, self._ring_at = words["answered"], words["ring_at"]
        self._worker_id = worker_id
        self._fence = threading.Lock()

    def add(self) -> bool:
        """Count an answer; return whether the parent wants to know."""
        answered, worker_id = self._answered, self._worker_id
        answered[worker_id] += 1
        with self._fence:
            return sum(answered) >= self._ring_at[worker_id]
