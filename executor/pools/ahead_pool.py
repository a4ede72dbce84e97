"""Reset-ahead: every env has two instances in two workers, and its next episode begins before the caller requests it.

Guarantees:
- The data are those of a run without it; see `process.ahead` for what envs must fulfil.
- A default reset goes to the prepared instance, and waits for it if it is not ready. The serving instance makes the
  first reset, resets with a seed or options, and those after `set_seed`, `call`, `set` and `load_state_dict`, in the
  ordinary way.
- If a spare dies or is being replaced, no row is affected: its env is reset in the ordinary way. With
  `on_worker_loss="restart"` the spare is replaced while the others continue; with "raise" the env has no spare from
  then on. The same holds for an env changed by `call`, `set` or `load_state_dict`, because a new instance would lack
  the change.
- A STEP_RESET is answered by its step, or, if that ended the episode, by its reset. The reports of both form one
  answer, as from one worker, and are lost together.
- The serving instance answers `get`, `render` and `state_dict`. Requests that may change an env (`call`, `set`,
  `load_state_dict`) go to both instances, and the serving one's answers are returned.
Assumes: one caller at a time, as the pool.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.base import RecyclablePool
from envherd.executor.pools.crew import Blueprint
from envherd.executor.pools.error_messages import Frame, worker_late
from envherd.executor.pools.fused_words import FusedWords
from envherd.executor.pools.spare_supervisor import SpareSupervisor
from envherd.executor.pools.turns import Turns
from envherd.executor.pools.waiting import Deadline
from envherd.executor.pools.worker_pool import WorkerPool
from envherd.workers import messages
from envherd.workers.errors import EnvherdError, SpecError
from envherd.workers.process.ahead import unpack_turn
from envherd.workers.processes import memory_of
from envherd.workers.protocol import RESET, RING, STEP, STEP_RESET, Op, Status, pack, unpack

_OK = int(Status.OK)  # for arrays; see `workers.protocol.STEP`


class AheadPool(WorkerPool):
    """A pool with two workers per env, `e` and `N + e`.

    A STEP_RESET is given as a STEP; if that ends the episode, the pool gives a RESET, perhaps to the other worker.

    Args:
        blueprint: with one env in each block.
        options: of the executor.
    """

    def __init__(self, blueprint: Blueprint, options: ExecutorOptions) -> None:
        super().__init__(dataclasses.replace(blueprint, blocks=blueprint.blocks * 2), options)
        num_envs = self.num_workers = self.num_envs
        self.worker_of = np.arange(num_envs)
        self.why_python = [*self.why_python, "reset_ahead=True"]  # only the answer shows whether a reset follows a step
        self.supervisor: SpareSupervisor
        self.serving: list[int] = list(range(num_envs))
        self.words: FusedWords
        self._reset_limit_s: float | None = None  # for such a RESET, in the present wait

    def _make_slab(self) -> None:
        specs, self.specs = self.specs, self.specs[: self.num_envs]
        if batched := [i for i, spec in enumerate(self.specs) if spec.batch_shape]:
            raise ValueError(
                f"reset_ahead failed: expected envs of one row, got batches of them (env {batched[0]}: "
                f"{self.specs[batched[0]].batch_shape}). Their rows end at different steps."
            )
        for env_id, (spec, other) in enumerate(zip(self.specs, specs[self.num_envs :], strict=True)):
            if spec != other:
                raise SpecError(
                    f"reset_ahead failed: expected equal specs of the two instances of env {env_id}, got a difference: "
                    f"{spec.difference(other)}. Its factory must build the same env every time."
                )
        super()._make_slab()

    def _make_words(self) -> FusedWords:
        words = FusedWords(self.slab, self._clock)
        self.outcome.held_back = words.is_in_parts
        return words

    def _make_supervisor(self) -> SpareSupervisor:
        self.turns = Turns(self.slab.words, self.worker_of, self.serving)
        return SpareSupervisor(self, self.crew, self.options, self.turns)

    @property
    def num_ahead(self) -> int:
        """Resets whose episode was ready when it was requested."""
        return self.turns.num_ahead

    @property
    def num_missed(self) -> int:
        """All other resets."""
        return self.turns.num_missed

    @property
    def recyclable(self) -> RecyclablePool | None:
        """None: this pool itself replaces workers, when they do not serve."""
        return None

    def _make_caller(self) -> None:
        """Return None: an answer may require another command."""

    # ---- commands ----------------------------------------------------------------------------

    def submit_all(self, op: Op, target: int, column: int, reset_ids: np.ndarray | None = None) -> None:
        ops = np.full(self.num_envs, int(op), np.int64)
        if reset_ids is not None:
            ops[reset_ids] = RESET
        self.submit(self._all_ids, ops, target, np.full(self.num_envs, column))

    def submit(
        self, env_ids: np.ndarray, op: Op | np.ndarray, target: int, columns: np.ndarray, flags: int = 0
    ) -> None:
        """Give each of some envs a command; a reset may go to an env's other worker. See `Pool.submit`."""
        self.supervisor.take_up_spares()
        self.await_workers(env_ids)
        ops = np.full(len(env_ids), op if isinstance(op, np.ndarray) else int(op), np.int64)
        reset_ids = env_ids[ops == RESET].tolist()
        for env_id in reset_ids:
            self._hand_over(env_id)
        self.words.note_order(env_ids, ops, pack(RESET, target, columns + (target != RING), int(flags)))
        super().submit(env_ids, np.where(ops == STEP_RESET, STEP, ops), target, columns, flags)
        for env_id in reset_ids:
            self._send_off(self.turns.spare_of(env_id))

    def await_workers(self, env_ids: np.ndarray) -> None:
        """Raise the loss of a worker of some envs that is not replaced, unless the env's other worker can take over."""
        self.supervisor.refuse_lost(self.worker_of[env_ids].tolist())

    def submit_later(self, env_ids: np.ndarray, op: Op, target: int, columns: np.ndarray, flags: int = 0) -> None:
        """The same as `submit`: while a worker is being replaced, the env's other one takes the command."""
        is_served = np.array([self.supervisor.is_there(self.turns.spare_of(i)) for i in env_ids.tolist()], bool)
        if is_served.any():
            self.words.complete(env_ids[is_served])
            self.submit(env_ids[is_served], op, target, columns[is_served], flags)
        if not is_served.all():
            self.words.note_order(env_ids[~is_served], int(op), 0)
            super().submit_later(env_ids[~is_served], op, target, columns[~is_served], flags)

    def wake_workers(self) -> None:
        """Make every worker look for commands; an interrupt may have come after a turn was written."""
        self.turns.read_again()
        super().wake_workers()

    # ---- resets after steps ------------------------------------------------------------------

    def _follow_up(self) -> None:
        """Give a RESET to the envs whose STEP_RESET has ended their episode."""
        env_ids = self.words.take_ended()
        if len(env_ids):
            self._reset_ended(env_ids)

    def _reset_ended(self, env_ids: np.ndarray) -> None:
        """Reset envs whose steps have ended their episodes. Until the numbers are written, it can be repeated."""
        words = self.words
        for env_id in env_ids[words.status[env_ids] != _OK].tolist():
            self.crew.drain(int(self.worker_of[env_id]))  # the step's reports, before the reset's
            words.status[env_id] = _OK
        for env_id in env_ids.tolist():
            self._hand_over(env_id)
        words.write_resets(env_ids)
        for env_id in env_ids.tolist():
            self._rings[int(self.worker_of[env_id])]()
            self._send_off(self.turns.spare_of(env_id))

    def _collect(self) -> None:
        is_answered = self.words.has_answered()
        super()._collect()
        self.words.forget_following(is_answered)

    def _take_frame(self, frame: Frame) -> None:
        env_id = frame.get("env_id")
        if env_id is not None and self.words.is_following(env_id):
            self.outcome.take_reset(frame)
        else:
            self.outcome.take(frame)

    def _wait_slowly(
        self, env_ids: np.ndarray, count: int, deadline: Deadline, *, through_losses: bool = False
    ) -> None:
        self._reset_limit_s = deadline.reset_limit_s
        try:
            super()._wait_slowly(env_ids, count, deadline, through_losses=through_losses)
        finally:
            self._reset_limit_s = None

    def _look_around(self) -> None:
        super()._look_around()
        limit_s = self._reset_limit_s
        for env_id in self.words.late_following(limit_s) if limit_s is not None else ():
            worker_id = int(self.worker_of[env_id])
            if self.is_serving(worker_id):
                error = worker_late(self.crew.workers[worker_id], (env_id,), "reset", limit_s or 0.0, env_id)
                self.supervisor.declare_lost(worker_id, error)

    def _that_reset(self, num_resets: np.ndarray) -> set[int]:
        return super()._that_reset(num_resets) | set(self.worker_of[self.words.owes_following()].tolist())

    # ---- turns -------------------------------------------------------------------------------

    def _hand_over(self, env_id: int) -> None:
        """Choose the worker that begins an idle env's next episode; the other worker prepares the one after it."""
        self._step_in(env_id)
        turns, supervisor = self.turns, self.supervisor
        if supervisor.is_lost(turns.server_of(env_id)):
            return  # which is the answer
        is_handed = not turns.is_stale[env_id] and supervisor.is_there(turns.spare_of(env_id))
        turns.begin_episode(env_id, is_handed=is_handed)

    def _step_in(self, env_id: int) -> None:
        """Make an env's spare serve it, if the serving worker is being replaced."""
        turns, supervisor = self.turns, self.supervisor
        is_missing = supervisor.is_being_replaced(turns.server_of(env_id))
        if is_missing and supervisor.is_there(turns.spare_of(env_id)):
            turns.swap(env_id)

    def _send_off(self, worker_id: int) -> None:
        """Wake a spare to prepare the episode in its env's turn; replace the spare first, if it must be replaced."""
        if not self.supervisor.is_there(worker_id):
            return
        if self._is_due(worker_id):
            with contextlib.suppress(EnvherdError):  # no further process can be started: see `_give_up_on`
                self.recycle(worker_id, is_anew=False)  # its successor prepares the episode
        else:
            self._rings[worker_id]()

    def _is_due(self, worker_id: int) -> bool:
        options, turns = self.options, self.turns
        if turns.is_changed[worker_id % self.num_envs]:
            return False
        if options.recycle_after is not None and turns.episodes[worker_id] >= options.recycle_after:
            return True
        limit = options.max_worker_memory
        return limit is not None and memory_of(self.pid_of(worker_id))["uss"] > limit

    # ---- mail --------------------------------------------------------------------------------

    def prepare(self, message: messages.Prepare) -> None:
        self._step_in(message.env_id)
        if message.has_seed or message.options:
            self.turns.is_stale[message.env_id] = True
        super().prepare(message)

    def seed(self, root_seed: int, episodes: Sequence[int] | None = None) -> None:
        self.turns.forget_episodes()
        super().seed(root_seed, episodes)

    def question(self, what: str, env_ids: list[int], **question: Any) -> dict[int, list[int]]:
        """Ask as `WorkerPool.question` does; requests that may change envs also go to their other instances."""
        args = question.get("args", ())
        by_worker = super().question(what, env_ids, **question)
        for position, env_id in enumerate(env_ids) if what in messages.CHANGES else ():
            self.turns.is_stale[env_id] = self.turns.is_changed[env_id] = True
            spare = self.turns.spare_of(env_id)
            if self.supervisor.is_there(spare):
                own = (args[position],) if what in messages.PER_ENV else args
                ask = messages.Ask(what=what, env_ids=(env_id,), is_silent=True, **{**question, "args": own})
                self.crew.mail(spare, ask)
        return by_worker

    def prepared_by(self, env_id: int, worker_id: int) -> int | None:
        server, following = unpack_turn(int(self.slab.words["turn"][env_id]))
        if server != worker_id or following is None:
            return following
        episode = int(self.slab.words["episode"][env_id])
        return episode if episode < following else None  # it was handed the env before it had prepared the episode

    # ---- what the supervisor uses ------------------------------------------------------------

    def owes_reset(self, env_id: int) -> bool:
        """Return whether an env has a RESET to answer."""
        words = self.words
        is_owed = words.command_seq[env_id] != words.reply_seq[env_id]
        return bool(is_owed) and unpack(int(words.command[env_id]))[0] == Op.RESET

    def forget_messages(self, env_id: int) -> None:
        """Forget that an env has announced messages."""
        self.words.status[env_id] = 0

    def ring(self, worker_id: int) -> None:
        """Make a worker look for commands and turns."""
        self._rings[worker_id]()
