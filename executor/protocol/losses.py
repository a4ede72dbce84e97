"""Record envs' losses, and replace lost workers.

Guarantees: an env whose worker is lost does not count as running before its instance in the successor was reset. A
missing answer of a lost worker either becomes an interrupted row, or is raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.base import Pool
from envherd.executor.protocol.env_states import EnvStates, Event
from envherd.executor.protocol.positions import Positions
from envherd.workers.errors import EnvherdError
from envherd.workers.protocol import RESET, STEP, Flag, Op

_NOBODY = np.zeros(0, np.int64)


class Losses:
    """Records losses, and replaces lost workers if the options allow it.

    Attributes:
        num_interrupted: rows that a loss has ended so far.
    """

    def __init__(self, pool: Pool, positions: Positions, states: EnvStates, options: ExecutorOptions) -> None:
        self._pool, self._positions, self._states = pool, positions, states
        self._is_replacing = options.on_worker_loss == "restart"
        self.num_interrupted = 0

    def note_interrupted(self, env_ids: np.ndarray) -> None:
        """Mark the envs' rows of this step as interrupted."""
        self.num_interrupted += int(np.count_nonzero(~self._positions.interrupted[env_ids]))
        self._positions.interrupted[env_ids] = True

    def lose(self, env_ids: np.ndarray) -> None:
        """Record that envs without a command under way have lost their episodes."""
        self._states.move(env_ids, Event.IS_LOST)
        self._positions.mark_lost(env_ids)

    def drop(self, env_ids: np.ndarray, event: Event) -> None:
        """Record that sent envs have failed or are lost; they are no longer under way."""
        if len(env_ids):
            self._positions.mark_lost(env_ids)
            self._pool.outcome.forget_rows(env_ids)
            self._states.move(env_ids, event)  # last: after an earlier interrupt, all of this is repeated

    def forget(self) -> None:
        """Drop the pool's reported losses: the caller raises or records them itself."""
        self._pool.outcome.losses.clear()

    def accept(self) -> None:
        """Record losses outside any flight; the next flight reports those whose workers are replaced."""
        if not self._is_replacing:
            self.forget()
            # Not only the reported ones: an interrupt may have come after they were taken, before they were recorded.
            self.replace(self._pool.lost, _NOBODY)

    def replace(self, losses: Mapping[int, EnvherdError], own: np.ndarray) -> EnvherdError | None:
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
        idle, sent = others[~is_sent], others[is_sent]
        self._pool.words.answers_lost[sent] = True  # first: an interrupt must leave none as running or answered
        self._states.move(idle, Event.IS_LOST)
        self._positions.mark_lost(idle)  # before a worker counts as replaced: an interrupt may come in between
        error = self._begin_restarts(losses) if self._is_replacing else next(iter(losses.values()))
        if error is not None:
            self.drop(sent, Event.IS_LOST)
        elif len(sent):
            self.cut_off_sent(sent)
        return error

    def _begin_restarts(self, worker_ids: Iterable[int]) -> EnvherdError | None:
        for worker_id in worker_ids:
            env_ids = self._pool.blueprint.envs_of([worker_id])
            for group in self._positions.slab.groups:  # all rows of an env that is a batch must be reset
                if ("reset_mask",) in group.inputs:
                    group.inputs["reset_mask",][np.isin(group.plan.env_ids, env_ids)] = True
            try:
                self._pool.begin_restart(worker_id)
            except EnvherdError as error:
                return error
        return None

    def cut_off_sent(self, lost: np.ndarray) -> None:
        """End the episodes of sent envs that were lost: after their reset, their answer is an interrupted row."""
        pool, positions, states = self._pool, self._positions, self._states
        pool.outcome.forget_rows(lost)
        ops, columns = states.ops[lost], states.columns[lost]
        is_stepped, is_due = ops != RESET, ops != STEP
        for env_id, column in zip(lost[is_stepped].tolist(), columns[is_stepped].tolist(), strict=True):
            positions.cut_off(env_id, column)
        self.note_interrupted(lost[is_stepped])
        pool.words.answers_lost[lost[~is_due]] = False
        if is_due.any():
            pool.submit_later(lost[is_due], Op.RESET, positions.where.target, columns[is_due], Flag.EACH)
