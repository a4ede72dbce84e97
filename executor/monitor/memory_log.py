"""Record the growth of workers' memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Samples:
    generation: int
    first_resets: int
    first_bytes: int
    resets: int
    num_bytes: int


class MemoryLog:
    """How workers' private memory grows with the resets of their envs, from the samples so far."""

    def __init__(self) -> None:
        self._samples: dict[int, _Samples] = {}

    def note(self, worker_id: int, generation: int, resets: int, num_bytes: int) -> None:
        """Keep a sample of a worker: the number of its resets and its bytes. Samples of predecessors are dropped."""
        kept = self._samples.get(worker_id)
        if kept is None or kept.generation != generation:
            self._samples[worker_id] = _Samples(generation, resets, num_bytes, resets, num_bytes)
        elif resets > kept.resets:
            kept.resets, kept.num_bytes = resets, num_bytes

    def growth_per_reset(self, worker_id: int) -> float | None:
        """Return bytes per reset between the first and the latest sample; None if there was no reset in between."""
        kept = self._samples.get(worker_id)
        if kept is None or kept.resets == kept.first_resets:
            return None
        return (kept.num_bytes - kept.first_bytes) / (kept.resets - kept.first_resets)
