"""The pool of worker processes: gives commands and waits for answers.

Guarantees:
- A command is announced only after its inputs are complete, and an answer is read only after its number has arrived.
  After an interrupt or a timeout at any instant, the numbers show which answers are outstanding.
- While a thread waits, a worker's death is noticed within `LOOK_S` and logged at once; no thread spins without bound.
- After a loss the other workers continue, and their rows are complete.
Assumes: one caller at a time.

Order, because a handler may raise between any two lines, and because workers read meanwhile. The numbers are at the
lines; those of the words are in `pools.commands`, and C has the same in `native/caller.c`.
1. Messages, then the command, then the doorbell. A worker reads messages before it looks for commands; one that was
   not rung is rung by `wake_workers`.
2. `CommandWords.complete`, before the command that it announces: an env keeps its place in the order.
3. Tokens, then the count of answers, then the numbers: a token that comes later stays for the next wait, so no answer
   is missed and no tokens pile up.
4. Numbers, then messages, then the status words: the messages of an answer have been sent before its number, and what
   was not read is announced still.
"""

import os
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.base import Pool, WorkerFigures, refuse_batches
from envherd.executor.pools.commands import LOOK_S, CommandWords, native_caller
from envherd.executor.processes.crew import Crew
from envherd.executor.processes.error_messages import (
    env_error,
    log_stall,
    merge_answers,
)
from envherd.executor.processes.mail import await_frame, drain, has_answered, mail
from envherd.executor.processes.supervisor import Supervisor
from envherd.executor.sending.blueprint import Blueprint
from envherd.executor.start.waiting import Clock, Deadline, Overdue
from envherd.shm import segment
from envherd.shm.interrupts import ignoring_refusals
from envherd.shm.segment import Segment, create_with_plate
from envherd.shm.slab import Slab, SlabPlan, StoragePlan
from envherd.shm.specs import EnvSpec
from envherd.shm.sync import Bell, Doorbell, Tally
from envherd.workers import messages
from envherd.workers.errors import EnvherdError, FactoryError
from envherd.workers.processes import memory_of
from envherd.workers.protocol import (
    EACH,
    LEAVE,
    Op,
    Phase,
    describe_phase,
    pack_each,
)

# ---- slab plate --------------------------------------------------------------------------------
# The content of a slab's nameplate, by which `envherd top` finds and reads the slab.

PLATE_LABEL = "envherd-slab"
PLATE_SCHEMA = "envherd.slab/2"
#: Bytes for the text that is known only after the slab was created.
_PATH_BYTES = 512


def describe_slab(
    plan: SlabPlan,
    blocks: Sequence[Sequence[int]],
    family: str,
    gpus: Sequence[str | None],
) -> dict[str, Any]:
    """Return the content of the nameplate of a slab of this process.

    Args:
        plan: of the slab.
        blocks: env ids of each worker.
        family: of the envs.
        gpus: of each worker.
    """
    return {
        "schema": PLATE_SCHEMA,
        "pid": os.getpid(),
        "namespace": namespace(),
        "made_at": time.time(),
        "env": family,
        "path": " " * _PATH_BYTES,
        "blocks": [list(block) for block in blocks],
        "gpus": list(gpus),
        "words": {
            field.name[0]: [field.offset, field.shape[0]] for field in plan.words
        },
        "nbytes": plan.words.nbytes,
    }


