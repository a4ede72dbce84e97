"""Asynchronous stepping: send some envs, receive the first that are ready.

Guarantees: a sent env is received exactly once. First-K is fair: ready envs are received in the order in which they
were sent. A receive that is interrupted or times out loses nothing. The data of an env do not depend on which env was
ready first.

Order of a receive, because a handler may raise between any two lines. The numbers are at the lines.
1. The roots on which the envs acted, before the delivery is opened: `deliver` moves the positions past them, and an
   interrupt before it loses nothing.
2. `open_delivery`, before anything is taken that the pool holds only once: from here an interrupt costs these envs
   their episodes, and not a row.
3. The `next` rows and inputs, before `deliver`: from then on a later step may overwrite them.
4. `Engine.received`, after `deliver`: it would name the rows of envs that still have to be received.
"""

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from envherd.executor.batches.actions import to_numpy
from envherd.executor.batches.arguments import (
    as_count,
    need_batch,
    need_seconds,
    wrong_rows,
)
from envherd.executor.batches.fast_tensordict import (
    as_tensor,
    get_leaf,
    maker,
    num_writes,
    set_leaf,
    set_next,
)
from envherd.executor.batches.hand_out import add_side
from envherd.executor.protocol.call_guard import call_name
from envherd.executor.protocol.engine import Engine, Received
from envherd.executor.start.waiting import DeadlinePassed
from envherd.workers.protocol import Op

ENV_IDS = "env_ids"


class Exchange:
    """Sends and receives for one engine; its callers hold the engine's call guard.

    Attributes:
        fast: makes plain calls in C, see `protocol.fast`; None if no call is plain.
    """

    fast: Any = None

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def ids_of(self, td: TensorDictBase, env_ids: Any) -> np.ndarray:
        """Return the ids of a batch's envs: the argument, else its own `env_ids`, else all.

        Raises:
            ValueError: ids out of range or twice, or not one row for each.
            TypeError: no batch.
        """
        need_batch("send", td)
        if env_ids is None:
            env_ids = get_leaf(td, ENV_IDS)
        ids = self.as_ids(env_ids)
        if td.batch_size[:1] != (len(ids),):
            raise wrong_rows("send", len(ids), td)
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
        received = self._engine.received
        if received is not None and received.is_of(env_ids):
            return received.env_ids
        # A mask or list from outside may be of any kind; numpy decides what it is.
        if not isinstance(env_ids, (torch.Tensor, np.ndarray, int, np.integer)):
            env_ids = list(env_ids)
        ids = np.atleast_1d(to_numpy(env_ids))
        if ids.dtype == bool and ids.shape == (num_envs,):
            return np.flatnonzero(ids)
        if ids.dtype.kind not in "iu" and ids.size:
            raise ValueError(
                f"{call_name()} failed: expected env ids as integers, or as a bool mask of shape {(num_envs,)}, got "
                f"{ids.dtype} of shape {ids.shape}."
            )
        ids = ids.astype(np.int64)
        # From `set_ids` for envs that are batches: each row holds its env's id.
        if ids.ndim > 1:
            ids = ids.reshape(len(ids), -1)[:, 0]
        distinct = set(ids.tolist())
        if distinct and (
            min(distinct) < 0 or max(distinct) >= num_envs or len(distinct) != len(ids)
        ):
            raise ValueError(
                f"{call_name()} failed: expected different env ids in 0..{num_envs - 1}, got {ids.tolist()}."
            )
        return ids

    def current(self, env_ids: Any) -> TensorDictBase:
        """Return the envs' present roots; of those received last, they may share the leaves of their `next`.

        Raises:
            Busy: an env has a command whose answer was not taken yet.
        """
        engine = self._engine
        received = engine.received
        if (
            received is None
            or not received.is_of(env_ids)
            or received.number != engine.pool.words.number[0]
            or received.num_losses != engine.pool.num_losses
            # A rollout that has given no command yet has moved the roots.
            or engine.positions.where is not engine.positions.ring
        ):
            ids = self.as_ids(env_ids)
            engine.refuse_under_way(ids)
            td = engine.batches.current(ids)
            if env_ids is None:
                return td
            return set_ids(td, ids)
        # Else the caller has changed its `next`.
        if received.leaves and num_writes(received.leaves) == received.num_writes:
            shell = engine.batches.groups[0].shell(
                "root over next",
                (len(received.env_ids),),
            )
            td = shell.build(received.leaves)
        else:
            td = engine.batches.current(received.env_ids)
        set_leaf(td, (ENV_IDS,), received.ids)
        return td

    def send(self, td: TensorDictBase, env_ids: Any, op: Op) -> None:
        """Check a batch of actions and start the steps."""
        if self.fast is not None and self.fast.send(td, env_ids, op):
            return
        engine = self._engine
        ids = self.ids_of(td, env_ids)

        def write_inputs() -> None:
            engine.write_inputs(td, ids)
            if engine.positions.has_interrupted:
                engine.positions.interrupted[ids] = False  # of an earlier step of all

        engine.flights.send(op, ids, write_inputs)
        engine.stale_roots.look(td, ids)

    def recv(
        self,
        min_envs: int | None,
        max_envs: int | None,
        timeout_s: float | None,
        env_ids: Any,
        *,
        with_root: bool,
    ) -> TensorDictBase:
        """Wait for some of the envs that were sent, and return their batch. Arguments as of `BatchedEnv.recv`."""
        if self.fast is not None and timeout_s is None:
            received = self.fast.recv(
                min_envs,
                max_envs,
                env_ids,
                with_root=with_root,
            )
            if received is not None:
                return received
        is_sent = self._engine.states.under_way
        sent = is_sent.nonzero()[0]
        if env_ids is not None:
            sent = self.as_ids(env_ids)
            idle = sent[~is_sent[sent]].tolist()
            if idle:
                raise ValueError(
                    f"recv failed: expected envs that were sent, got envs {idle} that were not."
                )
        if timeout_s is not None:
            need_seconds("recv", "timeout_s", timeout_s)
        least, most = _counts(len(sent), min_envs, max_envs)
        wanted = least
        # As many as may come by then; the least is checked afterwards.
        if timeout_s is not None:
            wanted = most
        ready = self._wait_for(sent, wanted, timeout_s)
        if len(ready) < least:
            raise DeadlinePassed(
                f"recv failed: expected {least} envs within {timeout_s:g} s, got {len(ready)}. "
                f"Nothing is lost: recv again."
            )
        taken = ready[:most]
        # All of them: in the order of the caller's ids.
        if env_ids is not None and least == len(sent):
            taken = sent
        return self._take(taken, with_root=with_root)

    def _wait_for(
        self,
        sent: np.ndarray,
        wanted: int,
        timeout_s: float | None,
    ) -> np.ndarray:
        return self._engine.flights.wait_for(sent, wanted, timeout_s)

    def _take(self, ready: np.ndarray, *, with_root: bool) -> TensorDictBase:
        """Build the batch of envs that have answered, and mark them as received."""
        engine = self._engine
        columns = engine.states.columns[ready]
        td = None
        if with_root:
            td = engine.batches.current(ready)  # 1
        engine.flights.open_delivery(ready)  # 2
        next_td = engine.batches.next_of(ready, columns)  # 3
        if td is None:
            td = maker(next_td.batch_size, next_td.device)({})
        else:
            self._add_inputs(td, ready)
        set_next(td, next_td)
        engine.flights.deliver(ready)
        set_ids(td, ready)
        if td.ndim == 1:
            engine.received = Received(  # 4
                get_leaf(td, ENV_IDS),
                ready,
                None,
                0,
                engine.pool.words.number[0],
                engine.pool.num_losses,
            )
        return td

    def _add_inputs(self, td: TensorDictBase, env_ids: np.ndarray) -> None:
        """Add the inputs of the envs' latest steps to a batch."""
        engine = self._engine
        places = engine.positions.places
        for group, own, ids in places.by_group(td, env_ids):
            intake = engine.intakes[group]
            rows = places.row_of[ids]
            for leaf, target in zip(intake.leaves, intake.targets, strict=True):
                set_leaf(own, leaf.key, as_tensor(target[rows]))
            if intake.side_keys:
                add_side(own, intake.side_keys, engine.side_inputs, ids.tolist())


