"""Record the failures of envs (their workers' losses, and their own exceptions), and replace lost workers.

Guarantees: an env whose worker is lost does not count as running before its instance in the successor was reset. A
missing answer, of a lost worker or of an env that has raised, either becomes an interrupted row, or is raised.

Order, because a handler may raise between any two lines. The numbers are at the lines.
1. `answers_lost` of envs that were sent, before any report is taken or any state changes. It is what the next call
   finds again: without it a lost answer would count as a row, and the reset that completes it would not be sent.
2. States, then roots, of envs without a command. An env whose state is RUNNING would be stepped without a reset; a root
   without the flag only repeats a row that was true.
3. The successor, after 1 and 2: once a worker counts as being replaced, nothing reports its loss again.
4. The state of an env that was sent, last, when its answer is dropped: while it is under way, the next call finds it
   (1), and repeats all that comes before.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.base import Pool
from envherd.executor.processes.error_messages import log
from envherd.executor.protocol.env_states import EnvStates, Event
from envherd.executor.protocol.positions import Positions
from envherd.workers.errors import EnvherdError, InternalError
from envherd.workers.protocol import RESET, STEP, Flag, Op

NOBODY = np.zeros(0, np.int64)
#: Seconds between two log lines about exceptions that interrupt episodes.
_LOG_EVERY_S = 10.0


class Losses:
    """Records failures, and replaces lost workers if the options allow it.

    Attributes:
        num_interrupted: rows that a failure has ended so far.
        num_errors: exceptions of each env, int64 `[N]` (VIEW of the slab).
    """

    def __init__(
        self,
        pool: Pool,
        positions: Positions,
        states: EnvStates,
        options: ExecutorOptions,
    ) -> None:
        self._pool = pool
        self._positions = positions
        self._states = states
        self._is_replacing = options.on_worker_loss == "restart"
        self._is_interrupting = options.on_env_error == "interrupt"
        self._max_in_a_row = options.max_restarts
        self.num_interrupted = 0
        self.num_errors = pool.slab.words["errors"]
        # Exceptions of each env since its latest step.
        self._num_in_a_row = np.zeros(pool.num_envs, np.int64)
        # That each env had made at its latest exception.
        self._num_steps = np.zeros(pool.num_envs, np.int64)
        self._logged_at = -_LOG_EVERY_S
        self._num_unlogged = 0

    def note_interrupted(self, env_ids: np.ndarray) -> None:
        """Mark the envs' rows of this step as interrupted."""
        self.num_interrupted += int(
            np.count_nonzero(~self._positions.interrupted[env_ids])
        )
        self._positions.interrupted[env_ids] = True

    def may_interrupt(self, faults: Mapping[int, Mapping[str, Any]]) -> bool:
        """Count exceptions of envs; return whether they end only the episodes, and are not raised.

        Args:
            faults: env id -> fault message.
        """
        env_ids = np.array([*faults], np.int64)
        steps = self._pool.slab.words["env_steps"][env_ids]
        self.num_errors[env_ids] += 1
        # An env that has stepped since its last exception begins to count again.
        self._num_in_a_row[env_ids] *= steps == self._num_steps[env_ids]
        self._num_in_a_row[env_ids] += 1
        self._num_steps[env_ids] = steps
        is_ours = any(
            fault.get("type_name") == InternalError.__name__
            for fault in faults.values()
        )
        is_loop = (self._num_in_a_row[env_ids] > self._max_in_a_row).any()
        return self._is_interrupting and not (is_ours or is_loop)

    def log(self, error: EnvherdError, count: int) -> None:
        """Log an error about exceptions of envs, `count` of them, unless such an error was logged a moment ago."""
        now = time.monotonic()
        if now < self._logged_at + _LOG_EVERY_S:
            self._num_unlogged += count
            return
        more = ""
        if self._num_unlogged:
            more = f" There were {self._num_unlogged} others since the last such line."
        self._logged_at = now
        self._num_unlogged = 0
        log.warning(
            "%s%s\n%s",
            error.message,
            more,
            error.remote_traceback,
        )

    def lose(self, env_ids: np.ndarray) -> None:
        """Record that envs without a command under way have lost their episodes."""
        self._states.move(env_ids, Event.IS_LOST)  # 2
        self._positions.mark_lost(env_ids)

    def drop(self, env_ids: np.ndarray, event: Event) -> None:
        """Record that sent envs have failed or are lost; they are no longer under way."""
        if len(env_ids):
            self._positions.mark_lost(env_ids)
            self._pool.outcome.forget_rows(env_ids)
            self._states.move(env_ids, event)  # 4

    def accept(self) -> None:
        """Record losses outside any flight; the next flight reports those whose workers are replaced."""
        if not self._is_replacing:
            self._pool.outcome.losses.clear()
            # All that are lost, not only the reported ones: an interrupt may have come after the reports were taken.
            self.replace(self._pool.lost, NOBODY)

    def replace(
        self,
        losses: Mapping[int, EnvherdError],
        own: np.ndarray,
    ) -> EnvherdError | None:
        """Begin to replace lost workers, and record the losses of envs outside a flight.

        Args:
            losses: worker id -> the error that describes its loss.
            own: int64 `[k]`, envs of a flight, which has recorded its losses.

        Returns:
            The loss to raise, of a worker that may not be replaced; None for none.
        """
        if not losses:
            return None
        others = np.setdiff1d(self._pool.blueprint.envs_of(losses), own)
        is_sent = self._states.under_way[others]
        idle = others[~is_sent]
        sent = others[is_sent]
        self._pool.words.answers_lost[sent] = True  # 1
        self._states.move(idle, Event.IS_LOST)  # 2
        self._positions.mark_lost(idle)
        # 3
        error: EnvherdError | None = next(iter(losses.values()))
        if self._is_replacing:
            error = self._begin_restarts(losses)
        if error is not None:
            self.drop(sent, Event.IS_LOST)
        elif len(sent):
            self.cut_off_sent(sent)
        return error

    def _begin_restarts(self, worker_ids: Iterable[int]) -> EnvherdError | None:
        for worker_id in worker_ids:
            env_ids = self._pool.blueprint.envs_of([worker_id])
            # All rows of an env that is a batch must be reset.
            for group in self._positions.slab.groups:
                if ("reset_mask",) in group.inputs:
                    group.inputs["reset_mask",][
                        np.isin(group.plan.env_ids, env_ids)
                    ] = True
            try:
                self._pool.begin_restart(worker_id)
            except EnvherdError as error:
                return error
        return None

    def cut_off_sent(self, lost: np.ndarray, rebuilt: Iterable[int] = ()) -> None:
        """End the episodes of sent envs that have failed: after their reset, their answer is an interrupted row.

        Args:
            lost: int64 `[k]`.
            rebuilt: those whose reset has raised: new instances are reset. Their step's row is the env's own.
        """
        is_rebuilt = np.isin(lost, [*rebuilt])
        self._pool.outcome.forget_rows(lost[~is_rebuilt])
        ops = self._states.ops[lost]
        columns = self._states.columns[lost]
        is_stepped = (ops != RESET) & ~is_rebuilt
        is_due = ops != STEP
        for env_id, column in zip(
            lost[is_stepped].tolist(),
            columns[is_stepped].tolist(),
            strict=True,
        ):
            self._positions.cut_off(env_id, column)
        self.note_interrupted(lost[is_stepped])
        self._pool.words.answers_lost[lost[~is_due]] = False
        self._pool.send_calls(lost[is_rebuilt].tolist())
        # PREPARED: the message stays until the reset, which then keeps the info of the step before it.
        for is_one, flags in (
            (is_due & ~is_rebuilt, Flag.EACH),
            (is_rebuilt, Flag.EACH | Flag.PREPARED),
        ):
            if is_one.any():
                self._pool.submit_later(
                    lost[is_one],
                    Op.RESET,
                    self._positions.where.target,
                    columns[is_one],
                    flags,
                )
