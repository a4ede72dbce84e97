"""Samples of the memory of workers."""

from typing import NamedTuple


class _Sample(NamedTuple):
    """The number of a worker's resets, and the bytes of its memory then."""

    generation: int
    resets: int
    num_bytes: int


class MemoryLog:
    """How workers' private memory grows with the resets of their envs, from the samples so far."""

    def __init__(self) -> None:
        # Worker -> the first sample of its process, and the latest one.
        self._samples: dict[int, list[_Sample]] = {}

    def note(
        self,
        worker_id: int,
        generation: int,
        resets: int,
        num_bytes: int,
    ) -> None:
        """Keep a sample of a worker: the number of its resets and its bytes. Samples of predecessors are dropped."""
        kept = self._samples.get(worker_id, [])
        sample = _Sample(generation, resets, num_bytes)
        if not kept or kept[0].generation != generation:
            self._samples[worker_id] = [sample]
        elif resets > kept[-1].resets:
            self._samples[worker_id] = [kept[0], sample]

    def growth_per_reset(self, worker_id: int) -> float | None:
        """Return bytes per reset between the first and the latest sample; None if there was no reset in between."""
        samples = self._samples.get(worker_id, [])
        if len(samples) < 2:
            return None
        first, latest = samples
        return (latest.num_bytes - first.num_bytes) / (latest.resets - first.resets)
