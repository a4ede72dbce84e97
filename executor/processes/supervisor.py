"""Supervision of workers: track which of them serve, and replace the others.

Guarantees:
- Every worker is in one condition, and a single store changes it, so an interrupt leaves the old or the new one.
- A loss is logged and counted when it is noticed, and the worker's pending commands count as answered.
- A worker that is being replaced owes the commands that were given after its loss, even if further successors fail.
Assumes: one caller at a time.

Condition  Meaning                                     Follows on
SERVING    it carries out commands                     BUILDING
LOST       it died or was late; that is its answer     SERVING; LEAVING, BUILDING (no successor came up)
LEAVING    it is to be replaced: when that is due, or  LOST (restart), SERVING (recycled),
           as soon as it is needed                     BUILDING (its successor did not come up)
BUILDING   its successor builds its envs               LEAVING

`absent` holds only the workers that do not serve.

Order, because a handler may raise between any two lines. The numbers are at the lines.
1. The condition (`absent`), before anything happens to the worker or its words: what follows is made good by the next
   check (`notice_deaths`, `await_serving`, `continue_replacing`), which finds the worker by its condition.
2. The loss in `outcome`, before the worker's commands count as answered: the caller that finds the answers finds their
   loss as well.
3. The commands of a lost worker count as answered before it has a successor, and again when that is begun: the
   successor would carry out those that an interrupt has left.
4. LEAVING before a process is killed or dismissed, BUILDING after its successor was started: an interrupt in between
   starts another one, and never leaves a worker without either.
5. Words of a place are cleared before its next process gets the slab, and may write them.
6. Of a successor that has built its envs: the slab (`attach`), since when it serves, the condition, and the doorbell
   last, which makes it look for what it owes. Workers that are not absent get commands, so the slab must be there.
"""

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

from envherd.executor.options import ExecutorOptions
from envherd.executor.processes.crew import Crew
from envherd.executor.processes.error_messages import (
    RESTART,
    another_spec,
    log,
    not_replaced,
    with_sentence,
    worker_late,
    worker_lost,
)
from envherd.executor.processes.mail import drain, has_answered
from envherd.executor.processes.worker_process import WorkerProcess
from envherd.shm.specs import EnvSpec
from envherd.workers.errors import EnvherdError

# ---- restarts ----------------------------------------------------------------------------------
# Limit how often lost workers are replaced.

#: Seconds before the second replacement within the window, and the longest delay.
_BACK_OFF_S = 0.1
_LONGEST_BACK_OFF_S = 10.0


class Restarts:
    """Records replacements after losses, so that a crash loop slows down and ends."""

    def __init__(self, options: ExecutorOptions) -> None:
        self._options = options
        self._times: dict[int, list[float]] = {}

    def next_delay_s(self, worker_id: int) -> float | None:
        """Return the seconds to wait before replacing a worker, and record that; None if it may not be replaced.

        The first replacement within `restart_window_s` is immediate, the second after `_BACK_OFF_S`; each further delay
        is twice the previous one, up to `_LONGEST_BACK_OFF_S`.
        """
        now = time.monotonic()
        recent = [
            t
            for t in self._times.get(worker_id, ())
            if now - t < self._options.restart_window_s
        ]
        if len(recent) >= self._options.max_restarts:
            return None
        self._times[worker_id] = [*recent, now]
        if not recent:
            return 0.0
        return min(_BACK_OFF_S * 2 ** (len(recent) - 1), _LONGEST_BACK_OFF_S)


# ---- supervisor --------------------------------------------------------------------------------


class Condition(Enum):
    """Why a worker does not serve; see the module."""

    LOST = "lost"
    LEAVING = "leaving"
    BUILDING = "building"


class Absence(NamedTuple):
    """The condition of a worker that does not serve.

    Attributes:
        condition: see the module.
        since: monotonic seconds; of LEAVING, from when on its successor may be started.
        error: of LOST, the one that describes its loss.
    """

    condition: Condition
    since: float
    error: EnvherdError | None = None


