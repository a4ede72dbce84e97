"""Messages to a worker, and its answers.

Guarantees: a wait for a worker that dies or is late raises, and never hangs; an answer is read completely or not at
all. Answers that nobody has taken yet are in the worker's channel.
"""

import contextlib
import time
from collections.abc import Callable, Sequence

from envherd.executor.processes.error_messages import Frame, worker_late, worker_lost
from envherd.executor.processes.worker_process import WorkerProcess
from envherd.executor.start.waiting import seconds
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
