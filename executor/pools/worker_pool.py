"""The pool: workers that are given commands and waited for.

Guarantees:
- A command is announced only after its rows are complete, and an answer is read only after its number
  has come. An interrupt or a timeout at any instant leaves numbers that tell what is outstanding.
- A worker's death is noticed within `_LOOK_S` while a thread waits, and is logged at once; no thread spins without
  bound.
- After a loss the other workers continue, and their rows are complete.
- A worker that is being replaced owes what its predecessor was given later (`submit_later`), however often that fails.
Assumes: one caller at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from envherd.executor.batches.device_rows import Residence
from envherd.executor.batches.tensor_actions import Lend
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.base import RecyclablePool, WorkerFigures
from envherd.executor.pools.crew import Blueprint, Crew
from envherd.executor.pools.error_messages import (
    Frame,
    env_error,
    log,
    log_stall,
    merge_answers,
    worker_late,
    worker_lost,
)
from envherd.executor.pools.losses import Restarts
from envherd.executor.pools.placement import Placement
from envherd.executor.pools.replies import Outcome
from envherd.shm.segment import Segment
from envherd.shm.slab import Slab, SlabPlan, StoragePlan, plan_slab
from envherd.shm.specs import EnvSpec
from envherd.shm.sync import Doorbell
from envherd.shm.tally import Tally
from envherd.workers import messages
from envherd.workers.errors import EnvherdError, FactoryError, InternalError
from envherd.workers.protocol import Op, describe_phase, pack, pack_each

#: Seconds between looks at the workers' pidfds: while anybody waits, and where answers come too fast for a wait.
_LOOK_S, _LOOK_ANYWAY_S = 0.01, 0.03
#: The same while a worker writes a large message, which it can do only as fast as it is read.
_LOOK_WHILE_READING_S = 0.0002
#: Seconds for workers to close the envs they have built when another's factory has failed.
_FAREWELL_S = 1.0


class WorkerPool:
    """Worker processes over one slab; `start` brings it up, `close` takes it down. See `Pool`."""

    def __init__(self, blueprint: Blueprint, options: ExecutorOptions) -> None:
        self.blueprint, self.options = blueprint, options
        self.num_envs = len(blueprint.factories)
        self.worker_ids = range(len(blueprint.blocks))
        self.serving: Sequence[int] = self.worker_ids  # those that run steps: all, unless envs have two instances
        self.num_workers = len(self.serving)
        self.worker_of = np.repeat(np.arange(self.num_workers), [len(b) for b in blueprint.blocks])
        self.lost: dict[int, EnvherdError] = {}
        self.outcome = Outcome()
        self.lenders: dict[int, Lend] = {}  # workers read their inputs from the slab
        self.specs: list[EnvSpec] = []
        self.crew = Crew(blueprint, options, self._take_frame)
        #: bool `[N]`, whether a loss has taken the answer to the latest command of an env.
        self.forfeited = np.zeros(self.num_envs, bool)
        self._all_ids = np.arange(self.num_envs)
        self._lost_at = 0.0
        self.num_losses = self._number = self._asked = 0
        self.num_ahead = self.num_missed = self.num_recycled = 0
        self.holds_storages = False
        self._is_hailed, self._looked_at = False, 0.0
        self._is_reading = False  # a worker is writing more than its socket holds
        self._rebuilding: dict[int, float] = {}
        self._leaving: set[int] = set()
        self._restarts = Restarts(options)

    def start(self) -> None:
        """Start the workers, build the envs in them, and set `specs`, `plan` and `slab`.

        Raises:
            FactoryError: a factory raised or returned no env; nothing is left running.
            WorkerLost, WorkerTimeout: a worker died or was late; nothing is left running.
        """
        try:
            self.specs = self.crew.start()
            self._make_slab()
        except FactoryError:
            self.close(min(_FAREWELL_S, self.options.close_timeout_s))  # the other workers' envs end as envs should
            raise
        except BaseException:
            self.close(timeout_s=0)
            raise

    def _make_slab(self) -> None:
        self.plan: SlabPlan = plan_slab(self.specs, len(self.worker_ids), self.options.num_frames)
        segment = Segment.create(self.plan.nbytes, "envherd-slab")
        buffer = segment.array()
        self.slab = Slab(self.plan, buffer)
        self._done = Doorbell.create(buffer, self.plan.bells_offset)
        self._tally = Tally(self.slab.words)
        self._placement = Placement(self.slab.words)
        self._go = [Doorbell.create(buffer, self.plan.go_offset(w)) for w in self.worker_ids]
        self._rings = [bell.ring for bell in self._go]
        words = self.slab.words
        self._command, self._command_seq = words["command"], words["command_seq"]
        self._reply_seq, self._status = words["reply_seq"], words["status"]
        self._order = self._command_seq  # int `[N]`, by which the envs that have answered are sorted
        self._no_status = bytes(self._status.nbytes)
        self.crew.hand_over(self.plan, segment, self._knock)

    def _knock(self, worker_id: int) -> None:
        self.slab.words["mail_seq"][worker_id] = self.crew.workers[worker_id].channel.num_queued
        self._rings[worker_id]()

    def was_given(self, env_ids: np.ndarray, since: int) -> np.ndarray:
        """Return which envs were given a command after that of number `since`, bool `[k]`."""
        return np.asarray(self._command_seq[env_ids] > since)

    @property
    def number(self) -> int:
        """Number of the latest command."""
        return self._number

    @property
    def segment(self) -> Segment | None:
        """The slab's memory."""
        return self.crew.segment

    @property
    def recyclable(self) -> RecyclablePool | None:
        """This pool: the engine knows when the envs of a worker are between episodes."""
        return self

    # ---- commands ----------------------------------------------------------------------------

    def submit_all(self, op: Op, target: int, column: int, reset_ids: np.ndarray | None = None) -> None:
        """Give every env the same command, but some (int `[k]`) a RESET."""
        if self.lost or self._rebuilding:
            self._revive(self.serving)
        self._number += 1
        self._command.fill(pack(op, target, column))
        if reset_ids is not None:
            self._command[reset_ids] = pack(Op.RESET, target, column)
        self.forfeited[:] = False
        self._command_seq.fill(self._number)
        for ring in self._rings:
            ring()
        if self.lost:
            self._answer_for_lost()

    def submit(
        self, env_ids: np.ndarray, op: Op | np.ndarray, target: int, columns: np.ndarray, flags: int = 0
    ) -> None:
        """Give some envs a command each, at columns of their own.

        Args:
            env_ids: int `[k]`, no duplicates.
            op: for all of them, or int `[k]`.
            target: see `workers.protocol`.
            columns: int `[k]`.
            flags: see `workers.protocol.Flag`.
        """
        is_all = len(env_ids) == self.num_envs
        worker_ids = self.serving if is_all else set(self.worker_of[env_ids].tolist())
        self._revive(worker_ids)
        self._write(env_ids, pack_each(op, target, columns, flags, self.plan.num_frames))
        for worker_id in worker_ids:
            self._rings[worker_id]()
        if self.lost:
            self._answer_for_lost()

    def _write(self, env_ids: np.ndarray, commands: np.ndarray) -> None:
        """Write some envs' next commands, int64 `[k]`, under one number; the caller rings."""
        self._number += 1
        self._command[env_ids] = commands
        self.forfeited[env_ids] = False
        self._command_seq[env_ids] = self._number

    def _follow_up(self) -> None:
        """Give the commands that the answers so far require; called before the numbers are compared."""

    def await_workers(self, env_ids: np.ndarray) -> None:
        """Make sure that the workers of some envs serve, before anything is sent or changed for a call.

        Raises:
            WorkerLost, WorkerTimeout: one is lost and stays so.
        """
        if self.lost or self._rebuilding:
            self._revive(set(self.worker_of[env_ids].tolist()))

    def nudge(self) -> None:
        """Make every worker look for commands and messages."""
        for worker_id in self.worker_ids:
            self._knock(worker_id)

    def _answer_for_lost(self) -> None:
        """Let commands to workers that had been lost before end in that loss at once."""
        for worker_id, error in self.lost.items():
            if worker_id not in self._rebuilding and self._forfeit(worker_id):
                self.outcome.losses[worker_id] = error
                self._lost_at = time.monotonic()

    def _forfeit(self, worker_id: int) -> bool:
        """Take what a lost worker's envs owe as answered; return whether they owed anything."""
        env_ids = np.array(self.blueprint.blocks[worker_id])
        owing = env_ids[~self._has_answered()[env_ids]]
        self.forfeited[owing] = True  # first: an interrupt must not leave an answer that no worker gave
        self.outcome.forget_rows(owing)
        self._status[owing] = 0
        self._reply_seq[owing] = self._command_seq[owing]
        return bool(len(owing))

    def submit_later(self, env_ids: np.ndarray, op: Op, target: int, columns: np.ndarray, flags: int = 0) -> None:
        """As `submit`, for envs of a worker that is being rebuilt: its successor finds the commands when it comes."""
        self._write(env_ids, pack_each(op, target, columns, flags, self.plan.num_frames))

    def _has_answered(self) -> np.ndarray:
        """Return which envs owe no answer, bool `[N]`."""
        return np.asarray(self._command_seq == self._reply_seq)

    def outstanding(self) -> np.ndarray:
        """Return the env ids that owe an answer, int `[k]`."""
        return np.flatnonzero(~self._has_answered())

    def is_idle(self) -> bool:
        """Return whether no env owes an answer."""
        return self._command_seq.tobytes() == self._reply_seq.tobytes()

    def wait_all(self, timeout_s: float | None, more_for_resets_s: float | None = 0.0) -> bool:
        """Wait for every outstanding answer; what else happened is in `outcome`.

        Args:
            timeout_s: seconds; a worker that is late is killed and its loss is a `WorkerTimeout`. None waits for ever.
            more_for_resets_s: seconds that a worker has in addition, if it has begun a reset meanwhile.

        Returns:
            Whether all envs have answered. False only if a worker was lost, losses are raised, and
            `options.loss_grace_s` has passed.
        """
        self._place()
        wait, num_tokens = self._done.wait, 0
        while True:
            if num_tokens >= self.num_workers:
                self._follow_up()
                if self.is_idle():
                    break
            if not wait(_LOOK_S):
                self._wait_slowly(self._all_ids, self.num_envs, timeout_s, more_for_resets_s)
                break
            num_tokens += 1
        self._collect()
        return self.is_idle()

    def wait_some(  # the kinds of waits
        self,
        env_ids: np.ndarray,
        count: int,
        timeout_s: float | None,
        more_for_resets_s: float | None = 0.0,
        *,
        kill_late: bool = True,
        through_losses: bool = False,
    ) -> np.ndarray:
        """Wait until at least `count` of some envs have answered; return those that have, oldest command first.

        Args:
            env_ids: int `[k]`, which envs.
            count: at most `k`.
            timeout_s: seconds; None waits for ever.
            more_for_resets_s: see `wait_all`.
            kill_late: kill a worker that is late (a `WorkerTimeout` in `outcome`), or just return fewer.
            through_losses: wait for the others however long ago a worker was lost.
        """
        if time.monotonic() > self._looked_at + _LOOK_ANYWAY_S:
            self._look_around()
        while self._done.try_wait():
            pass  # tokens are hints; those of answers that no thread waited for must not pile up
        self._follow_up()
        ready = self._ready(env_ids)
        if len(ready) < count:
            self._wait_slowly(
                env_ids, count, timeout_s, more_for_resets_s, kill_late=kill_late, through_losses=through_losses
            )
            ready = self._ready(env_ids)
        self._collect()
        return ready[self._order[ready].argsort(kind="stable")]

    def _ready(self, env_ids: np.ndarray) -> np.ndarray:
        return env_ids[self._has_answered()[env_ids]]

    def _wait_slowly(  # the kinds of waits
        self,
        env_ids: np.ndarray,
        count: int,
        timeout_s: float | None,
        more_for_resets_s: float | None,
        *,
        kill_late: bool = True,
        through_losses: bool = False,
    ) -> None:
        """Wait token by token, looking around whenever none comes.

        Tokens are taken before the numbers are compared, so that none is missed and none pile up.
        """
        began = time.monotonic()
        end = None if timeout_s is None else began + timeout_s
        stall_at = began + self.options.stall_log_s
        num_resets = self.slab.words["resets"].copy()
        while True:
            while self._done.try_wait():
                pass
            self._follow_up()
            total, missing = self._tally.total(), count - len(self._ready(env_ids))
            if missing <= 0 or self._is_hailed:
                return
            look_s = _LOOK_WHILE_READING_S if self._is_reading else _LOOK_S
            left = look_s if end is None else min(look_s, end - time.monotonic())
            if not self._tally.expect(total + missing) or (left > 0 and self._done.wait(left)):
                continue
            self._look_around()
            now = time.monotonic()
            if not through_losses and self._must_raise(now):
                return
            if end is not None and now >= end:
                resetting = self._that_reset(num_resets) if more_for_resets_s != 0 else set()
                if kill_late:
                    self._give_up_late(end - began, resetting)
                if not (kill_late and resetting.intersection(self._owing())):
                    return
                end = None if more_for_resets_s is None else end + more_for_resets_s
                more_for_resets_s = 0.0
            if end is None and now >= stall_at:
                stall_at = now + self.options.stall_log_s
                self._log_stalls(now - began)

    def _log_stalls(self, waited_s: float) -> None:
        for worker_id in self._owing():
            if worker_id not in self._rebuilding:
                log_stall(self.crew.workers[worker_id], int(self.slab.words["phase"][worker_id]), waited_s)

    def _must_raise(self, now: float) -> bool:
        """Return whether a loss has waited for the other workers' answers long enough."""
        grace_s = self.options.loss_grace_s
        is_raised = bool(self.outcome.losses) and self.options.on_worker_loss == "raise"
        return is_raised and grace_s is not None and now >= self._lost_at + grace_s

    def _that_reset(self, num_resets: np.ndarray) -> set[int]:
        """Return the workers that are in a reset, or have made one since these were counted (int `[N]`)."""
        words = self.slab.words
        have_reset = set(self.worker_of[words["resets"] != num_resets].tolist())
        return have_reset | {w for w in self.worker_ids if describe_phase(int(words["phase"][w]))[0] == "reset"}

    def hail(self) -> None:
        """Have whoever waits in `wait_some` return with what there is, until `unhail`. From any thread."""
        self._is_hailed = True
        self._done.ring()

    def unhail(self) -> None:
        """Let waits last again; whoever holds the pool now calls it."""
        self._is_hailed = False

    def _owing(self) -> list[int]:
        """Return the ids of workers that have a command to carry out."""
        return sorted(set(self.worker_of[self._command_seq != self._reply_seq].tolist()))

    def _look_around(self) -> None:
        """Notice deaths and successors, and read what workers have written so that none blocks on a full socket."""
        self._looked_at = now = time.monotonic()
        self._place()
        for worker_id, began in list(self._rebuilding.items()):
            passed_s, limit = now - began, self.options.build_timeout_s
            try:
                if worker_id in self._leaving:
                    if passed_s >= 0:
                        self._succeed(worker_id)
                elif self.crew.has_answered(worker_id) or (limit is not None and passed_s > limit):
                    self._take_up(worker_id)
            except EnvherdError as error:
                self.outcome.losses[worker_id] = error
        self._is_reading = False
        for worker_id in self._owing():
            if worker_id in self._rebuilding or worker_id in self.lost:
                continue
            has_exited = self.crew.workers[worker_id].has_exited()
            self.crew.drain(worker_id)
            self._is_reading |= self.crew.workers[worker_id].channel.is_in_frame
            if has_exited:
                self._declare_lost(worker_id, self._death(worker_id))

    def _place(self) -> None:
        if self._placement.is_due(time.monotonic()):
            self._placement.look([w.pid if self.is_serving(w.worker_id) else 0 for w in self.crew.workers])

    def _give_up_late(self, timeout_s: float, excused: set[int]) -> None:
        for worker_id in self._owing():
            if worker_id in self._rebuilding or worker_id in excused:
                continue
            phase, env_id = describe_phase(int(self.slab.words["phase"][worker_id]))
            env_ids = self.blueprint.blocks[worker_id]
            self._declare_lost(worker_id, worker_late(self.crew.workers[worker_id], env_ids, phase, timeout_s, env_id))

    def _death(self, worker_id: int) -> EnvherdError:
        phase, env_id = describe_phase(int(self.slab.words["phase"][worker_id]))
        return worker_lost(self.crew.workers[worker_id], self.blueprint.blocks[worker_id], phase, env_id)

    def _declare_lost(self, worker_id: int, error: EnvherdError) -> None:
        """Take a worker out of service: its words are the parent's now."""
        self.num_losses += 1
        self._lost_at = time.monotonic()
        self.lost[worker_id] = error
        self.outcome.losses[worker_id] = error
        self.crew.workers[worker_id].kill()
        self._forfeit(worker_id)
        log.warning("%s", error.message)  # not the error itself: what keeps the record would keep its frames

    def _collect(self) -> None:
        """Read the messages that the status words announce into `outcome`."""
        if self._status.tobytes() == self._no_status:
            return
        answered = self._ready(self._all_ids)  # before reading: what these envs have written is there
        announced = answered[self._status[answered] != 0]
        for worker_id in set(self.worker_of[announced].tolist()):
            if worker_id not in self._rebuilding:
                self.crew.drain(worker_id)
        self._status[announced] = 0

    def _take_frame(self, frame: Frame) -> None:
        self.outcome.take(frame)

    def take_outcome(self, env_ids: np.ndarray | None = None) -> Outcome:
        """Return what happened since the last call, and forget it.

        Args:
            env_ids: keep what other envs have said for later, but not losses; None takes all.
        """
        outcome, self.outcome = self.outcome.hand_out(env_ids)
        return outcome

    # ---- mail --------------------------------------------------------------------------------

    def prepare(self, message: messages.Prepare) -> None:
        """Send the extras of an env's next command ahead of it."""
        worker_id = int(self.worker_of[message.env_id])
        self._revive([worker_id])
        self.crew.mail(worker_id, message)

    def seed(self, root_seed: int) -> None:
        """Use a new root seed in every worker."""
        self._refuse_lost(self.worker_ids)
        self.slab.words["episode"][:] = 0  # the workers will do so too; one that has died unnoticed would not
        self.crew.seed(root_seed)

    def ask(self, what: str, env_ids: list[int], **question: Any) -> dict[int, Any]:
        """Ask envs `env_ids` for something that is not a step; see `messages.Ask`.

        `args` in the question has one item per env for "set", "each" and "load_state_dict".

        Returns:
            env id -> value as it crossed (`{"plain": ...}` or `{"pickled": ...}`).

        Raises:
            EnvError: an env raised.
            WorkerLost: a worker died; the others have answered. If it had died before, step or reset its envs first.
        """
        return self.answers(self.question(what, env_ids, **question), what)

    def question(self, what: str, env_ids: list[int], **question: Any) -> dict[int, list[int]]:
        """Ask as `ask` does, and do not wait; return worker id -> whom it asks, for `answers`."""
        by_worker: dict[int, list[int]] = {}
        for env_id in env_ids:
            by_worker.setdefault(int(self.worker_of[env_id]), []).append(env_id)
        self._revive(by_worker)
        if gone := [worker_id for worker_id in by_worker if worker_id in self.lost]:
            raise self.lost[gone[0]]
        args = question.pop("args", ())
        self._asked += 1
        for worker_id, ids in by_worker.items():
            own = tuple(args[env_ids.index(i)] for i in ids) if what in messages.PER_ENV else args
            ask = messages.Ask(what=what, env_ids=tuple(ids), args=own, number=self._asked, **question)
            self.crew.mail(worker_id, ask)
        return by_worker

    def has_answered(self, by_worker: dict[int, list[int]]) -> bool:
        """Return whether `answers` would not block."""
        return all(map(self.crew.has_answered, by_worker))

    def answers(self, by_worker: dict[int, list[int]], what: str) -> dict[int, Any]:
        """Wait for the answers to the latest question."""
        return merge_answers(by_worker, lambda worker_id: self._answer(worker_id, by_worker[worker_id], what))

    def _answer(self, worker_id: int, env_ids: list[int], what: str) -> dict[int, Any]:
        try:
            frame = self.crew.await_frame(worker_id, what, self.options.reset_timeout_s, self._asked)
        except EnvherdError as error:
            self._declare_lost(worker_id, error)
            raise
        if frame["kind"] == "fault":
            raise env_error([frame], worker_id, self.pid_of(worker_id))
        return dict(zip(env_ids, frame["values"], strict=True))

    # ---- rollout storages --------------------------------------------------------------------

    def settle(self, device: torch.device | None) -> dict[int, Residence]:  # noqa: ARG002
        """Leave nothing on a device: what workers give goes through the slab."""
        return {}

    def attach_storage(self, target: int, plan: StoragePlan) -> Segment:
        """Make every worker map a new rollout storage as `target`; its pages are touched by those that write them."""
        self._refuse_lost(self.worker_ids)
        segment = Segment.create(plan.nbytes, "envherd-rollout", is_prefaulted=False)
        self.crew.attach_storage(target, plan, segment)
        return segment

    def detach_storage(self, target: int) -> None:
        """Make every worker forget a rollout storage."""
        self.crew.detach_storage(target)

    # ---- facts about workers -----------------------------------------------------------------

    def worker_output(self, worker_id: int) -> str:
        """Return what a worker has printed, as far as it is kept."""
        return self.crew.workers[worker_id].log()

    def pid_of(self, worker_id: int) -> int:
        """Return a worker's process id."""
        return self.crew.workers[worker_id].pid

    def generation_of(self, worker_id: int) -> int:
        """Return how often a worker was replaced."""
        return self.crew.workers[worker_id].generation

    def is_alive(self, worker_id: int) -> bool:
        """Return whether a worker's process runs."""
        return not self.crew.workers[worker_id].has_exited()

    def figures(self) -> list[WorkerFigures]:
        """Return what the machine says of each worker."""
        pids = [self.pid_of(worker_id) for worker_id in self.worker_ids]
        return [WorkerFigures.of(pid) for pid in pids]

    # ---- losses and the end ------------------------------------------------------------------

    def begin_restart(self, worker_id: int) -> None:
        """Start a successor of a lost worker; it builds its envs while others go on.

        Raises:
            WorkerLost, WorkerTimeout: too many restarts within the window (a crash loop).
        """
        self.outcome.losses.pop(worker_id, None)
        delay_s = self._restarts.next_delay_s(worker_id)
        if delay_s is None:
            raise self.lost[worker_id]
        self._leave(worker_id, delay_s)
        self.lost.pop(worker_id, None)
        if not delay_s:
            self._succeed(worker_id)

    def is_serving(self, worker_id: int) -> bool:
        """Return whether a worker is there: neither lost nor being replaced."""
        return worker_id not in self.lost and worker_id not in self._rebuilding

    def recycle(self, worker_id: int) -> None:
        """Close the envs of a worker that has nothing to do, and begin to replace it."""
        self.num_recycled += 1
        self._leave(worker_id)
        self.crew.dismiss(worker_id, self.options.close_timeout_s)
        self._succeed(worker_id)

    def _leave(self, worker_id: int, delay_s: float = 0.0) -> None:
        self._leaving.add(worker_id)  # from now on it is replaced when it is needed, whatever breaks this off
        self._rebuilding[worker_id] = time.monotonic() + delay_s

    def _succeed(self, worker_id: int) -> None:
        """Start the successor of a worker that has ended or is to be ended.

        Raises:
            WorkerLost: no process can be started; the worker is lost.
        """
        words = self.slab.words
        words["mail_seq"][worker_id] = words["phase"][worker_id] = 0
        while self._go[worker_id].try_wait():
            pass  # tokens that its predecessor did not take
        try:
            self.crew.replace(worker_id)
        except EnvherdError as error:
            self._give_up_on(worker_id, error)
            raise
        self._rebuilding[worker_id] = time.monotonic()
        self._leaving.discard(worker_id)

    def _refuse_lost(self, worker_ids: Iterable[int]) -> None:
        """Raise the loss of a worker that is lost and stays so."""
        if self.lost and self.options.on_worker_loss != "restart":
            for worker_id in worker_ids:
                if worker_id in self.lost:
                    raise self.lost[worker_id]

    def _revive(self, worker_ids: Iterable[int]) -> None:
        """Make sure that workers are in service before they are given something to do.

        Those that are lost but may be replaced are left as they are: their loss is their answer.

        Raises:
            WorkerLost, WorkerTimeout: a worker is lost and stays so.
        """
        if not (self.lost or self._rebuilding):
            return
        self._refuse_lost(worker_ids)
        for worker_id in worker_ids:
            while worker_id in self._rebuilding:
                if worker_id in self._leaving:
                    time.sleep(max(0.0, self._rebuilding[worker_id] - time.monotonic()))
                    self._succeed(worker_id)
                self._take_up(worker_id)

    def _take_up(self, worker_id: int) -> None:
        """Wait until a successor has built its envs, and put it into service; begin to replace one that cannot.

        Raises:
            WorkerLost, WorkerTimeout, ...: it did not come up, and no further successor is allowed.
        """
        if not self.crew.workers[worker_id].is_attached:  # an interrupt may have come right after that
            try:
                self._check_specs(worker_id, self.crew.collect_specs(worker_id))
                self.crew.attach(worker_id)
            except EnvherdError as error:
                self._try_another(worker_id, error)
                return
            except BaseException:  # an interrupt: begin again when the worker is needed
                self._leave(worker_id)
                raise
        self._rebuilding.pop(worker_id, None)
        self._knock(worker_id)

    def _try_another(self, worker_id: int, error: EnvherdError) -> None:
        """Begin to replace a successor that did not come up. What its envs owe stays owed."""
        self.num_losses += 1
        self.crew.workers[worker_id].kill()
        delay_s = self._restarts.next_delay_s(worker_id)
        if delay_s is None:
            self._give_up_on(worker_id, error)
            raise error
        log.warning("%s Another process is started in its place.", error.message)
        self._leave(worker_id, delay_s)

    def _give_up_on(self, worker_id: int, error: EnvherdError) -> None:
        """Take a worker that was being replaced for lost."""
        self._declare_lost(worker_id, error)
        self._leaving.discard(worker_id)
        self._rebuilding.pop(worker_id, None)

    def _check_specs(self, worker_id: int, specs: list[EnvSpec]) -> None:
        for env_id, spec in zip(self.blueprint.blocks[worker_id], specs, strict=True):
            if spec != self.specs[env_id]:
                difference = self.specs[env_id].difference(spec)
                raise InternalError(f"restart failed: env {env_id} came back with another spec: {difference}.")

    def close(self, timeout_s: float | None = None) -> None:
        """Close the envs and end the workers within `timeout_s` in all (default: the option's). Never raises."""
        self.crew.close(self.options.close_timeout_s if timeout_s is None else timeout_s)
