"""Samples of the memory of workers."""


class MemoryLog:
    """How workers' private memory grows with the resets of their envs, from the samples so far."""

    def __init__(self) -> None:
        # Worker -> generation, and resets and bytes of the first and of the latest sample.
        self._samples: dict[int, tuple[int, tuple[int, int], tuple[int, int]]] = {}

    def note(
        self,
        worker_id: int,
        generation: int,
        resets: int,
        num_bytes: int,
    ) -> None:
        """Keep a sample of a worker: the number of its resets and its bytes. Samples of predecessors are dropped."""
        kept = self._samples.get(worker_id)
        sample = (resets, num_bytes)
        if kept is None or kept[0] != generation:
            self._samples[worker_id] = generation, sample, sample
        elif resets > kept[2][0]:
            self._samples[worker_id] = generation, kept[1], sample

    def growth_per_reset(self, worker_id: int) -> float | None:
        """Return bytes per reset between the first and the latest sample; None if there was no reset in between."""
        _, (first_resets, first_bytes), (resets, num_bytes) = self._samples.get(
            worker_id,
            (0, (0, 0), (0, 0)),
        )
        return (
            None
            if resets == first_resets
            else (num_bytes - first_bytes) / (resets - first_resets)
        )
