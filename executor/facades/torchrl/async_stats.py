"""Counts of received batches of an `AsyncEnvPool`, as TorchRL's own pool reports them."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np


class ExchangeStats:
    """Counts of the batches that an `AsyncEnvPool` has received.

    Args:
        answered_ns: int64 `[N]`, when each env answered (VIEW of the slab).
    """

    def __init__(self, answered_ns: np.ndarray) -> None:
        self._answered_ns = answered_ns
        self._held_since: dict[int, int] = {}  # env -> when the caller received it, until it is sent again
        self._counts: Counter[str] = Counter()
        self._since_ns: int | None = None
        self._busy_since_ns = 0

    def note_received(self, ids: list[int], max_get: int | None, *, is_acted_on: bool) -> None:
        """Count a batch that is handed out now.

        Args:
            ids: its envs.
            max_get: the requested maximum; None for any number.
            is_acted_on: the caller is expected to act for these envs next.
        """
        now, most = time.perf_counter_ns(), len(ids) if max_get is None else max_get
        self._since_ns = self._since_ns or now
        waited_ns = int((now - self._answered_ns[ids]).sum())
        self._counts.update(batches=1, items=len(ids), places=most, partial=len(ids) < most, waited_ns=waited_ns)
        if is_acted_on:
            self._busy_since_ns = self._busy_since_ns if self._held_since else now
            self._held_since.update(dict.fromkeys(ids, now))

    def note_sent(self, ids: list[int]) -> None:
        """Note that the caller has acted for some envs."""
        now = time.perf_counter_ns()
        held = [self._held_since.pop(i) for i in ids if i in self._held_since]
        self._counts.update(held_ns=sum(now - since for since in held), held=len(held))
        if held and not self._held_since:
            self._counts["busy_ns"] += now - self._busy_since_ns

    def read(self, *, is_reset: bool) -> dict[str, float | int]:
        """Return the counts; `is_reset` clears them."""
        now, counts = time.perf_counter_ns(), self._counts
        busy_ns = counts["busy_ns"] + (now - self._busy_since_ns if self._held_since else 0)
        read = {
            "batches": counts["batches"],
            "items": counts["items"],
            "avg_batch_size": _ratio(counts["items"], counts["batches"]),
            "batch_fill_ratio": _ratio(counts["items"], counts["places"]),
            "partial_batch_fraction": _ratio(counts["partial"], counts["batches"]),
            "avg_observation_to_batch_ms": _ratio(counts["waited_ns"], counts["items"]) / 1e6,
            "avg_batch_to_action_ms": _ratio(counts["held_ns"], counts["held"]) / 1e6,
            "consumer_busy_fraction": 0.0 if self._since_ns is None else _ratio(busy_ns, now - self._since_ns),
        }
        if is_reset:
            self._counts, self._busy_since_ns = Counter(), now
            self._since_ns = now if self._held_since else None
            self._held_since = dict.fromkeys(self._held_since, now)
        return read


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
