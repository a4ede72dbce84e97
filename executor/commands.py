"""Commands of any mix in one round trip: some envs step, others are reset; nothing is made of the rows yet.

For callers that read arrays rather than TensorDicts. Inputs are written to the slab beforehand.

Guarantees: as those of steps and resets (an env that has ended is not stepped, what one env raises or loses
leaves the others' rows whole), and the two halves may be apart: between `start` and `finish` the envs
concerned are pending, and refused to everybody else. After a `finish` that ran out of time or was
interrupted, those envs need a reset; the next call waits for what is still under way, and drops it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from envherd.executor.diagnosis import Frame
from envherd.executor.engine import Engine
from envherd.workers.errors import EnvherdError, ResetNeeded
from envherd.workers.protocol import RING, Op

_RESET, _STEP_RESET = int(Op.RESET), int(Op.STEP_RESET)


class Commands:
    """Starts and finishes the commands of one engine; its callers hold the engine's turn.

    Attributes:
        faults: env id -> what it raised in the latest commands.
        dead: int `[k]`, the envs that raised or were lost in the latest commands.
        column: the ring column of the latest commands that were for all envs.
        has_resets: whether the latest commands have reset any env.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ops = np.zeros(engine.num_envs, np.int64)
        self._columns = np.zeros(engine.num_envs, np.int64)
        self._uniform: Op | None = None  # what all envs do, if they all step
        self.faults: dict[int, Frame] = {}
        self.dead = engine.all_ids[:0]
        self.column = 0
        self.has_resets = False

    def take_for_running(self) -> None:
        """Let envs that were never reset be stepped, where their family allows that."""
        self._engine.rows.ended[:] = False
        self._engine.rows.has_ended = False

    def start(self, op: Op | np.ndarray, env_ids: np.ndarray | None = None) -> None:
        """Give commands.

        Args:
            op: for all of the envs, or int `[k]`, one for each.
            env_ids: int `[k]`, different; None for all envs.

        Raises:
            Busy, ResetNeeded: refused, nothing was sent.
            WorkerLost, WorkerTimeout: a worker had been lost before.
        """
        engine = self._engine
        ids = engine.all_ids if env_ids is None else env_ids
        engine.refuse_rolling()
        if engine.num_pending:
            engine.refuse_pending(ids)
        if isinstance(op, np.ndarray):
            engine.refuse_ended(ids[op != _RESET])
        elif op != Op.RESET:
            engine.refuse_ended(ids)
        if len(ids) == engine.num_envs:
            self.column = engine.rows.next_column()
            self._columns[:] = self.column
        else:
            self._columns[ids] = engine.rows.next_columns(ids)
        self._ops[ids] = op
        self._uniform = op if env_ids is None and isinstance(op, Op) and op != Op.RESET else None
        engine.in_flight = ids
        engine.pending[ids] = True
        engine.num_pending = len(ids)
        try:
            if self._uniform is not None:
                engine.pool.submit_all(self._uniform, RING, self.column)
            else:
                engine.send_prepared(ids)
                engine.pool.submit(ids, op, RING, self._columns[ids])
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
            self._let_go(ids)
            engine.rows.mark_ended(ids)
            raise
        if engine.pool.outcome:
            self._note(ids)
        elif self._uniform is not None:
            self._note_uniform(self._uniform)
        else:
            self._forget_what_was(ids)
            self._note_rows(ids, self.dead)
        self._let_go(ids)

    def _wait(self, ids: np.ndarray, timeout_s: float | None) -> None:
        engine = self._engine
        has_resets = self._uniform is None and bool((self._ops[ids] == _RESET).any())
        limit = engine.options.reset_timeout_s if has_resets else engine.options.step_timeout_s
        if timeout_s is None and len(ids) == engine.num_envs:
            engine.pool.wait_all(limit)
        elif timeout_s is None:
            engine.pool.wait_some(ids, len(ids), limit)
        elif len(engine.pool.wait_some(ids, len(ids), timeout_s, kill_late=False)) < len(ids):
            raise TimeoutError(f"the call failed: expected {len(ids)} envs within {timeout_s:g} s. Reset them.")

    def _let_go(self, ids: np.ndarray) -> None:
        engine = self._engine
        engine.pending[ids] = False
        engine.num_pending = 0 if len(ids) == engine.num_envs else int(engine.pending.sum())
        engine.in_flight = None

    def _note_uniform(self, op: Op) -> None:
        """Note that all envs were stepped, and nothing else happened."""
        rows = self._engine.rows
        self._forget_what_was(self._engine.all_ids)
        ended = rows.stepped_all(self.column)
        self.has_resets = False
        if op == Op.STEP_RESET and ended is not None:
            rows.were_reset(ended, self.column)
            self.has_resets = True

    def _forget_what_was(self, ids: np.ndarray) -> None:
        """Forget what the last commands of some envs had said or lost: these said and lost nothing."""
        engine, rows = self._engine, self._engine.rows
        self.faults, self.dead = {}, engine.all_ids[:0]
        if rows.has_interrupted:
            rows.interrupted[ids] = False
        if engine.has_infos:
            rows.note_infos({}, ids.tolist())

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
        self._let_go(ids)
        error = engine.first_error(outcome.losses, outcome.faults)
        if len(dead):
            rows.mark_ended(dead)
        if error is not None:
            raise error
        if len(lost):
            self._make_good(lost)

    def _end_rows(self, lost: np.ndarray, faults: dict[int, Any]) -> None:
        failed = [env_id for env_id, fault in faults.items() if fault["phase"] == "step"]
        for env_id in [*lost.tolist(), *failed]:
            if self._ops[env_id] != _RESET:
                self._engine.end_in_ring(env_id, int(self._columns[env_id]))

    def _note_rows(self, ids: np.ndarray, dead: np.ndarray) -> None:
        rows, is_reset = self._engine.rows, self._ops[ids] == _RESET
        if len(ids) == self._engine.num_envs and not len(dead) and not (self._ops == _STEP_RESET).any():
            rows.stepped_all(self.column)  # what it finds in the rows of those that were reset is put right at once
            rows.were_reset(ids[is_reset], self.column)
            self.has_resets = bool(is_reset.any())
            return
        is_dead = np.isin(ids, dead)
        stepped = ids[~is_reset]
        ended = np.zeros(len(ids), bool)
        if len(stepped):
            ended[~is_reset] = rows.stepped(stepped, self._columns[stepped])
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