def _counts(
    num_sent: int,
    min_envs: int | None,
    max_envs: int | None,
) -> tuple[int, int]:
    """Return how many envs a `recv` takes at least and at most."""
    least = num_sent
    if min_envs is not None:
        least = as_count(
            "recv",
            "min_envs",
            min_envs,
            least=0,
            or_none=True,
        )
    most = least
    if max_envs is not None:
        most = as_count(
            "recv",
            "max_envs",
            max_envs,
            least=0,
            or_none=True,
        )
    if not num_sent:
        raise ValueError(
            "recv failed: expected envs that were sent, got none. Call send(...) first."
        )
    if not 0 < least <= num_sent:
        raise ValueError(
            f"recv failed: expected 1 to {num_sent} envs (as many as were sent), got {least}."
        )
    if most < least:
        raise ValueError(
            f"recv failed: expected max_envs of at least {least} (min_envs), got {most}."
        )
    return least, min(most, num_sent)


def set_ids(td: TensorDictBase, env_ids: np.ndarray) -> TensorDictBase:
    """Set `env_ids` in a batch: int64 `[k]`; `[k, *B]` for envs that are batches."""
    ids = (as_tensor if torch.is_inference_mode_enabled() else torch.from_numpy)(
        env_ids.copy()
    )
    if td.ndim > 1:
        ids = ids.view(-1, *(1,) * (td.ndim - 1)).expand(td.batch_size).clone()
    set_leaf(td, (ENV_IDS,), ids)
    return td
