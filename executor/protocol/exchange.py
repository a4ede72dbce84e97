"""Asynchronous stepping: send some envs, receive the first that are ready.

Guarantees: an env that was sent is received exactly once; first-K is fair (the longest sent first); a
receive that is interrupted or out of time loses nothing; the data of an env do not depend on which
env was ready first.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from envherd.executor.batches.actions import has_true, to_numpy
from envherd.executor.batches.fast_tensordict import get_leaf, maker, set_leaf, set_next
from envherd.executor.batches.hand_out import Leaves
from envherd.executor.protocol.engine import Engine
from envherd.workers.errors import EnvherdError
from envherd.workers.protocol import RING, Flag, Op

ENV_IDS = "env_ids"
_STEP_RESET = int(Op.STEP_RESET)  # numpy takes ten times as long to compare with a member of an enum


class _Received(NamedTuple):
    """The batch that was received last: who asks where its envs are, or sends them on, is answered from it.

    Attributes:
        ids: its `env_ids`, and `version`, their count of writes.
        env_ids: the same.
        leaves: of its `next`; None where they do not say where the envs are.
        stamp: the number of the latest command and of losses: with others, `leaves` are of the past.
    """

    ids: torch.Tensor
    version: int
    env_ids: np.ndarray
    leaves: Leaves | None
    stamp: tuple[int, int]


class Exchange:
    """Sends and receives for one engine; its callers hold the engine's turn."""

    _received: _Received | None = None

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ops = np.zeros(engine.num_envs, np.int64)
        self._only_op: int | None = 0  # if all of them are this one
        self._columns = np.zeros(engine.num_envs, np.int64)
        self._side: dict[int, Any] = {}
        self._infos: dict[int, Any] = {}
        self._sending: tuple[np.ndarray, int] | None = None
        self._num_settled = 0  # losses of the pool that were dealt with
        engine.end_sent = self._end_sent
        engine.settle_sends = self._settle_sends

    def ids_of(self, td: TensorDictBase, env_ids: Any) -> np.ndarray:
        """Return which envs a batch is for: as said, else its own `env_ids`, else all.

        Raises:
            ValueError: ids out of range or twice, or not one row for each.
        """
        if env_ids is None:
            env_ids = td.get(ENV_IDS, None)
        ids = self.as_ids(env_ids)
        if td.batch_size[:1] != (len(ids),):
            raise ValueError(
                f"send failed: expected one row for each of {len(ids)} envs, got batch size {td.batch_size}."
            )
        return ids

    def as_ids(self, env_ids: Any) -> np.ndarray:
        """Return env ids as int64 `[k]`; None means all.

        Args:
            env_ids: integers, all different, or a mask: bool `[N]`, the envs that it selects.

        Raises:
            ValueError: out of range or twice, neither integers nor bools, or a mask of another shape.
        """
        num_envs = self._engine.num_envs
        if env_ids is None:
            return self._engine.all_ids
        received = self._received
        if received is not None and env_ids is received.ids and env_ids._version == received.version:  # noqa: SLF001
            return received.env_ids
        is_array = isinstance(env_ids, (torch.Tensor, np.ndarray, int, np.integer))
        ids = np.atleast_1d(to_numpy(env_ids if is_array else list(env_ids)))
        if ids.dtype == bool and ids.shape == (num_envs,):
            return np.flatnonzero(ids)
        if ids.dtype.kind not in "iu" and ids.size:
            raise ValueError(
                f"the call failed: expected env ids as integers, or as a bool mask of shape {(num_envs,)}, got "
                f"{ids.dtype} of shape {ids.shape}."
            )
        ids = ids.astype(np.int64)
        if ids.ndim > 1:  # of envs that are batches, as `set_ids` gives them: each row says its env
            ids = ids.reshape(len(ids), -1)[:, 0]
        distinct = set(ids.tolist())
        if distinct and (min(distinct) < 0 or max(distinct) >= num_envs or len(distinct) != len(ids)):
            raise ValueError(f"the call failed: expected different env ids in 0..{num_envs - 1}, got {ids.tolist()}.")
        return ids

    def recall(self, env_ids: Any) -> TensorDictBase | None:
        """Return where the envs received last are, sharing their `next`, if these are they and nothing came after."""
        received, pool = self._received, self._engine.pool
        if received is None or received.leaves is None or env_ids is not received.ids:
            return None
        stamp = pool.number, pool.num_losses
        if env_ids._version != received.version or stamp != received.stamp:  # noqa: SLF001  # counts writes
            return None
        if any(leaf._version for leaf in received.leaves):  # noqa: SLF001  # the caller has written to its `next`
            return None
        td = self._engine.rows.batches[0].root_over(received.leaves, len(received.env_ids))
        set_leaf(td, (ENV_IDS,), received.ids)
        return td

    def send(self, td: TensorDictBase, env_ids: np.ndarray, op: Op) -> None:
        """Check a batch of actions and start the steps."""
        engine = self._engine
        engine.refuse_rolling()
        engine.refuse_pending(env_ids)
        engine.refuse_ended(env_ids)
        engine.pool.await_workers(env_ids)
        engine.write_inputs(td, env_ids)
        columns = engine.rows.next_columns(env_ids)
        if engine.rows.has_interrupted:
            engine.rows.interrupted[env_ids] = False  # what was said of a step of all that was lost
        self._note_op(env_ids, int(op))
        self._columns[env_ids] = columns
        self._sending = env_ids, engine.pool.number
        engine.pending[env_ids] = True
        engine.num_pending += len(env_ids)
        try:
            engine.pool.submit(env_ids, op, RING, columns, Flag.EACH)
        except EnvherdError:
            self._forget(env_ids)
            raise
        self._sending = None

    def _note_op(self, env_ids: np.ndarray, op: int) -> None:
        """Keep what some envs were told to do; mostly all of them are told the same, again and again."""
        if op == self._only_op:
            return
        self._only_op = None  # first: a Ctrl-C may come between any two of these lines
        if self._engine.num_pending:
            self._ops[env_ids] = op
        else:
            self._ops[:] = op
            self._only_op = op

    def _settle_sends(self) -> None:
        """After a call was broken off: forget what was not sent, and what was received in part."""
        engine = self._engine
        if self._sending is not None:
            env_ids, number = self._sending
            is_sent = engine.pool.was_given(env_ids, number)
            engine.pending[env_ids] = is_sent
            in_doubt = env_ids[~is_sent & (engine.pool.number > number)]
            engine.rows.mark_ended(in_doubt)
        elif engine.in_flight is not None:
            engine.pending[engine.in_flight] = False
        self._sending = None
        engine.num_pending = int(np.count_nonzero(engine.pending))

    def recv(
        self, min_envs: int | None, timeout_s: float | None, env_ids: np.ndarray | None, *, with_root: bool
    ) -> TensorDictBase:
        """Wait for the first `min_envs` (None: all) of the envs that were sent, or of some; see `BatchedEnv.recv`."""
        pending = self._engine.pending
        sent = pending.nonzero()[0] if env_ids is None else env_ids
        if env_ids is not None and not pending[env_ids].all():
            idle = env_ids[~pending[env_ids]].tolist()
            raise ValueError(f"recv failed: expected envs that were sent, got envs {idle} that were not.")
        wanted = len(sent) if min_envs is None else min_envs
        if not 0 < wanted <= len(sent):
            raise ValueError(f"recv failed: expected 1 to {len(sent)} envs (as many as were sent), got {wanted}.")
        ready = self._wait(sent, wanted, timeout_s)[:wanted]
        return self._take(sent if env_ids is not None and wanted == len(sent) else ready, with_root=with_root)

    def _wait(self, sent: np.ndarray, wanted: int, timeout_s: float | None) -> np.ndarray:
        pool = self._engine.pool
        deadline = self._engine.options.step_timeout_s if timeout_s is None else timeout_s
        end = None if deadline is None else time.monotonic() + deadline
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            more_s = self._engine.options.reset_timeout_s
            ready = pool.wait_some(sent, wanted, left, more_s, kill_late=timeout_s is None)
            if pool.outcome or pool.num_losses != self._num_settled:
                self._settle()
                ready = ready[~np.isin(ready, pool.outstanding())]
            if len(ready) >= wanted:
                return ready
            if end is None or time.monotonic() < end:
                continue
            if timeout_s is not None:
                raise TimeoutError(
                    f"recv failed: expected {wanted} envs within {timeout_s:g} s, got {len(ready)}. "
                    f"Nothing is lost: recv again."
                )
            end = time.monotonic() + (deadline or 0.0)  # who was late is gone; its successor has as long again

    def _settle(self) -> None:
        """Deal with what happened to envs that were sent: raise, or let a successor reset what was lost."""
        engine = self._engine
        outcome = engine.pool.take_outcome()
        self._infos |= outcome.infos  # not yet where the envs are
        self._side |= outcome.side
        engine.num_errors += len(outcome.faults)
        num_losses = engine.pool.num_losses
        lost = engine.envs_of(outcome.losses)
        error = engine.replace_lost(outcome.losses)
        if error is None:
            engine.rows.mark_lost(lost[~engine.pending[lost]])
        # Not by `outcome`: an interrupt may have come after it was taken, and before its losses were dealt with.
        forfeited = np.flatnonzero(engine.pending & engine.pool.forfeited)
        if error is None and len(forfeited):
            error = self._replace_lost_of(forfeited)
        if error is None:
            self._end_sent(forfeited, is_replaced=True)
        else:
            self._drop(np.union1d(forfeited, lost))
        self._drop(np.array([*outcome.faults], np.int64))
        self._num_settled = num_losses
        error = error or engine.fault_error(outcome.faults)
        if error is not None:
            raise error

    def _replace_lost_of(self, env_ids: np.ndarray) -> EnvherdError | None:
        """Begin to replace the workers of envs that have lost their answers, if they are lost still; see `_settle`."""
        pool = self._engine.pool
        workers = {int(w) for w in pool.worker_of[env_ids]} & set(pool.lost)
        return self._engine.replace_lost({worker_id: pool.lost[worker_id] for worker_id in workers})

    def _drop(self, env_ids: np.ndarray) -> None:
        """Take envs that need a reset off the list of those sent."""
        self._engine.rows.mark_ended(env_ids)
        self._forget(env_ids)

    def _end_sent(self, lost: np.ndarray, *, is_replaced: bool) -> None:
        """End the episodes of envs that were sent and lost; if they are not replaced, they are no longer sent."""
        engine = self._engine
        if not is_replaced:
            self._forget(lost)
            return
        columns = self._columns[lost]
        for env_id, column in zip(lost.tolist(), columns.tolist(), strict=True):
            self._side.pop(env_id, None)
            self._infos.pop(env_id, None)
            engine.end_in_ring(env_id, column)
        engine.note_interrupted(lost)
        to_reset = self._ops[lost] == _STEP_RESET
        engine.pool.forfeited[lost[~to_reset]] = False
        if to_reset.any():
            engine.pool.submit_later(lost[to_reset], Op.RESET, RING, columns[to_reset], Flag.EACH)

    def _take(self, ready: np.ndarray, *, with_root: bool) -> TensorDictBase:
        """Make the batch for envs that have answered, and take them off the list of those sent."""
        engine, rows = self._engine, self._engine.rows
        engine.in_flight = ready
        columns = self._columns[ready]
        td = rows.current(ready) if with_root else None
        if self._side:
            rows.note_side({i: self._side.pop(i) for i in ready.tolist() if i in self._side})
        if engine.has_infos:
            rows.note_infos({i: self._infos.pop(i) for i in ready.tolist() if i in self._infos}, ready.tolist())
        leaves = ended = None
        next_td: TensorDictBase
        if rows.is_plain:
            next_td, leaves, ended = rows.batches[0].next_at(columns, rows.rows_of(ready))
        else:
            next_td = rows.next_of(ready, columns)
        if td is None:
            td = maker(next_td.batch_size, next_td.device)({})
        else:
            engine.add_inputs(td, ready)
        set_next(td, next_td)
        if rows.has_interrupted:
            rows.interrupted[ready] = False
        self._forget(ready)
        ended = rows.stepped(ready, columns, ended)
        if has_true(ended) and has_true(resets := ended & (self._ops[ready] == _STEP_RESET)):
            leaves = None
            rows.were_reset(ready[resets], columns[resets])
            if engine.recycler is not None:
                engine.recycler.after_steps(ready[resets], columns[resets])
        engine.in_flight = None
        set_ids(td, ready)
        if td.ndim == 1:
            ids: Any = get_leaf(td, ENV_IDS)
            stamp = engine.pool.number, engine.pool.num_losses
            self._received = _Received(ids, ids._version, ready, leaves, stamp)  # noqa: SLF001  # counts writes
        return td

    def _forget(self, env_ids: np.ndarray) -> None:
        for kept in (self._side, self._infos):
            for env_id in env_ids.tolist() if kept else ():
                kept.pop(env_id, None)
        self._engine.pending[env_ids] = False
        self._engine.num_pending = int(np.count_nonzero(self._engine.pending))


def set_ids(td: TensorDictBase, env_ids: np.ndarray) -> TensorDictBase:
    """Say in a batch which envs it is of: int64 `[k]`; `[k, *B]` for envs that are batches, each row saying its env."""
    ids = torch.from_numpy(env_ids.copy())
    if td.ndim > 1:
        ids = ids.view(-1, *(1,) * (td.ndim - 1)).expand(td.batch_size).clone()
    set_leaf(td, (ENV_IDS,), ids)
    return td