def show_path(buffer: np.ndarray, path: str) -> None:
    """Write which calls are made in C to the nameplate of a slab; a long text is cut."""
    # `"` and `\\` take two.
    segment.change_plate(
        buffer,
        path=path.encode("ascii", "replace").decode()[: _PATH_BYTES // 2],
    )


def namespace() -> str:
    """Return the name of this process's pid namespace; empty without /proc."""
    with ignoring_refusals():
        return os.readlink("/proc/self/ns/pid")
    return ""


# ---- worker pool -------------------------------------------------------------------------------

_LOOK_NS = int(LOOK_S * 1e9)
#: Seconds between checks of the workers' pidfds if answers arrive without a wait of `LOOK_S`.
_LOOK_ANYWAY_S = 0.03
#: The same while a worker writes a large message, which this process must read for it to continue.
_LOOK_WHILE_READING_S = 0.0002
#: Seconds for workers to close their envs after another worker's factory has failed.
_FAREWELL_S = 1.0


class WorkerPool(Pool):
    """Worker processes over one slab; `start` brings it up, `close` takes it down."""

    _create_segment = staticmethod(Segment.create)
    _lends = True
    _in_c = True
    #: Whether `branch` can work.
    can_fork = True
    # The engine knows when the envs of a worker are between episodes.
    is_recyclable = True

    def __init__(self, blueprint: Blueprint, options: ExecutorOptions) -> None:
        super().__init__(blueprint, options)
        self.worker_ids = range(len(blueprint.blocks))
        self.num_workers = len(self.worker_ids)
        self.worker_of = np.repeat(
            np.arange(self.num_workers),
            [len(b) for b in blueprint.blocks],
        )
        self.specs: list[EnvSpec] = []
        self.crew = self._make_crew()
        self._looked_at = 0.0
        self._clock = Clock()
        self._is_reading = False  # a worker is writing more than its socket holds
        self._num_questions = 0
        self.resets_before_start = np.zeros(self.num_workers, np.int64)

    def _make_crew(self) -> Crew:
        return Crew(self.blueprint, self.options, self.outcome.take)

    def start(self) -> None:
        """Start the workers, build the envs in them, and set `specs`, `plan` and `slab`.

        Raises:
            FactoryError: a factory raised or returned no env; nothing is left running.
            WorkerLost, WorkerTimeout: a worker died or was late; nothing is left running.
        """
        try:
            self.specs = self.crew.start()
            refuse_batches(self.specs, self.options)
            self.envs_in_python = self.crew.envs_in_python
            self._make_slab()
        except FactoryError:
            # Time for the other workers to close their envs.
            self.close(min(_FAREWELL_S, self.options.close_timeout_s))
            raise
        except BaseException:
            self.close(timeout_s=0)
            raise

    def _make_slab(self) -> None:
        self.plan = self._plan_slab(self.num_workers, lends=self._lends)
        plate = describe_slab(
            self.plan,
            self.blueprint.blocks,
            self.specs[0].family,
            [worker.gpu for worker in self.crew.workers],
        )
        segment = create_with_plate(
            self.plan.nbytes,
            PLATE_LABEL,
            plate,
            num_sparse=self.plan.nbytes - self.plan.ring_nbytes,
            create=self._create_segment,
        )
        buffer = segment.array()
        if self.plan.num_lendable:
            self.lendable = segment.private_view(self.plan.ring_nbytes)
        self.slab = Slab(self.plan, buffer)
        self._tally = Tally(self.slab.words)
        self._go, self._done = self._make_bells(buffer)
        self._rings = [bell.ring for bell in self._go]
        self.words = CommandWords(self.slab)
        self._found = np.empty(self.num_envs, np.int64)  # output of `Caller.first`
        if self._in_c:
            self._caller = native_caller(
                self.words,
                self._go,
                self._done,
                self.slab.words,
                self.worker_of,
            )
        self.supervisor = Supervisor(self, self.crew, self.options)
        self.absent = self.supervisor.absent
        self._overdue = Overdue(
            self._clock,
            self.options.step_timeout_s,
            self.options.reset_timeout_s,
            self.phase_of,
            self.words.command_seq,
            self.worker_of,
        )
        # Last: from here on workers serve.
        self.crew.equipment.hand_over(self.plan, segment, self.wake_worker)

    def _make_bells(self, buffer: np.ndarray) -> tuple[Sequence[Bell], Bell]:
        """Return the doorbells of the workers, and the caller's."""
        return (
            [Doorbell.create(buffer, self.plan.go_offset(w)) for w in self.worker_ids],
            Doorbell.create(buffer, self.plan.bells_offset),
        )

    def wake_worker(self, worker_id: int) -> None:
        """Make a worker look for commands and messages."""
        latest = (
            LEAVE
            if self.crew.is_closing
            else self.crew.workers[worker_id].channel.num_queued
        )
        self.slab.words["mail_seq"][worker_id] = latest
        self._rings[worker_id]()

    @property
    def lost(self) -> dict[int, EnvherdError]:  # type: ignore[override]  # the supervisor's
        """Worker id -> the error that describes its loss."""
        return self.supervisor.lost

    def show_path(self, path: str) -> None:
        show_path(self.slab.buffer, path)

    # ---- commands ----------------------------------------------------------------------------

    def submit(
        self,
        env_ids: np.ndarray,
        op: Op | np.ndarray,
        target: int,
        columns: np.ndarray | int,
        flags: int = 0,
    ) -> None:
        commands = pack_each(op, target, columns, flags, self.plan.num_frames)
        if self._caller is not None and not self.supervisor.absent:
            each = commands
            if each.__class__ is int:  # C needs an array
                each = np.full(len(env_ids), commands)
            if self._caller.give_some(env_ids, each):
                return
        worker_ids: Collection[int] = self.worker_ids
        if len(env_ids) < self.num_envs and self.num_workers > 1:
            worker_ids = set(self.worker_of[env_ids].tolist())
        if self.supervisor.absent:
            self.supervisor.await_serving(worker_ids)
        self.words.write(env_ids, commands)  # 1
        for worker_id in worker_ids:
            self._rings[worker_id]()
        if self.supervisor.absent:
            self.supervisor.answer_for_lost()

    def await_workers(self, env_ids: np.ndarray) -> None:
        if self.supervisor.absent:
            self.supervisor.await_serving(set(self.worker_of[env_ids].tolist()))

    def wake_workers(self) -> None:
        """Make every worker that serves look for commands and messages.

        The others look when they are put into service. A worker whose start was interrupted must not answer: it will be
        replaced, and its successor's envs would lack its steps.
        """
        for worker_id in self.worker_ids:
            if self.is_serving(worker_id):
                self.wake_worker(worker_id)

    def lose_answers_of(self, worker_id: int) -> bool:
        """Count a lost worker's envs as answered; return whether they owed anything."""
        owing = self.words.lose_answers(
            np.array(self.blueprint.blocks[worker_id]),
            self.outcome,
        )
        self.slab.words["info_ids"].reshape(-1, 2)[owing] = 0
        return bool(len(owing))

    def submit_later(
        self,
        env_ids: np.ndarray,
        op: Op,
        target: int,
        columns: np.ndarray,
        flags: int = 0,
    ) -> None:
        """As `submit`, to complete commands that envs have failed to; never waits for a successor."""
        self.words.complete(env_ids)  # 2
        self.words.write(
            env_ids,
            pack_each(op, target, columns, flags, self.plan.num_frames),
        )
        for worker_id in filter(self.is_serving, self.worker_ids):
            # A worker that was lost in this call does not serve. After an interrupt, its successor may.
            self._rings[worker_id]()

    def must_look(self) -> bool:
        """Return whether a check of the workers is due, or the pool is reading a large message."""
        return self._is_reading or time.monotonic() > self._looked_at + _LOOK_ANYWAY_S

    def wait_some(
        self,
        env_ids: np.ndarray,
        count: int,
        timeout_s: float | None,
        more_for_resets_s: float | None = 0.0,
        *,
        kill_late: bool = True,
        through_losses: bool = False,
    ) -> np.ndarray:
        """Wait until at least `count` of some envs have answered, and return those that have."""
        # A shorter wait is left to `_wait_slowly`, which ends when its deadline does.
        waits = timeout_s is None or timeout_s >= LOOK_S
        if (
            self._caller is None
            and waits
            and count == self.num_envs
            # After an interrupt, perhaps nobody rings any more.
            and not through_losses
            and not self.words.command[0] & EACH
            and self._has_all()
        ):
            self._collect()
            return env_ids
        if self.must_look():
            self._look_around()
        if self._caller is not None and not self._is_reading:
            num_found = self._caller.first(
                env_ids,
                count,
                _LOOK_NS if waits else 0,
                self._found,
            )
            if num_found >= 0:
                return self._found[:num_found].copy()
        while self._done.try_wait():  # 3
            pass
        ready = self.words.ready(env_ids)
        if len(ready) < count:
            deadline = Deadline(
                self._clock,
                timeout_s,
                more_for_resets_s,
                self.options.stall_log_s,
                kills=kill_late,
            )
            self._wait_slowly(env_ids, count, deadline, through_losses=through_losses)
            ready = self.words.ready(env_ids)
        self._collect()
        return ready

    def _has_all(self) -> bool:
        """Wait for the answers to a command to all envs; return False if none comes for `LOOK_S`.

        Each worker rings once for it. So this needs no tally, and takes a fifth of the time of `_wait_slowly`. A token
        that an earlier wait has left is taken as well.
        """
        num_missing = self.num_workers  # 3
        while num_missing > 0 or not self.words.have_all_answered():
            if self._is_reading or not self._done.wait(LOOK_S):
                return False
            num_missing -= 1
        return True

    def _wait_slowly(
        self,
        env_ids: np.ndarray,
        count: int,
        deadline: Deadline,
        *,
        through_losses: bool = False,
    ) -> None:
        """Wait token by token, and check the workers whenever none comes."""
        num_resets = self.slab.words["resets"].copy()
        while True:
            while self._done.try_wait():  # 3
                pass
            # The total before the numbers: an answer in between would be awaited again, and nobody rings for it.
            total = self._tally.total()
            missing = count - len(self.words.ready(env_ids))
            if missing <= 0:
                return
            left_s = deadline.left_s(
                _LOOK_WHILE_READING_S if self._is_reading else LOOK_S
            )
            if not self._tally.expect(total + missing) or (
                left_s > 0 and self._done.wait(left_s)
            ):
                continue  # answers came: whether they are enough, only the numbers show
            self._look_around()
            if not through_losses and self.supervisor.must_raise(time.monotonic()):
                return
            if deadline.left_s(LOOK_S) <= 0 and not (
                deadline.kills and self._give_up_late(deadline, num_resets)
            ):
                # The envs of killed workers count as answered. Without kills, the caller gets fewer envs.
                return
            if (waited_s := deadline.stalled_s()) is not None:
                self._log_stalls(waited_s)

    def _give_up_late(self, deadline: Deadline, num_resets: np.ndarray) -> bool:
        """Kill late workers, except those that can get more time for resets; return whether there are such workers."""
        resetting = self._that_reset(num_resets) if deadline.excuses_resets else set()
        self.supervisor.give_up_late(
            [w for w in self._owing() if w not in resetting],
            deadline.limit_s,
        )
        if not resetting.intersection(self._owing()):
            return False
        deadline.extend_for_resets()
        return True

    def _log_stalls(self, waited_s: float) -> None:
        for worker_id in self._owing():
            if not self.supervisor.is_being_replaced(worker_id):
                log_stall(
                    self.crew.workers[worker_id],
                    self.phase_of(worker_id),
                    waited_s,
                )

    def _that_reset(self, num_resets: np.ndarray) -> set[int]:
        """Return the workers that are in a reset, or have made one since the counts `num_resets` (int `[N]`)."""
        have_reset = self.worker_of[self.slab.words["resets"] != num_resets]
        return set(have_reset.tolist()) | {
            w for w in self.worker_ids if self.phase_of(w).name == "reset"
        }

    def _owing(self) -> list[int]:
        """Return the ids of workers that have a command to carry out."""
        return sorted(set(self.worker_of[~self.words.has_answered()].tolist()))

    def _look_around(self) -> None:
        """Notice deaths and successors, and read workers' messages so that none blocks on a full socket."""
        self._looked_at = time.monotonic()
        self.supervisor.continue_replacing()
        owing = self._owing()
        self._is_reading = self.supervisor.notice_deaths(owing)
        for worker_id, limit_s in self._overdue.look(
            w for w in owing if w not in self.supervisor.absent
        ).items():
            self.supervisor.give_up_late([worker_id], limit_s)

    def _collect(self) -> None:
        """Read the messages that the status words announce into `outcome`."""
        words = self.words
        # All are 0, as after most commands: a tenth of the time of an array.
        if not words.status.tobytes().strip(b"\0"):
            return
        answered = np.flatnonzero(words.has_answered())  # 4
        announced = answered[words.status[answered] != 0]
        for worker_id in set(self.worker_of[announced].tolist()):
            if not self.supervisor.is_being_replaced(worker_id):
                drain(self.crew.workers[worker_id])
        words.status[announced] = 0

    # ---- mail --------------------------------------------------------------------------------

    def prepare(self, message: messages.Prepare) -> None:
        """Send the extras of an env's next command ahead of it, or a factory call without waiting for the worker."""
        worker_id = int(self.worker_of[message.env_id])
        self.supervisor.await_serving([worker_id])
        mail(self.crew.workers[worker_id], message, waits=message.call is None)

    def seed(self, root_seed: int, episodes: Sequence[int] | None = None) -> None:
        self.supervisor.refuse_lost(self.worker_ids)
        # Workers set it as well, but one that has died unnoticed would not.
        self.slab.words["episode"][:] = episodes or 0
        self.crew.equipment.set_seed(root_seed, episodes)

    def question(
        self,
        what: str,
        env_ids: list[int],
        **question: Any,
    ) -> dict[int, list[int]]:
        """Begin `ask` without waiting; return worker id -> its envs, for `answers`."""
        by_worker: dict[int, list[int]] = {}
        for env_id in env_ids:
            by_worker.setdefault(int(self.worker_of[env_id]), []).append(env_id)
        self.supervisor.await_serving(by_worker)
        if gone := [
            error
            for worker_id, error in self.supervisor.lost.items()
            if worker_id in by_worker
        ]:
            raise gone[0]
        args = question.pop("args", ())
        self._num_questions += 1
        for worker_id, ids in by_worker.items():
            own = args
            if what in messages.PER_ENV:
                own = tuple(args[env_ids.index(i)] for i in ids)
            mail(
                self.crew.workers[worker_id],
                messages.Ask(
                    what=what,
                    env_ids=tuple(ids),
                    args=own,
                    number=self._num_questions,
                    **question,
                ),
            )
        return by_worker

    def has_answered(self, by_worker: dict[int, list[int]]) -> bool:
        return all(has_answered(self.crew.workers[w]) for w in by_worker)

    def answers(self, by_worker: dict[int, list[int]], what: str) -> dict[int, Any]:
        """Wait for the answers to the latest question."""
        return merge_answers(
            by_worker,
            lambda worker_id: self._answer(worker_id, by_worker[worker_id], what),
        )

    def _answer(self, worker_id: int, env_ids: list[int], what: str) -> dict[int, Any]:
        """Return a worker's answers. Those to earlier questions are dropped; a worker that dies or is late is lost."""
        timeout_s = {"rebuild": self.options.build_timeout_s}.get(
            what,
            self.options.reset_timeout_s,
        )
        worker = self.crew.workers[worker_id]
        try:
            frame = await_frame(worker, what, timeout_s, self._num_questions)
        except EnvherdError as error:
            self.supervisor.declare_lost(worker_id, error)
            raise
        if frame["kind"] == "fault":
            raise env_error([frame], worker_id, worker.pid, worker.gpu)
        return dict(zip(env_ids, frame["values"], strict=True))

    # ---- rollout storages --------------------------------------------------------------------

    def attach_storage(
        self,
        target: int,
        plan: StoragePlan,
    ) -> Callable[[], np.ndarray]:
        """Make every worker map a new rollout storage as `target`; the workers touch its pages when they write."""
        self.supervisor.refuse_lost(self.worker_ids)
        segment = self._create_segment(
            plan.nbytes,
            "envherd-rollout",
            is_prefaulted=False,
        )
        self.crew.equipment.attach_storage(target, plan, segment)
        return segment.array

    def detach_storage(self, target: int) -> None:
        """Make every worker forget a rollout storage."""
        self.crew.equipment.detach_storage(target)

    # ---- facts about workers -----------------------------------------------------------------

    def worker_output(self, worker_id: int) -> str:
        return self.crew.workers[worker_id].log()

    def pid_of(self, worker_id: int) -> int:
        """Return a worker's process id."""
        return self.crew.workers[worker_id].pid

    def gpu_of(self, worker_id: int) -> str | None:
        return self.crew.workers[worker_id].gpu

    def generation_of(self, worker_id: int) -> int:
        return self.crew.workers[worker_id].generation

    def figures(self) -> list[WorkerFigures]:
        """Return the figures of each worker."""
        return [
            WorkerFigures.of(worker.pid, worker.gpu) for worker in self.crew.workers
        ]

    # ---- losses and the end ------------------------------------------------------------------

    def begin_restart(self, worker_id: int) -> None:
        self.supervisor.begin_restart(worker_id)

    def branch(
        self,
        source: int,
        targets: np.ndarray,
        give_up: Callable[[], None],
    ) -> None:
        """Put copies of the worker of an env into the places of the workers of others.

        Args:
            source: env id.
            targets: env ids, int64 `[k]`. All of these envs owe nothing, and have a worker each.
            give_up: called before the first of the workers of `targets` is killed.
        """
        self.supervisor.branch(
            int(self.worker_of[source]),
            self.worker_of[targets].tolist(),
            give_up,
        )

    def memory_of(self, worker_id: int) -> int:
        return memory_of(self.pid_of(worker_id))["uss"]

    def recycle(self, worker_id: int, *, is_anew: bool) -> None:
        self.supervisor.recycle(worker_id)
        if is_anew:
            self.slab.words["episode"][list(self.blueprint.blocks[worker_id])] -= 1

    def clear_words(self, worker_id: int) -> None:
        """Clear the announcements of mail and commands to a worker that is replaced."""
        words = self.slab.words
        self.resets_before_start[worker_id] = words["resets"][
            list(self.crew.blueprint.blocks[worker_id])
        ].max()
        words["mail_seq"][worker_id] = words["phase"][worker_id] = 0
        while self._go[worker_id].try_wait():
            # Its predecessor did not take these.
            pass

    def phase_of(self, worker_id: int) -> Phase:
        """Return the phase of a worker, and its env if known."""
        return describe_phase(int(self.slab.words["phase"][worker_id]))

    def close(self, timeout_s: float | None = None) -> None:
        """Close the envs and end the workers within `timeout_s` in all (default: the option's). Never raises."""
        self.crew.close(
            self.options.close_timeout_s if timeout_s is None else timeout_s
        )
