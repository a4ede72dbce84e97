"""What every worker in service has: the slab, the rollout storages in use, and the latest root seed.

A worker that serves gets a change by mail. One whose envs are still being built gets everything in `attach`, before it
serves.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from envherd.executor.options import ExecutorOptions
from envherd.executor.processes.mail import await_frame, mail
from envherd.executor.processes.worker_process import WorkerProcess
from envherd.shm.interrupts import uninterrupted
from envherd.shm.segment import Segment
from envherd.shm.slab import SlabPlan, StoragePlan
from envherd.workers import messages


class _Storage(NamedTuple):
    """The message by which a worker maps a rollout storage, and the memory."""

    message: messages.AttachStorage
    segment: Segment


class Equipment:
    """The equipment of a crew.

    Args:
        workers: of the crew, by worker id (VIEW: it changes when workers are replaced).
        root_seed: with which the first workers build their envs.
        options: of the executor.

    Attributes:
        seed: the latest root seed, and the episodes with which it was set.
    """

    def __init__(
        self,
        workers: list[WorkerProcess],
        root_seed: int,
        options: ExecutorOptions,
    ) -> None:
        self._workers = workers
        self._options = options
        self.seed = messages.Seed(root_seed=root_seed)
        self._segment: Segment | None = None
        self._storages: dict[int, _Storage] = {}

    def hand_over(
        self,
        plan: SlabPlan,
        segment: Segment,
        wake_worker: Callable[[int], None],
    ) -> None:
        """Give every worker the slab; from then on `wake_worker(worker_id)` announces mail.

        Args:
            plan: of the slab.
            segment: its memory; closed with the crew.
            wake_worker: counts a message and rings the worker's doorbell.
        """
        # Before anything can fail: from here on, `close` closes it.
        self._segment = segment
        self._wake_worker = wake_worker
        self._attach = messages.Attach(
            plan=plan,
            nbytes=segment.nbytes,
            name=segment.name,
        )
        for worker in self._workers:
            self.attach(worker)

    def attach(self, worker: WorkerProcess) -> None:
        """Give one worker the slab, the rollout storages in use, and the root seed if it has changed meanwhile."""
        assert self._segment is not None
        # Before it may serve: it would not see a Close without its doorbell.
        worker.wake = functools.partial(self._wake_worker, worker.worker_id)
        worker.channel.queue_message(self._attach, _fds(self._segment))
        await_frame(worker, "attach", self._options.build_timeout_s)
        # Mail makes it look for commands, so it serves from here on.
        with uninterrupted():
            for storage in self._storages.values():
                mail(worker, storage.message, _fds(storage.segment))
            # The message also has the episodes, which a worker counts from then on itself.
            if worker.root_seed != self.seed.root_seed:
                mail(worker, self.seed)
            worker.is_attached = True

    def attach_storage(self, target: int, plan: StoragePlan, segment: Segment) -> None:
        """Make every worker map a rollout storage as `target`: now, or when it gets the slab."""
        message = messages.AttachStorage(
            target=target,
            plan=plan,
            nbytes=segment.nbytes,
            name=segment.name,
        )
        # Before the mail: after an interrupt, workers that are attached later get it as well.
        self._storages[target] = _Storage(message, segment)
        for worker in self._attached():
            mail(worker, message, _fds(segment))

    def detach_storage(self, target: int) -> None:
        """Make every worker forget a rollout storage. May be repeated, as after an interrupt."""
        for worker in self._attached():
            mail(worker, messages.DetachStorage(target=target))
        # After the mail: when this is repeated, successors that were attached meanwhile forget it as well.
        if target in self._storages:
            self._storages.pop(target).segment.close()

    def set_seed(self, root_seed: int, episodes: Sequence[int] | None = None) -> None:
        """Give every worker a new root seed, and the episodes of the next resets: now, or when it gets the slab."""
        self.seed = messages.Seed(
            root_seed=root_seed,
            episodes=None if episodes is None else tuple(episodes),
        )
        for worker in self._attached():
            mail(worker, self.seed)

    def close(self) -> None:
        """Close the memory. Idempotent."""
        for storage in self._storages.values():
            storage.segment.close()
        if self._segment is not None:
            self._segment.close()

    def _attached(self) -> list[WorkerProcess]:
        """Return the workers that read mail; the others are still building."""
        return [worker for worker in self._workers if worker.is_attached]


def _fds(segment: Segment) -> list[int]:
    # Without memfd, workers map it by its name.
    return [segment.fd] if segment.fd >= 0 else []
