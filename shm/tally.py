"""Wake the parent once for several answers instead of once for each.

A parent that waits for the first K envs has nothing to do before the K-th answer. If it shares processors with its
workers, each earlier wake-up takes time from them. So the parent writes at how many answers it wants to be woken. Each
worker counts its own answers and compares the sum over all workers with that number.

Guarantees: once the wanted number of answers has been counted, either the worker that counted last notices, or the
parent does in `expect`. Both write first and then read, with a full fence in between on x86-64. On other processors
both may miss it; the parent only sleeps in short slices and then finds the answers one slice late.
"""

import threading
from collections.abc import Mapping

import numpy as np


class Tally:
    """The parent's side.

    Args:
        words: of the slab: `answered` and `ring_at`, int64 `[workers]` each.
    """

    def __init__(self, words: Mapping[str, np.ndarray]) -> None:
        self._answered = words["answered"]
        self._ring_at = words["ring_at"]
        # A lock that is taken and released is a full fence.
        self._fence = threading.Lock()

    def total(self) -> int:
        """Return how many answers all workers have counted, ever."""
        # For a few workers, a tenth of numpy's time.
        return sum(self._answered.tolist())

    def expect(self, total: int) -> bool:
        """Ask for a ring once `total` answers have been counted; return False if they have been already."""
        # Before the sum: a worker that counts after it compares with this number.
        self._ring_at.fill(total)
        with self._fence:
            return self.total() < total


class Counter:
    """A worker's side.

    Args:
        words: of the slab: `answered` and `ring_at`, int64 `[workers]` each.
        worker_id: of this worker.
    """

    def __init__(self, words: Mapping[str, memoryview], worker_id: int) -> None:
        self._answered = words["answered"]
        self._ring_at = words["ring_at"]
        self._worker_id = worker_id
        self._fence = threading.Lock()

    def add(self) -> bool:
        """Count an answer; return whether the parent must be woken."""
        self._answered[self._worker_id] += 1
        # Between the store and the loads, as in `Tally.expect`: one side sees the other's store.
        with self._fence:
            return sum(self._answered) >= self._ring_at[self._worker_id]
