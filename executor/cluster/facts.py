"""What is known of the workers of a cluster: who they are, what they have printed, what they use."""

from __future__ import annotations

from typing import Any

from envherd.executor.cluster.remote_share import RemoteShare
from envherd.executor.pools.base import WorkerFigures
from envherd.shm.slab import Slab
from envherd.workers.errors import EnvherdError


class WorkerFacts:
    """The part of a `ClusterPool` that answers questions about workers, by asking their hosts where it must.

    Attributes:
        lost: worker id -> the error that describes its loss.
        shares: one per host.
        slab: of the driver.
    """

    lost: dict[int, EnvherdError]
    shares: list[RemoteShare]
    slab: Slab

    def request(self, share: RemoteShare, group: str, method: str, *args: Any) -> Any:
        """Call a method of a share's host and wait for its answer."""
        raise NotImplementedError

    def worker_output(self, worker_id: int) -> str:
        """Return what a worker has printed, as far as it is kept."""
        share = self._share_of_worker(worker_id)
        if share.is_gone:
            return ""
        return str(self.request(share, "act", "output", worker_id - share.worker_ids[0]))

    def _share_of_worker(self, worker_id: int) -> RemoteShare:
        return next(share for share in self.shares if worker_id in share.worker_ids)

    def pid_of(self, worker_id: int) -> int:
        """Return a worker's process id, on its machine."""
        share = self._share_of_worker(worker_id)
        return share.pids[worker_id - share.worker_ids[0]]

    def generation_of(self, worker_id: int) -> int:
        """Return how often a worker was replaced."""
        share = self._share_of_worker(worker_id)
        return share.generations[worker_id - share.worker_ids[0]]

    @property
    def num_recycled(self) -> int:
        """How often workers were replaced between episodes, as of the latest `figures`."""
        return sum(share.num_recycled for share in self.shares)

    def is_alive(self, worker_id: int) -> bool:
        """Return whether a worker's loss has not been noticed."""
        return worker_id not in self.lost

    def figures(self) -> list[WorkerFigures]:
        """Return what the workers' hosts say of them; zeros for lost ones."""
        found: list[WorkerFigures] = []
        for share in self.shares:
            if share.is_gone:
                found += [WorkerFigures(0, 0, 0.0, None)] * len(share.worker_ids)
                continue
            figures = self.request(share, "act", "figures")
            share.note_figures(self.slab.words, figures)
            found += [WorkerFigures(uss, pss, cpu_s, None) for uss, pss, cpu_s in figures.processes]
        return found
