"""Commands of any mix in one round trip: some envs step, others are reset; nothing is made of the rows yet.

For callers that read arrays rather than TensorDicts. Inputs are written to the slab beforehand.

Guarantees: as those of steps and resets (an env that has ended is not stepped, what one env raises or loses
leaves the others' rows whole), and the two halves may be apart: between `start` and `finish` the envs
concerned are pending, and refused to everybody else. After a `finish` that ran out of time or was
interrupted, those envs need a reset; the next call waits for what is still under way, and drops it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from envherd.executor.pools.error_messages import Frame
from envherd.executor.protocol.engine import Engine
from envherd.workers.errors import EnvherdError, ResetNeeded
from envherd.workers.protocol import RING, Op

_RESET, _STEP_RESET = int(Op.RESET), int(Op.STEP_RESET)


class Commands:
    """Starts and finishes the commands of one engine; its callers hold the engine's turn.

    Attributes:
        faults: env id -> what it raised in the latest commands.
        dead: int `[k]`, the envs that raised or were lost in the latest commands.
        column: the ring column of the latest commands that were for all envs.
        ended_ids: int `[k]`, the envs whose episodes ended with the latest steps of all envs; None for none.
        has_resets: whether the latest commands have reset any env.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ops = np.zeros(engine.num_envs, np.int64)
        self._columns = np.zeros(engine.num_envs, np.int64)
        self._uniform: Op | None = None  # what all envs do but those of `_reset_ids`, if the latest were `start_steps`
        self._reset_ids: np.ndarray | None = None
        self.faults: dict[int, Frame] = {}
        self.dead = engine.all_ids[:0]
        self.ended_ids: np.ndarray | None = None
        self.column = 0
        self.has_resets = False

    def take_for_running(self) -> None:
        """Let envs that were never reset be stepped, where their family allows that."""
        self._engine.allow_steps()

    def start_steps(self, op: Op, reset_ids: np.ndarray | None = None) -> None:
        """Step all envs, but reset some instead.

        Args:
            op: STEP or STEP_RESET.
            reset_ids: int `[k]`, different; their `next` will say reward 0 and no flag. None for none.

        Raises:
            Busy, ResetNeeded: refused, nothing was sent.
            WorkerLost, WorkerTimeout: a worker had been lost before.
        """
        engine = self._engine
        engine.refuse_rolling()
        if engine.num_pending:
            engine.refuse_pending(engine.all_ids)
        rows = engine.rows
        if rows.has_ended:
            self._refuse_ended_but(reset_ids)
        self.column = column = rows.next_column()
        self._columns.fill(column)
        self._ops.fill(op)
        if reset_ids is not None:
            self._ops[reset_ids] = _RESET
            rows.blank_steps(column, reset_ids)
        self._uniform, self._reset_ids = op, reset_ids
        self._give(engine.all_ids, lambda: engine.pool.submit_all(op, RING, column, reset_ids))

    def _refuse_ended_but(self, reset_ids: np.ndarray | None) -> None:
        engine = self._engine
        if reset_ids is None:
            engine.refuse_ended(engine.all_ids)
            return
        is_stepped = np.ones(engine.num_envs, bool)
        is_stepped[reset_ids] = False
        if (is_stepped & engine.rows.ended).any():
            engine.refuse_ended(np.flatnonzero(is_stepped))

    def start_resets(self, env_ids: np.ndarray) -> None:
        """Reset envs, int `[k]`, different; raises as `start_steps` does."""
        engine = self._engine
        engine.refuse_rolling()
        if engine.num_pending:
            engine.refuse_pending(env_ids)
        self._columns[env_ids] = engine.rows.reset_columns(env_ids)
        self._ops[env_ids] = _RESET
        self._uniform = self._reset_ids = None
        self._give(env_ids, lambda: self._submit_resets(env_ids))

    def _submit_resets(self, env_ids: np.ndarray) -> None:
        if self._engine.recycler is not None:
            self._engine.recycler.before_resets(env_ids)
        flags = self._engine.send_prepared(env_ids)
        self._engine.pool.submit(env_ids, Op.RESET, RING, self._columns[env_ids], flags)

    def _give(self, ids: np.ndarray, submit: Callable[[], None]) -> None:
        engine = self._engine
        engine.in_flight = ids
        engine.pending[ids] = True
        engine.num_pending = len(ids)
        try:
            submit()
        except EnvherdError:
            self._let_go(ids)
            engine.rows.mark_ended(ids)
            raise

    def finish(self, timeout_s: float | None = None) -> None:
        """Wait for the answers, and note where the envs are.

        Args:
            timeout_s: seconds; None for the deadlines of the options, after which a worker is killed.

        Raises:
            TimeoutError: `timeout_s` has passed; see the module.
            EnvError, WorkerLost, WorkerTimeout: the envs concerned need a reset; the others' rows are noted.
            ResetNeeded: what was started has been broken off meanwhile.
        """
        engine = self._engine
        ids = engine.in_flight
        if ids is None or not engine.pending[ids].all():
            raise ResetNeeded("the call failed: what it waits for was broken off. Reset the envs.")
        try:
            self._wait(ids, timeout_s)
        except EnvherdError:
            engine.rows.mark_ended(ids)
            self._let_go(ids)
            raise
        if engine.pool.outcome:
            self._note(ids)
            return
        self.faults, self.dead = {}, engine.all_ids[:0]
        rows = engine.rows
        if rows.has_interrupted:
            rows.interrupted[ids] = False
        if engine.has_infos:
            rows.forget_infos() if self._uniform is not None else rows.note_infos({}, ids.tolist())
        self._note_rows(ids, self.dead)
        self._let_go(ids)
        self._recycle()

    def _wait(self, ids: np.ndarray, timeout_s: float | None) -> None:
        engine = self._engine
        step_s, reset_s = engine.options.step_timeout_s, engine.options.reset_timeout_s
        limits = (reset_s, 0.0) if self._uniform is None else (step_s, reset_s)
        if timeout_s is None and len(ids) == engine.num_envs:
            has_all = engine.pool.wait_all(*limits)
        elif timeout_s is None:
            has_all = len(engine.pool.wait_some(ids, len(ids), *limits)) == len(ids)
        else:
            has_all = len(engine.pool.wait_some(ids, len(ids), timeout_s, kill_late=False)) == len(ids)
        if not has_all and engine.pool.outcome.losses and engine.options.on_worker_loss == "raise":
            raise engine.loss_without_the_others()
        if not has_all:
            raise TimeoutError(f"the call failed: expected {len(ids)} envs within {timeout_s:g} s. Reset them.")

    def _let_go(self, ids: np.ndarray) -> None:
        engine = self._engine
        engine.pending[ids] = False
        engine.num_pending = 0 if len(ids) == engine.num_envs else int(engine.pending.sum())
        engine.in_flight = None

    def _note(self, ids: np.ndarray) -> None:
        """Note what became of the commands, whatever did."""
        engine, rows = self._engine, self._engine.rows
        outcome = engine.pool.take_outcome(ids)
        rows.note_side(outcome.side)
        rows.note_infos(outcome.infos, ids.tolist())
        rows.interrupted[ids] = False
        engine.num_errors += len(outcome.faults)
        self.faults = outcome.faults
        lost = engine.envs_of(outcome.losses)
        lost = lost[np.isin(lost, ids)] if len(lost) else lost
        self.dead = dead = np.union1d(lost, [*outcome.faults]).astype(np.int64) if lost.size or outcome.faults else lost
        self._end_rows(lost, outcome.faults)
        self._note_rows(ids, dead)
        if len(dead):
            rows.mark_ended(dead)
        self._let_go(ids)
        loss = engine.replace_lost(outcome.losses)
        if loss is not None:
            raise loss
        if len(lost):
            self._make_good(lost)
        error = engine.fault_error(outcome.faults)
        if error is not None:
            raise error
        self._recycle()

    def _recycle(self) -> None:
        recycler, ended = self._engine.recycler, self.ended_ids
        if recycler is not None and ended is not None:
            reset = ended[(self._ops[ended] == _STEP_RESET) & ~np.isin(ended, self.dead)]
            recycler.after_steps(reset, self._columns[reset])

    def _end_rows(self, lost: np.ndarray, faults: dict[int, Any]) -> None:
        failed = [env_id for env_id, fault in faults.items() if fault["phase"] == "step"]
        for env_id in [*lost.tolist(), *failed]:
            if self._ops[env_id] != _RESET:
                self._engine.end_in_ring(env_id, int(self._columns[env_id]))

    def _note_rows(self, ids: np.ndarray, dead: np.ndarray) -> None:
        rows, op = self._engine.rows, self._uniform
        if op == Op.STEP and not len(dead):
            self.ended_ids = rows.stepped_all(self.column, self._reset_ids)
            self.has_resets = self._reset_ids is not None
            return
        if op == Op.STEP_RESET and not len(dead):
            self.ended_ids = rows.stepped_all_and_reset(self.column)
            self.has_resets = self.ended_ids is not None
            return
        is_reset = self._ops[ids] == _RESET
        is_dead = np.isin(ids, dead)
        stepped = ids[~is_reset]
        ended = np.zeros(len(ids), bool)
        if len(stepped):
            ended[~is_reset] = rows.stepped(stepped, self._columns[stepped])
        self.ended_ids = ids[ended] if ended.any() else None
        was_reset = ids[(is_reset | ended & (self._ops[ids] == _STEP_RESET)) & ~is_dead]
        rows.were_reset(was_reset, self._columns[was_reset])
        self.has_resets = bool(len(was_reset))

    def _make_good(self, lost: np.ndarray) -> None:
        """Reset, in the successors of lost workers, the envs whose commands would have left them reset."""
        engine = self._engine
        engine.note_interrupted(lost[self._ops[lost] != _RESET])
        to_reset = lost[self._ops[lost] != int(Op.STEP)]
        if len(to_reset):
            engine.reset_at(to_reset, self._columns[to_reset])
            self.has_resets = True
