"""Remote rollouts: the policy is sent to the nodes, which return whole rollouts `[n, T]`.

Guarantees: a policy is sent once, and its weights whenever they have changed, once for all nodes. Every rollout names
the version of its weights. If a node is lost, its successor makes the rollout again from new episodes, and nothing of
the lost one is in the data.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDictBase

from envherd.executor.batches.arguments import (
    as_count,
    need_bools,
    need_callables,
    need_state,
    refuse_unused_root,
)
from envherd.executor.cluster.errors import ClusterError
from envherd.executor.cluster.folding import Folded, unfold
from envherd.executor.policy import Placed, Policy
from envherd.executor.protocol.env_states import Event
from envherd.workers.errors import EnvherdError, WorkerLost, WorkerTimeout
from envherd.workers.pickling import dumps

if TYPE_CHECKING:
    from envherd.executor.cluster.engine import ClusterEngine
    from envherd.executor.cluster.hosts import Call, Host, Hosts
    from envherd.executor.cluster.messages import Answer

    #: What a host returns; see `NodeHost.roll`.
    Rolled = tuple[Folded, Answer, int, float]

#: Of this process, so that hosts never take one policy for another.
_policy_ids = itertools.count()
_NO_STATES: Mapping[str, TensorDictBase] = {}


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
        hosts: of the executor.
        policy_factory: builds the policy on a node, for policies that cannot be pickled; the weights still come from
            the policy passed to `rollout` or `stream`.

    Attributes:
        num_envs: N.
        specs: one per env.
        version: number of changes of the weights since the policy was first passed.
    """

    def __init__(
        self,
        engine: ClusterEngine,
        hosts: Hosts,
        policy_factory: Callable[[], Policy] | None,
        close: Callable[[], None],
    ) -> None:
        need_callables("remote_rollouts", policy_factory=policy_factory)
        self.num_envs = engine.num_envs
        self.specs = engine.specs
        self.version = 0
        self._engine = engine
        self._hosts = hosts
        self._factory = policy_factory
        self._close = close
        self._policy: Any = None
        self._policy_id: int | None = None
        self._pickled: Any = None
        self._stamp: Any = None
        self._weights: Any = None
        self._rolling: dict[Call, Mapping[str, TensorDictBase]] = {}  # and the states that it was given

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
            raise ValueError("rollout failed: expected break_when_any_done=False, got True: nodes act separately.")
        if callback is not None:
            raise ValueError("rollout failed: expected no callback, got one: nodes act separately.")
        refuse_unused_root(tensordict, auto_reset=auto_reset)
        with self._engine.guard:
            self._begin(policy, max_steps, auto_reset=auto_reset)
            results: dict[int, Folded] = {}
            try:
                for host in self._hosts.all:
                    span = slice(host.env_ids[0], host.env_ids[-1] + 1)
                    states = {"tensordict": tensordict, "primer": primer}
                    self._start(host, {name: one[span].cpu() for name, one in states.items() if one is not None})
                while self._rolling:
                    host, (results[host.index], *_) = self._next()
            except BaseException:
                self._drain()
                raise
            return self._join([results[host.index] for host in self._hosts.all])

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
        with self._engine.guard:
            self._begin(policy, max_steps, auto_reset=False)
            self._engine.is_rolling = True
        waiting = list(self._hosts.all)
        try:
            while True:
                with self._engine.guard:
                    for host in waiting:
                        self._start(host)
                    host, (data, _, version, wall_s) = self._next()
                    waiting = [host]
                    if overlap:
                        self._start(host)
                        waiting = []
                    self._refresh()
                yield RemoteBatch(
                    data=self._join([data]),
                    env_ids=host.env_ids.copy(),
                    version=version,
                    staleness=self.version - version,
                    node=host.report.place,
                    wall_s=wall_s,
                )
        finally:
            if not self._engine.guard.is_closed:
                self._drain()
                self._engine.is_rolling = False

    def close(self) -> None:
        """Close the executor."""
        self._close()

    # ---- the policy --------------------------------------------------------------------------

    def _begin(self, policy: Any, max_steps: int, *, auto_reset: bool) -> None:
        engine, self._num_steps = self._engine, max_steps
        self._kwargs = {"auto_reset": auto_reset, "break_when_any_done": False}
        engine.guard.refuse_rolling()
        engine.refuse_under_way(engine.all_ids)
        policy = policy.policy if isinstance(policy, Placed) else policy
        if policy is not self._policy:
            self._policy, self._stamp, self._weights = policy, None, None
            self._policy_id = None if policy is None else next(_policy_ids)
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
            self._weights = _put([tensor.detach().cpu().numpy() for tensor in tensors])

    # ---- rollouts ----------------------------------------------------------------------------

    def _start(self, host: Host, states: Mapping[str, TensorDictBase] = _NO_STATES) -> None:
        """Begin a rollout on a host, with states of the policy."""
        self._engine.pool.await_workers(host.env_ids)
        if host.loss is not None and (error := self._engine.flights.settle(host)) is not None:
            raise error
        self._refresh()
        ended = self._engine.states.needs_reset[host.env_ids]
        self._engine.states.move(host.env_ids, Event.IS_BROKEN_OFF)  # until their positions are noted
        what = self._num_steps, ended, {**self._kwargs, **states}, self._policy_id, self.version
        self._rolling[self._hosts.roll(host, *what, self._pickled, self._weights, self._factory is not None)] = states

    def _next(self) -> tuple[Host, Rolled]:
        """Wait for the next finished rollout; note its envs' positions."""
        while True:
            call = self._hosts.wait_any([*self._rolling])
            states = self._rolling.pop(call)
            error = self._note(call)
            if error is not None:
                raise error
            if not isinstance(call.answer, EnvherdError):
                return call.host, call.answer
            self._start(call.host, states)  # its host was lost: the successor makes it again

    def _note(self, call: Call) -> EnvherdError | None:
        """Note the positions of a host's envs after a rollout; return the error to raise, or None."""
        engine, answer = self._engine, call.answer
        if not isinstance(answer, EnvherdError):
            engine.place(call.host, answer[1])
            return None
        engine.positions.mark_lost(call.host.env_ids)
        if call.is_lost:
            return engine.flights.settle(call.host)
        if isinstance(answer, (WorkerLost, WorkerTimeout)):
            self._hosts.note_lost_worker(answer)
            engine.flights.settle(call.host)
        return answer

    def _drain(self) -> None:
        """Wait for pending rollouts, note the envs' positions, and drop the data."""
        while self._rolling:
            call = self._hosts.wait_any([*self._rolling])
            del self._rolling[call]
            self._note(call)

    def _join(self, parts: list[Folded]) -> TensorDictBase:
        """Return rollouts as one batch, in its own memory, on the device."""
        data, device = unfold(parts), self._engine.device
        return data if device is None else data.to(device)


def _put(value: Any) -> Any:
    """Return Ray's reference to a value in its store."""
    import ray  # so that the class can be imported without Ray

    return ray.put(value)
