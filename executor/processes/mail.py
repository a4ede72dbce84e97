"""Messages to a worker, and its answers.

Guarantees: a wait for a worker that dies or is late raises, and never hangs; an answer is read completely or not at
all. Answers that nobody has taken yet are in the worker's channel.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from envherd.executor.options import ExecutorOptions
from envherd.executor.processes.error_messages import Frame, worker_late, worker_lost
from envherd.executor.processes.worker_process import WorkerProcess
from envherd.executor.start.waiting import seconds
from envherd.shm.interrupts import uninterrupted
from envherd.shm.segment import Segment
from envherd.shm.slab import SlabPlan, StoragePlan
from envherd.workers import messages
from envherd.workers.errors import Closed

#: Seconds after which a wait looks at the worker's log, which it may fill, and whether anyone still wants the answer.
_LOOK_S = 0.1
#: Kinds of frames that belong to the rows of a command, not to a call that waits for an answer.
_ROW_KINDS = ("side", "infos", "schema", "notice", "left_out")


def mail(
    worker: WorkerProcess,
    message: messages.Message,
    fds: Sequence[int] = (),
    *,
    waits: bool = True,
) -> None:
    """Send a message to a worker that serves commands; it reads the message before any later command.

    Args:
        worker: serves.
        message: any.
        fds: descriptors for it.
        waits: False if what its socket has no room for may be sent while the caller waits for answers.
    """
    worker.channel.queue_message(message, fds)
    # Before everything is sent, because the worker reads only announced messages.
    worker.wake()
    with contextlib.suppress(ConnectionError):  # waits for answers notice the death
        while not worker.channel.flush_nowait() and waits and not worker.has_exited():
            worker.wait_for_any([worker])
            # The worker may be blocked in a write until this process reads.
            drain(worker)


def await_frame(
    worker: WorkerProcess,
    phase: str,
    timeout_s: float | None,
    number: int | None = None,
    *,
    is_over: Callable[[], bool] = lambda: False,
) -> Frame:
    """Wait for a worker's next answer.

    Args:
        worker: was sent a request.
        phase: of the worker, for messages.
        timeout_s: seconds; None waits without a limit.
        number: of the request; answers to earlier, interrupted requests are dropped.
        is_over: returns whether nobody wants the answer any more.

    Raises:
        Closed: nobody wants the answer any more.
        WorkerLost: it died instead.
        WorkerTimeout: it was late, and was killed.
    """
    end = time.monotonic() + seconds(timeout_s)
    while True:
        # Before its answers are read: what it wrote before its end is there by then.
        has_exited = worker.has_exited()
        answers = drain(worker)
        while answers:
            answer = answers.pop(0)
            if answer.get("number") == number:
                return answer
        if has_exited:
            raise worker_lost(worker, phase)
        if is_over():
            raise Closed(
                f"{phase} failed: its lease has ended, or the pool was closed."
            )
        left_s = end - time.monotonic()
        # Whatever comes meanwhile: an env that has closed the socket makes each wait end at once.
        if left_s <= 0:
            raise worker_late(worker, timeout_s or 0.0, phase)
        worker.wait_for_any([worker], min(left_s, _LOOK_S))


def has_answered(worker: WorkerProcess) -> bool:
    """Return whether `await_frame` would not block: an answer is there, or the worker has ended."""
    return bool(drain(worker)) or worker.has_exited()


def drain(worker: WorkerProcess) -> list[Frame]:
    """Read what a worker has written, send what an interrupt has left unsent, and cut its log, without blocking.

    Returns:
        The answers that nobody has taken; a caller that takes one deletes it there. What belongs to rows is handed on.
    """
    with contextlib.suppress(ConnectionError):
        worker.channel.flush_nowait()
    worker.cut_log()
    frames = worker.channel.drain_nowait()
    num_answers = 0
    while num_answers < len(frames):
        frame = frames[num_answers]
        if frame["kind"] in _ROW_KINDS or (
            frame["kind"] == "fault" and frame["phase"] in ("reset", "step")
        ):
            worker.on_row_frame(frame)
            # Afterwards: an interrupt makes the next call hand the frame on again, which has no effect.
            del frames[num_answers]
        else:
            num_answers += 1
    return frames


# ---- equipment ---------------------------------------------------------------------------------
# What every worker in service has: the slab, the rollout storages in use, and the latest root seed.
#
# A worker that serves gets a change by mail. One whose envs are still being built gets everything in `attach`, before
# it serves.


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
