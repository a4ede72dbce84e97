"""How the batches of an `AsyncEnvPool` were received: the counts that TorchRL's own pool gives."""

from __future__ import annotations

import time

import numpy as np


class ExchangeStats:
    """See the module.

    Args:
        answered_ns: int64 `[N]`, when each env answered (VIEW of the slab).
    """

    def __init__(self, answered_ns: np.ndarray) -> None:
        self._answered_ns = answered_ns
        self._held_since: dict[int, int] = {}  # env -> when the caller received it; it has not been acted for
        self._clear(None)

    def _clear(self, since_ns: int | None) -> None:
        self._num_batches = self._num_items = self._num_places = self._num_partial = 0
        self._waited_ns = self._held_ns = self._num_held = self._busy_ns = 0
        self._since_ns = self._busy_since_ns = since_ns

    def note_received(self, ids: list[int], max_get: int | None, *, is_acted_on: bool) -> None:
        """Note a batch that is handed out now.

        Args:
            ids: its envs.
            max_get: as many were asked for at most; None for any number.
            is_acted_on: the caller is expected to act for these envs next.
        """
        now = time.perf_counter_ns()
        self._since_ns = now if self._since_ns is None else self._since_ns
        self._num_batches += 1
        self._num_items += len(ids)
        self._num_places += len(ids) if max_get is None else max_get
        self._num_partial += max_get is not None and len(ids) < max_get
        self._waited_ns += int((now - self._answered_ns[ids]).sum())
        if is_acted_on:
            if not self._held_since:
                self._busy_since_ns = now
            self._held_since.update(dict.fromkeys(ids, now))

    def note_sent(self, ids: list[int]) -> None:
        """Note that the caller has acted for some envs."""
        now = time.perf_counter_ns()
        held = [self._held_since.pop(i) for i in ids if i in self._held_since]
        self._held_ns += sum(now - since for since in held)
        self._num_held += len(held)
        if held and not self._held_since and self._busy_since_ns is not None:
            self._busy_ns += now - self._busy_since_ns
            self._busy_since_ns = None

    def read(self, *, is_reset: bool) -> dict[str, float | int]:
        """Return the counts; begin anew with `is_reset`."""
        now = time.perf_counter_ns()
        busy_ns = self._busy_ns + (0 if self._busy_since_ns is None else now - self._busy_since_ns)
        read = {
            "batches": self._num_batches,
            "items": self._num_items,
            "avg_batch_size": _ratio(self._num_items, self._num_batches),
            "batch_fill_ratio": _ratio(self._num_items, self._num_places),
            "partial_batch_fraction": _ratio(self._num_partial, self._num_batches),
            "avg_observation_to_batch_ms": _ratio(self._waited_ns, self._num_items) / 1e6,
            "avg_batch_to_action_ms": _ratio(self._held_ns, self._num_held) / 1e6,
            "consumer_busy_fraction": 0.0 if self._since_ns is None else _ratio(busy_ns, now - self._since_ns),
        }
        if is_reset:
            self._clear(now if self._held_since else None)
            self._held_since = dict.fromkeys(self._held_since, now)
        return read


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
