"""Remote rollouts: the policy is sent to the nodes, which return whole rollouts `[n, T]`.

Guarantees: a policy is sent once, and its weights whenever they have changed, once for all nodes. Every rollout names
the version of its weights. If a node is lost, its successor makes the rollout again from new episodes, and nothing of
the lost one is in the data.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from envherd.executor.batches.arguments import (
    as_count,
    need_bools,
    need_callables,
    need_state,
    refuse_unused_root,
)
from envherd.executor.cluster.errors import ClusterError
from envherd.executor.cluster.folding import unfolded
from envherd.executor.cluster.host import weights_of
from envherd.executor.cluster.orders import Rolled, RollOrder
from envherd.executor.policy import Placed, Policy
from envherd.executor.protocol.env_states import Event
from envherd.shm.specs import Key
from envherd.workers.errors import EnvherdError, WorkerLost, WorkerTimeout
from envherd.workers.pickling import dumps

if TYPE_CHECKING:
    from envherd.executor.cluster.pool import ClusterPool
    from envherd.executor.cluster.remote_share import RemoteShare
    from envherd.executor.protocol.engine import Engine


@dataclass(frozen=True, kw_only=True)
class RemoteBatch:
    """A rollout of one node's envs.

    Attributes:
        data: batch `[n, T]`, time last. Own memory.
        env_ids: int64 `[n]`.
        version: of its weights, as counted by `RemoteRollouts.version`.
        staleness: number of newer versions when it was handed out.
        node: where it was made.
        wall_s: seconds that it took there.
    """

    data: TensorDictBase
    env_ids: np.ndarray
    version: int
    staleness: int
    node: str
    wall_s: float


class RemoteRollouts:
    """Makes rollouts on the nodes of a `RayParallelEnv`; a `Collector` takes it as its executor.

    The policy runs on the nodes, as a copy, without grad. Its random draws there come from generators seeded by the
    root seed and the node's share. The envs' data depend only on actions and seed.

    Args:
        engine: of the executor.
        pool: of the executor.
        policy_factory: builds the policy on a node, for policies that cannot be pickled; the weights still come from
            the policy passed to `rollout` or `stream`.

    Attributes:
        num_envs: N.
        specs: one per env.
        version: number of changes of the weights since the policy was first passed.
    """

    def __init__(
        self, engine: Engine, pool: ClusterPool, policy_factory: Callable[[], Policy] | None, close: Callable[[], None]
    ) -> None:
        need_callables("remote_rollouts", policy_factory=policy_factory)
        self.num_envs = engine.num_envs
        self.specs = engine.specs
        self.version = 0
        self._engine = engine
        self._pool = pool
        self._factory = policy_factory
        self._close = close
        self._ids = itertools.count()
        self._policy: Any = None
        self._policy_id: int | None = None
        self._pickled: Any = None
        self._shipped: dict[int, tuple[Any, int]] = {}  # share id -> (host, policy id)
        self._stamp: Any = None
        self._weights: Any = None
        self._rolling: set[int] = set()  # share ids whose rollout is pending
        self._done: dict[int, Rolled | EnvherdError] = {}

    # ---- what users call ---------------------------------------------------------------------

    def rollout(  # noqa: PLR0913  # the arguments of TorchRL's rollout
        self,
        max_steps: int,
        policy: Policy | None = None,
        *,
        auto_reset: bool = True,
        break_when_any_done: bool = False,
        callback: Callable[[Any, TensorDictBase], Any] | None = None,
        tensordict: TensorDictBase | None = None,
        primer: TensorDictBase | None = None,
    ) -> TensorDictBase:
        """Make a rollout on every node with the policy's present weights, and return them as one batch.

        Args:
            max_steps: T.
            policy: takes a root batch `[n]` and returns it with the action; None draws random actions on the nodes.
            auto_reset: reset all envs first; False continues, and resets those that have ended.
            break_when_any_done: must be False: nodes do not wait for each other's steps.
            callback: must be None, for the same reason.
            tensordict: batch `[N]`, with the policy's own state before the first step.
            primer: batch `[N]`, the policy's state at the beginning of an episode.

        Returns:
            Batch `[N, T]`, time last. Own memory.

        Raises:
            EnvError, WorkerLost, WorkerTimeout, Busy, Closed: the rollout is lost; the executor remains usable.
            ClusterError: the policy cannot be pickled.
        """
        max_steps = as_count("rollout", "max_steps", max_steps)
        need_callables("rollout", policy=policy)
        need_bools("rollout", auto_reset=auto_reset, break_when_any_done=break_when_any_done)
        need_state("rollout", "tensordict", tensordict, self.num_envs)
        need_state("rollout", "primer", primer, self.num_envs)
        if break_when_any_done:
            raise ValueError("rollout failed: expected break_when_any_done=False, got True: nodes roll on their own.")
        if callback is not None:
            raise ValueError("rollout failed: expected no callback, got one: nodes roll on their own.")
        max_steps = as_count("rollout", "max_steps", max_steps)
        refuse_unused_root(tensordict, auto_reset=auto_reset)
        with self._engine.guard:
            self._begin(policy)
            kwargs = {"auto_reset": auto_reset, "break_when_any_done": False}
            states = (tensordict, primer)
            results: dict[int, Rolled] = {}
            try:
                for share in self._pool.shares:
                    self._start(share, max_steps, kwargs, states)
                while len(results) < len(self._pool.shares):
                    share_id, result = self._next(max_steps, kwargs, states)
                    results[share_id] = result
            except BaseException:
                self._drain()
                raise
            return self._join([results[share.share_id] for share in self._pool.shares])

    def stream(
        self, max_steps: int, policy: Policy | None = None, *, overlap: bool = True
    ) -> Generator[RemoteBatch, None, None]:
        """Iterate rollouts in the order in which nodes finish them: a slow node does not delay the others.

        Episodes continue from batch to batch. During the iteration the executor cannot be used otherwise. Closing the
        iterator waits for pending rollouts.

        Args:
            max_steps: T.
            policy: see `rollout`; its weights are read whenever a rollout begins.
            overlap: begin a node's next rollout before yielding its last one, so the node works while the caller
                learns; its weights are then one or more versions old. False begins it at the next iteration.

        Yields:
            One node's rollout, with the version and staleness of its weights.
        """
        max_steps = as_count("stream", "max_steps", max_steps)
        need_callables("stream", policy=policy)
        need_bools("stream", overlap=overlap)
        kwargs = {"auto_reset": False, "break_when_any_done": False}
        with self._engine.guard:
            self._begin(policy)
            self._engine.is_rolling = True
        waiting = list(self._pool.shares)
        try:
            while True:
                with self._engine.guard:
                    for share in waiting:
                        self._start(share, max_steps, kwargs, (None, None))
                    share_id, result = self._next(max_steps, kwargs, (None, None))
                    share = self._pool.shares[share_id]
                    data = self._join([result])
                    waiting = [share]
                    if overlap:
                        self._start(share, max_steps, kwargs, (None, None))
                        waiting = []
                    self._refresh()
                yield RemoteBatch(
                    data=data,
                    env_ids=share.env_ids.copy(),
                    version=result.version,
                    staleness=self.version - result.version,
                    node=share.place,
                    wall_s=result.wall_s,
                )
        finally:
            if not self._engine.guard.is_closed:
                self._drain()
                self._engine.is_rolling = False

    def close(self) -> None:
        """Close the executor."""
        self._close()

    # ---- the policy --------------------------------------------------------------------------

    def _begin(self, policy: Any) -> None:
        engine = self._engine
        engine.refuse_rolling()
        engine.refuse_under_way(engine.all_ids)
        policy = policy.policy if isinstance(policy, Placed) else policy
        if policy is not self._policy:
            self._policy, self._stamp, self._weights = policy, None, None
            self._policy_id = None if policy is None else next(self._ids)
            self._pickled = None if policy is None else _put(self._pickle(policy))
            self.version = 0
        self._refresh()

    def _pickle(self, policy: Any) -> bytes:
        what = policy if self._factory is None else self._factory
        try:
            return dumps(what)
        except Exception as error:
            raise ClusterError(
                f"rollout failed: expected a policy that can be pickled, got {type(policy).__name__}: {error}. Give "
                f"remote_rollouts(policy_factory=...), which builds it on the nodes; weights follow the policy here."
            ) from error

    def _refresh(self) -> None:
        """Note a new version of the weights if they have changed."""
        if not isinstance(self._policy, torch.nn.Module):
            return
        tensors = [*self._policy.parameters(), *self._policy.buffers()]
        stamp = [(tensor.data_ptr(), tensor._version) for tensor in tensors]  # noqa: SLF001  # counts writes
        if stamp != self._stamp:
            self.version += self._stamp is not None
            self._stamp = stamp
            self._weights = _put(weights_of(self._policy))

    def _ship(self, share: RemoteShare) -> None:
        """Send the policy, unless this host has it; a new host has not."""
        if self._policy_id is None or self._shipped.get(share.share_id) == (share.home.host, self._policy_id):
            return
        kind = "policy" if self._factory is None else "factory"
        self._pool.fleet.send(share, "take_policy", (self._policy_id, self._pickled, kind), _take_nothing)
        if not share.is_moving:
            self._shipped[share.share_id] = (share.home.host, self._policy_id)

    # ---- rollouts ----------------------------------------------------------------------------

    def _start(self, share: RemoteShare, max_steps: int, kwargs: dict[str, Any], states: tuple[Any, Any]) -> None:
        """Begin a rollout on a node; first replace the node if it is lost and that is allowed."""
        if any(worker_id in self._pool.lost for worker_id in share.worker_ids):
            self._restore(share)
        self._refresh()
        names = ("tensordict", "primer")
        span = slice(share.first_env_id, share.first_env_id + share.num_envs)
        own = {name: state[span].cpu() for name, state in zip(names, states, strict=True) if state is not None}
        positions, side = self._engine.positions, self._engine.side
        roots = values = None
        if not share.knows_roots and not kwargs["auto_reset"]:
            roots = [leaf for group, ids in share.wire_rows.groups for leaf in positions.gather_roots(group, ids)]
            latest = side.latest(positions.in_root) if side.has_values else {}
            values = [latest[env_id] for env_id in share.env_ids.tolist()] if latest else None
        order = RollOrder(
            num_steps=max_steps,
            policy_id=self._policy_id,
            version=self.version,
            ended=self._engine.states.needs_reset[share.env_ids],
            roots=roots,
            side=values,
            kwargs={**kwargs, **own},
        )
        self._done.pop(share.share_id, None)
        self._rolling.add(share.share_id)
        share.knows_roots = False
        self._ship(share)
        self._pool.fleet.send(share, "roll", (order, self._weights), self._take)

    def _take(self, share: RemoteShare, rolled: Rolled | EnvherdError) -> None:
        self._done[share.share_id] = rolled
        self._rolling.discard(share.share_id)

    def _next(self, max_steps: int, kwargs: dict[str, Any], states: tuple[Any, Any]) -> tuple[int, Rolled]:
        """Wait for the next finished rollout; note its envs' positions."""
        pool = self._pool
        while not self._done:
            pool.fleet.take(None)
            for share in pool.shares:
                if share.share_id in self._rolling and share.is_out:
                    self._rolling.discard(share.share_id)
                    self._start(share, max_steps, kwargs, states)  # or raise its loss
        share_id = next(iter(self._done))
        result = self._done.pop(share_id)
        share = pool.shares[share_id]
        if isinstance(result, EnvherdError):
            self._engine.states.move(share.env_ids, Event.IS_BROKEN_OFF)
            if isinstance(result, (WorkerLost, WorkerTimeout)):
                pool.fail(share, result)
            raise result
        self._note(share, result)
        return share_id, result

    def _restore(self, share: RemoteShare) -> None:
        """Replace the workers or the host that a share has lost, or raise the loss."""
        pool, losses = self._pool, self._engine.flights.losses
        lost = [worker_id for worker_id in share.worker_ids if worker_id in pool.lost]
        losses.lose(pool.blueprint.envs_of(lost))
        if self._engine.options.on_worker_loss != "restart":
            losses.forget()
            raise pool.lost[lost[0]]
        for worker_id in lost:
            pool.begin_restart(worker_id)

    def _note(self, share: RemoteShare, rolled: Rolled) -> None:
        """Note the positions of a share's envs after a rollout."""
        pool, engine = self._pool, self._engine
        columns = engine.positions.reset_columns(share.env_ids)
        share.wire_rows.unpack_rows("root", rolled.reply.roots, None, columns)
        share.note_words(pool.slab.words, pool.resets_before_start, rolled.reply)
        engine.flights.put(share.env_ids, columns)
        engine.side.root.update(zip(share.env_ids.tolist(), rolled.side, strict=False))
        share.knows_roots = True
        pool.num_losses += rolled.worker_losses
        engine.flights.losses.num_interrupted += rolled.interrupted

    def _drain(self) -> None:
        """Wait for pending rollouts, note the envs' positions, and drop the data."""
        pool = self._pool
        while any(share.share_id in self._rolling and share.has_host for share in pool.shares):
            pool.fleet.take(None)
        self._rolling.clear()
        for share in pool.shares:
            share.drop_held()
            result = self._done.pop(share.share_id, None)
            if isinstance(result, Rolled):
                self._note(share, result)
            elif result is not None or not share.has_host:
                self._engine.states.move(share.env_ids, Event.IS_BROKEN_OFF)

    def _join(self, parts: list[Rolled]) -> TensorDictBase:
        """Return rollouts as one batch, in its own memory."""
        device = self._engine.device
        if len({_keys_of(part) for part in parts}) > 1 or parts[0].leaves is None:
            rows = [row for part in parts for row in _as_batch([part]).unbind(0)]
            data: TensorDictBase = LazyStackedTensorDict(*rows, stack_dim=0)
        else:
            data = _as_batch(parts)
        return data if device is None else data.to(device)


def _keys_of(part: Rolled) -> frozenset[Key] | None:
    return None if part.leaves is None else frozenset((*part.leaves, *part.folded))


def _take_nothing(share: RemoteShare, _: None) -> None:
    """Ignore the answer to a policy; a host that cannot take it ends."""


def _as_batch(parts: list[Rolled]) -> TensorDictBase:
    """Return rollouts that have the same keys as one batch, in its own memory."""
    if parts[0].leaves is None:
        return parts[0].batch
    leaves = {
        key: torch.from_numpy(np.concatenate([unfolded(part.leaves or {}, part.folded, key) for part in parts]))
        for key in (*parts[0].leaves, *parts[0].folded)
    }
    num_envs, num_steps = next(iter(leaves.values())).shape[:2]
    data = TensorDict({}, (num_envs, num_steps, *parts[0].tail))
    for key, value in leaves.items():
        data.set(key, value)
    data.refine_names(None, "time", ...)
    return data


def _put(value: Any) -> Any:
    """Return Ray's reference to a value in its store."""
    import ray  # so that the class can be imported without Ray

    return ray.put(value)