class Supervisor:
    """Notices losses of workers, and replaces workers.

    Args:
        pool: of the workers: a `WorkerPool`, whose module imports this one.
        crew: the workers.
        options: of the executor.

    Attributes:
        absent: worker id -> its absence, for workers that do not serve; the pool has the same dict.
    """

    def __init__(self, pool: Any, crew: Crew, options: ExecutorOptions) -> None:
        self._pool = pool
        self._crew = crew
        self._options = options
        self.absent: dict[int, Absence] = {}
        self._restarts = Restarts(options)
        self._lost_at = 0.0
        self._serves_since: dict[int, float] = {}  # of successors

    # ---- conditions --------------------------------------------------------------------------

    @property
    def lost(self) -> dict[int, EnvherdError]:
        """Worker id -> the error that describes its loss; fresh.

        Copies, to be raised: with a traceback, the pool would keep the frames of each call, and these the executor.
        """
        return {
            worker_id: copy.copy(absence.error)
            for worker_id, absence in self.absent.items()
            if absence.error is not None
        }

    def is_being_replaced(self, worker_id: int) -> bool:
        """Return whether a worker will have a successor."""
        absence = self.absent.get(worker_id)
        return absence is not None and absence.condition is not Condition.LOST

    # ---- losses ------------------------------------------------------------------------------

    def declare_lost(self, worker_id: int, error: EnvherdError) -> None:
        """Take a worker out of service; the parent now owns its words."""
        is_raised = self._options.on_worker_loss == "raise"
        if is_raised:
            error = with_sentence(error, RESTART)
        self._pool.num_losses += 1
        self._lost_at = time.monotonic()
        # Copies, as `lost` returns.
        lost = Absence(Condition.LOST, self._lost_at, copy.copy(error))
        self.absent[worker_id] = lost  # 1
        self._pool.outcome.losses[worker_id] = copy.copy(error)  # 2
        self._crew.workers[worker_id].kill()
        self._pool.lose_answers_of(worker_id)
        if not self._crew.is_closing:  # by another thread, or at the interpreter's exit
            # Not the error itself: a kept record would keep its frames alive. An error that is raised has the output.
            log.warning(
                "%s",
                error.message.partition("\n")[0] if is_raised else error.message,
            )

    def answer_for_lost(self) -> None:
        """Answer commands to workers that were already lost with that loss."""
        for worker_id, error in self.lost.items():
            if self._pool.lose_answers_of(worker_id):
                self._pool.outcome.losses[worker_id] = error
                self._lost_at = time.monotonic()

    def must_raise(self, now: float) -> bool:
        """Return whether the grace period for the other workers' answers has passed since a loss.

        Args:
            now: monotonic seconds.
        """
        options = self._options
        return (
            options.on_worker_loss == "raise"
            and bool(self._pool.outcome.losses)
            and options.loss_grace_s is not None
            and now >= self._lost_at + options.loss_grace_s
        )

    def refuse_lost(self, worker_ids: Iterable[int]) -> None:
        """Raise the loss of a worker that is not replaced."""
        if self.absent and self._options.on_worker_loss != "restart":
            lost = self.lost
            for worker_id in worker_ids:
                if worker_id in lost:
                    raise lost[worker_id]

    def notice_deaths(self, owing: Iterable[int]) -> bool:
        """Notice deaths, and read workers' messages so that none blocks on a full socket.

        Args:
            owing: the workers that have a command to carry out.

        Returns:
            Whether a worker is writing a message larger than its socket's buffer.
        """
        if self.absent:  # 1
            self.answer_for_lost()
        is_reading = False
        for worker_id in owing:
            if worker_id in self.absent:
                continue
            worker = self._crew.workers[worker_id]
            # Before its messages are read: what it wrote before its end is there by then.
            has_exited = worker.has_exited()
            drain(worker)
            is_reading |= worker.channel.is_in_frame
            if has_exited:
                self.declare_lost(
                    worker_id,
                    worker_lost(worker, *self._pool.phase_of(worker_id)),
                )
        return is_reading

    def give_up_late(self, owing: Iterable[int], timeout_s: float) -> None:
        """Kill workers that have not answered in time.

        Those that are being replaced, and successors that have served for less than the limit, are spared.

        Args:
            owing: the workers that have a command to carry out.
            timeout_s: their limit in seconds.
        """
        latest = time.monotonic() - timeout_s
        for worker_id in owing:
            if (
                not self.is_being_replaced(worker_id)
                and self._serves_since.get(worker_id, latest) <= latest
            ):
                worker = self._crew.workers[worker_id]
                error = worker_late(worker, timeout_s, *self._pool.phase_of(worker_id))
                self.declare_lost(worker_id, error)

    # ---- successors --------------------------------------------------------------------------

    def begin_restart(self, worker_id: int) -> None:
        """Start a successor of a lost worker; it builds its envs while the other workers continue.

        Raises:
            WorkerLost, WorkerTimeout: too many restarts within the window (a crash loop).
        """
        self._pool.lose_answers_of(worker_id)  # 3
        self._pool.outcome.losses.pop(worker_id, None)
        delay_s = self._restarts.next_delay_s(worker_id)
        if delay_s is None:
            raise not_replaced(self.lost[worker_id], self._options)
        self._to_leaving(worker_id, delay_s)  # 4
        if not delay_s:
            self._to_building(worker_id)

    def recycle(self, worker_id: int) -> None:
        """Close the envs of an idle worker, and begin to replace it."""
        self._pool.num_recycled += 1
        self._to_leaving(worker_id)  # 4
        self._crew.dismiss(
            [self._crew.workers[worker_id]],
            self._options.close_timeout_s,
        )
        self._to_building(worker_id)

    def branch(
        self,
        source_id: int,
        worker_ids: Sequence[int],
        give_up: Callable[[], None],
    ) -> None:
        """Put copies of a worker into the places of others, which are killed. They owe nothing.

        After an interrupt or an error, each of the others is unchanged, replaced by a copy, or begun to be replaced.

        Args:
            source_id: of the worker.
            worker_ids: of the others.
            give_up: called before the first of the others is killed.

        Raises:
            ValueError: the worker cannot be forked; nothing has changed.
            WorkerLost, WorkerTimeout: the worker is lost, or a copy is.
        """
        self.await_serving([source_id])
        if (error := self.lost.get(source_id)) is not None:
            raise error
        copies: list[WorkerProcess] = []
        try:
            self._fork(source_id, worker_ids, copies)
            give_up()
            for worker_id in worker_ids:
                self._to_leaving(worker_id)  # 4
            losses = [
                loss for copy in copies if (loss := self._put_copy(copy)) is not None
            ]
        finally:
            for copy in copies:
                if self._crew.workers[copy.worker_id] is not copy:
                    copy.kill()
                    copy.release()
        if losses:
            raise losses[0]

    def _fork(
        self,
        source_id: int,
        worker_ids: Sequence[int],
        copies: list[WorkerProcess],
    ) -> None:
        try:
            for worker_id in worker_ids:
                self._crew.fork(source_id, worker_id, copies)
        except EnvherdError as error:
            if self._crew.workers[source_id].has_exited():
                self.declare_lost(source_id, error)
            raise

    def _put_copy(self, copy: WorkerProcess) -> EnvherdError | None:
        """Put a copy of a worker into service; return its loss, or None."""
        worker_id = copy.worker_id
        self._crew.replace(worker_id, copy)
        self._pool.clear_words(worker_id)  # 5
        try:
            self._crew.equipment.attach(copy)
        except EnvherdError as error:
            self.declare_lost(worker_id, error)
            return error
        self._pool.outcome.losses.pop(worker_id, None)
        self.absent.pop(worker_id, None)
        self._pool.wake_worker(worker_id)
        return None

    def await_serving(self, worker_ids: Iterable[int]) -> None:
        """Make sure that workers are in service before they get commands.

        Lost workers that may be replaced are left unchanged: their commands are answered by the loss.

        Raises:
            WorkerLost, WorkerTimeout: a worker is lost and not replaced.
        """
        if not self.absent:
            return
        self.refuse_lost(worker_ids)
        for worker_id in worker_ids:
            while self.is_being_replaced(worker_id):
                absence = self.absent[worker_id]
                if absence.condition is Condition.LEAVING:
                    time.sleep(max(0.0, absence.since - time.monotonic()))
                    self._to_building(worker_id)
                self._to_serving(worker_id)

    def continue_replacing(self) -> None:
        """Start successors that are due, and put those that have built their envs into service."""
        limit = self._options.build_timeout_s
        # A copy: conditions change on the way.
        for worker_id, absence in list(self.absent.items()):
            waited_s = time.monotonic() - absence.since
            try:
                if absence.condition is Condition.LEAVING:
                    if waited_s >= 0:
                        self._to_building(worker_id)
                elif absence.condition is Condition.BUILDING and (
                    # 6: an interrupt came between the slab and the condition.
                    self._crew.workers[worker_id].is_attached
                    or has_answered(self._crew.workers[worker_id])
                    or (limit is not None and waited_s > limit)
                ):
                    self._to_serving(worker_id)
            except EnvherdError as error:
                self._pool.outcome.losses[worker_id] = error

    def _to_leaving(self, worker_id: int, delay_s: float = 0.0) -> None:
        """Record that a worker must be replaced, so that this happens even if an interrupt comes now."""
        self.absent[worker_id] = Absence(Condition.LEAVING, time.monotonic() + delay_s)

    def _to_building(self, worker_id: int) -> None:
        """Start the successor of a worker that has ended or must end.

        Raises:
            WorkerLost: no process can be started; the worker is lost.
        """
        self._pool.clear_words(worker_id)  # 5
        try:
            self._crew.replace(worker_id)
        except EnvherdError as error:
            self.declare_lost(worker_id, error)
            raise
        self.absent[worker_id] = Absence(Condition.BUILDING, time.monotonic())  # 4

    def _to_serving(self, worker_id: int) -> None:
        """Wait until a successor has built its envs, and put it into service; begin to replace one that fails.

        Raises:
            WorkerLost, WorkerTimeout, ...: it did not start, and no further successor is allowed.
        """
        worker = self._crew.workers[worker_id]
        if not worker.is_attached:
            try:
                self._check_specs(worker_id, self._crew.collect_specs(worker_id))
                self._crew.equipment.attach(worker)
            except EnvherdError as error:
                self._to_leaving_or_lost(worker_id, error)
                return
            except BaseException:
                # After an interrupt, begin again when the worker is needed. Once it is attached, it may have carried
                # out commands (6).
                if not worker.is_attached:
                    self._to_leaving(worker_id)
                raise
        self._serves_since[worker_id] = time.monotonic()  # 6
        self.absent.pop(worker_id, None)
        self._pool.wake_worker(worker_id)

    def _to_leaving_or_lost(self, worker_id: int, error: EnvherdError) -> None:
        """Begin to replace a successor that did not start. Its envs still owe their answers."""
        self._pool.num_losses += 1
        self._crew.workers[worker_id].kill()
        delay_s = self._restarts.next_delay_s(worker_id)
        if delay_s is None:
            error = not_replaced(error, self._options)
            self.declare_lost(worker_id, error)
            raise error
        log.warning("%s Another process is started in its place.", error.message)
        self._to_leaving(worker_id, delay_s)

    def _check_specs(self, worker_id: int, specs: list[EnvSpec]) -> None:
        for env_id, spec in zip(
            self._crew.blueprint.blocks[worker_id],
            specs,
            strict=True,
        ):
            expected = self._pool.specs[env_id]
            if spec != expected:
                raise another_spec(env_id, expected.difference(spec))
