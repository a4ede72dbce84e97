"""`RayRollouts`: rollouts on the nodes of a Ray cluster, each of which runs a share of the envs as a `ParallelEnv`.

Guarantees:
- The data are those of one `ParallelEnv` with the same seed, bit for bit, if the policy draws no random numbers.
- The policy is sent once, and its weights whenever they have changed, once for all nodes.
- Every wait ends at the latest when Ray finds a node to be lost. Answers are taken in the order in which the calls were
  made, among those that have arrived: no node starves, however fast another one is.
- Nothing of a rollout that was lost with its node is in the data: it is made again where Ray starts the share.
- An interrupt leaves all nodes usable: the answer to the interrupted call is dropped when the next call is made.
"""

import contextlib
import dataclasses
import math
import os
import socket
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from envherd.executor.assembly import close_in_owner
from envherd.executor.batches.arguments import (
    as_count,
    check_rollout,
    need_callables,
)
from envherd.executor.cluster.shares import ClusterError, bundles_for, no_room, spread
from envherd.executor.guests.collectors.policy import Placed, Policy, tensors_of
from envherd.executor.guests.monitor import Statistics
from envherd.executor.keywords import names_right_keyword, refuses_keywords
from envherd.executor.options import ExecutorOptions
from envherd.executor.processes.error_messages import log
from envherd.executor.protocol.call_guard import CallGuard
from envherd.executor.sending.blueprint import (
    EnvKwargs,
    MakeEnv,
    as_factories,
    checked_options,
    counted,
    draw,
)
from envherd.shm.finalizer import ClosedAtEnd
from envherd.workers.build import Factory
from envherd.workers.errors import Busy, EnvherdError, WorkerLost
from envherd.workers.sending import registries
from envherd.workers.sending.pickling import dumps

# The constructor names what to install.
with contextlib.suppress(ModuleNotFoundError):
    import ray

    from envherd.executor.cluster.node import Node, packed


#: Seconds for the head of a cluster to accept a connection; Ray itself would try for minutes.
_CONNECT_S = 5.0
#: Seconds between lines of the log about nodes that are still starting.
_LOG_S = 10.0


class _Share(SimpleNamespace):
    """The envs of one node.

    Attributes:
        env_ids: their ids.
        actor: runs the envs; see `Node`.
        place: where that is.
        rows: that the latest answer has returned; see `Node.do`.
        version: of the policy in its latest call.
    """

    def __str__(self) -> str:
        return f"{self.place} (envs {self.env_ids[0]}-{self.env_ids[-1]})"


class RayRollouts(ClosedAtEnd):
    """N envs on the nodes of a Ray cluster, with a copy of the policy on each; a `Collector` takes it as its executor.

    Each node gets a share of contiguous envs, in proportion to its reserved processors, and runs them as a
    `ParallelEnv`. The policy acts there without grad. Its random draws come from a generator seeded by the root seed
    and the share.

    Args:
        num_envs: N; or a list of N factories alone. There are no more shares than envs.
        make_env: a callable that builds one env, or a list of N callables. Pickled by value and called on the nodes.
        address: of the cluster; None for the cluster in use, else RAY_ADDRESS, else a new one on this machine.
        num_nodes: number of shares; None for one on every node with processors (or with `resources_per_node`).
        resources_per_node: what Ray reserves for each share, `{"CPU": 16, "GPU": 1, ...}`; None for all whole
            processors of each node.
        num_workers: worker processes on each node; None for one per processor of its share.
        env_kwargs: keyword arguments of the factory calls: one dict for all, or a list of N.
        seed: root seed of everything random; None draws one.
        options: see `ExecutorOptions`. With `on_worker_loss="restart"`, Ray starts a lost node's share on another one,
            at most `max_restarts` times; `restart_window_s` does not apply to nodes.
        policy_factory: builds the policy on a node, if it cannot be pickled, or shall run on a GPU there. The weights
            still come from the policy that is passed to `rollout` or `stream`.
        strategy: how Ray places shares, also those of a lost node: "SPREAD" puts each on a different node if it can,
            "STRICT_SPREAD" always.
        runtime_env: Ray's runtime environment of the nodes; None for the job's own.
        placement_timeout_s: seconds to wait for room.

    Attributes:
        num_envs: N.
        specs: one per env.
        seed: the root seed.
        version: of the policy on the nodes, from 0; every change of its weights adds 1. -1 before the first.
        is_resumed: see `BatchedEnv`.

    Raises:
        ClusterError: Ray cannot be reached or has no room, or a node lacks what a factory imports.
        FactoryError, SpecError, WorkerLost, WorkerTimeout: as `ParallelEnv`; the message names the node.
    """

    is_resumed = False
    version = -1
    _sent: Any = (None, None)  # the policy and its weights, pickled

    @refuses_keywords(
        node_timeout_s="Ray itself checks whether nodes live: set RAY_health_check_failure_threshold."
    )
    def __init__(  # noqa: PLR0913  # what `ParallelEnv` takes, and where it shall run
        self,
        num_envs: int | Sequence[Factory],
        make_env: MakeEnv | None = None,
        *,
        address: str | None = None,
        num_nodes: int | None = None,
        resources_per_node: Mapping[str, float] | None = None,
        num_workers: int | None = None,
        env_kwargs: EnvKwargs = None,
        seed: int | None = None,
        options: ExecutorOptions | None = None,
        policy_factory: Callable[[], Policy] | None = None,
        strategy: str = "SPREAD",
        runtime_env: Mapping[str, Any] | None = None,
        placement_timeout_s: float = 60.0,
    ) -> None:
        need_callables("RayRollouts", policy_factory=policy_factory)
        as_count("RayRollouts", "num_workers", num_workers, or_none=True)
        as_count("RayRollouts", "num_nodes", num_nodes, or_none=True)
        count, make_env = counted(num_envs, make_env)
        options = checked_options(options)
        blueprint = draw(
            as_factories(count, make_env),
            env_kwargs,
            0,
            seed,
            options,
        )
        self.num_envs = len(blueprint.calls)
        self.seed = blueprint.root_seed
        self._factory = policy_factory
        self._shares: list[_Share] = []
        # An interrupt leaves nothing to repair: the next call drops the answers.
        self._guard = CallGuard(
            SimpleNamespace(
                is_dirty=False,
                is_rolling=False,
                is_in_flight=False,
                recover=lambda: None,
            )
        )
        with contextlib.ExitStack() as at_end:
            _connect(address, at_end)
            free = [
                dict(node["Resources"])
                for node in ray.nodes()  # type: ignore[no-untyped-call]  # Ray's
                if node["Alive"]
            ]
            bundles = bundles_for(free, self.num_envs, num_nodes, resources_per_node)
            group = ray.util.placement_group(bundles, strategy=strategy)
            at_end.callback(_close, self._shares, group, options.close_timeout_s)
            if not group.wait(placement_timeout_s):
                raise no_room(bundles, free, placement_timeout_s)
            node_ids = ray.util.placement_group_table(group)["bundles_to_node_id"]
            cores = [math.ceil(bundle.get("CPU", 0)) for bundle in bundles]
            for index, env_ids in enumerate(
                spread(self.num_envs, [count or 1 for count in cores])
            ):
                # A share without reserved processors uses all of the node's.
                workers = (
                    None if options.alone else min(len(env_ids), cores[index]) or None
                )
                how = {
                    "num_envs": [blueprint.calls[i].factory for i in env_ids],
                    "env_kwargs": [blueprint.calls[i].sent.kwargs for i in env_ids],
                    "num_workers": num_workers or workers,
                    "seed": self.seed,
                    "options": dataclasses.replace(
                        options,
                        first_env_id=options.first_env_id + env_ids[0],
                    ),
                }
                actor = _actor(
                    group,
                    index,
                    bundles[index],
                    runtime_env,
                    options,
                ).remote(registries.collect(), dumps(how), env_ids[0])
                self._shares.append(
                    _Share(
                        env_ids=env_ids,
                        actor=actor,
                        place=f"node {node_ids[index][:8]}",
                        rows=None,
                    )
                )
            reports = self._ask(lambda node: (node.env.specs, node.env.num_workers))
            self.specs = tuple(spec for specs, _ in reports for spec in specs)
            self._finalizer = weakref.finalize(
                self,
                close_in_owner,
                at_end.pop_all(),
                os.getpid(),
            )
        self.num_workers = sum(number for _, number in reports)

    # ---- rollouts ----------------------------------------------------------------------------

    @names_right_keyword
    def rollout(  # noqa: PLR0913  # the arguments of TorchRL's rollout
        self,
        max_steps: int,
        policy: Policy | None = None,
        *,
        callback: None = None,
        auto_reset: bool = True,
        break_when_any_done: bool = False,
        tensordict: TensorDictBase | None = None,
        primer: TensorDictBase | None = None,
    ) -> TensorDictBase:
        """Make a rollout on every node with the policy's present weights, and return them as one batch.

        Args:
            max_steps: T.
            policy: takes a root batch `[n]` and returns it with the action; None draws random actions on the nodes.
            callback: must be None: nodes do not wait for each other's steps.
            auto_reset: reset all envs first; False continues, and resets those that have ended.
            break_when_any_done: must be False, for the same reason.
            tensordict: batch `[N]`, with the policy's own state before the first step.
            primer: batch `[N]`, the policy's state at the beginning of an episode.

        Returns:
            Batch `[N, T]`, time last. Own memory.

        Raises:
            EnvError, WorkerLost, WorkerTimeout, Busy, Closed: the rollout is lost; envs without an error continue where
                it ends.
            ClusterError: the policy cannot be pickled.
            Exception: any that the policy raises.
        """
        max_steps = check_rollout(
            max_steps,
            policy,
            callback,
            tensordict,
            primer,
            self.num_envs,
            auto_reset=auto_reset,
            break_when_any_done=break_when_any_done,
        )
        if break_when_any_done is not False or callback is not None:
            raise ValueError(
                "rollout failed: expected break_when_any_done=False and no callback: nodes act separately."
            )
        how = {
            "max_steps": max_steps,
            "auto_reset": auto_reset,
            "tensordict": tensordict,
            "primer": primer,
        }
        parts = self._ask(
            Node.roll,
            (self._how(share, policy, how) for share in self._shares),
        )
        if all(spec == self.specs[0] for spec in self.specs):
            return torch.cat(parts)
        # As on one machine, rows of unlike envs are a lazy stack.
        return LazyStackedTensorDict(
            *(row for part in parts for row in part.unbind(0)),
            stack_dim=0,
        )

    @refuses_keywords(overlap="Call rollout, which uses the present weights.")
    def stream(
        self,
        max_steps: int,
        policy: Policy | None = None,
        *,
        primer: TensorDictBase | None = None,
    ) -> Iterator[TensorDictBase]:
        """Iterate rollouts in the order in which nodes finish them: a slow node does not delay the others.

        A node's next rollout begins before its last one is yielded, so it works while the caller learns, with weights
        that are one or more versions old. `rollout` uses the present ones.
        Episodes continue from batch to batch, with the policy's own state. Another call ends the iteration.

        Args:
            max_steps: T.
            policy: see `rollout`; its weights are read whenever a rollout begins.
            primer: see `rollout`.

        Yields:
            One node's rollout `[n, T]`, with `env_ids` and `policy_version` (int64 `[n, T]`). Own memory.
        """
        max_steps = check_rollout(
            max_steps,
            policy,
            None,
            None,
            primer,
            self.num_envs,
            auto_reset=False,
            break_when_any_done=False,
            call="stream",
        )
        how = {"max_steps": max_steps, "auto_reset": False, "primer": primer}
        with self._guard:
            pending = self._pending = dict[Any, _Share]()
            for share in self._shares:
                self._begin(share, Node.roll, self._how(share, policy, how))
        while True:
            with self._guard:
                if self._pending is not pending:
                    raise Busy(
                        "stream failed: another call was made since. Iterate over a new stream."
                    )
                share, data = self._next_answer()
                data["env_ids"] = (
                    torch.tensor(share.env_ids, device="cpu")[:, None]
                    .expand(data.batch_size[:2])
                    .clone()
                )
                data["policy_version"] = torch.full_like(data["env_ids"], share.version)
                self._begin(share, Node.roll, self._how(share, policy, how))
            yield data

    def _how(
        self,
        share: _Share,
        policy: Any,
        how: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the arguments of a node's rollout with the policy's present weights, from those of a whole batch."""
        own = {
            name: value[share.env_ids].cpu()
            if isinstance(value, TensorDictBase)
            else value
            for name, value in how.items()
        }
        own["policy"] = None if policy is None else self._refreshed(policy)
        share.version = self.version
        return own

    def _refreshed(self, policy: Any) -> tuple[Any, Any]:
        """Send what has changed of the policy: its weights, or all of another policy, or of one that is no module.

        Contents are compared, because torch does not count every write to a tensor (by `.data`, by CUDA graphs).

        Returns:
            Ray's references of what makes the policy and of its weights.
        """
        policy = policy.policy if isinstance(policy, Placed) else policy
        weights = dumps([packed(tensor) for tensor in tensors_of(policy)])
        made = policy if isinstance(policy, torch.nn.Module) else self._pickle(policy)
        if made != self._sent[0]:
            self._made = ray.put(self._pickle(policy))
        if (made, weights) != self._sent:
            self._weights = ray.put(weights)
            self.version += 1
            self._sent = (made, weights)
        return self._made, self._weights

    def _pickle(self, policy: Any) -> bytes:
        """Return what makes the policy on a node."""
        try:
            return dumps(self._factory or (lambda: policy))
        except Exception as error:
            raise ClusterError(
                f"rollout failed: expected a policy that can be pickled, got {type(policy).__name__}: {error}. Give "
                f"RayRollouts(policy_factory=...), which builds it on the nodes; weights follow the policy here."
            ) from error

    # ---- calls of nodes ----------------------------------------------------------------------

    def _begin(
        self,
        share: _Share,
        call: Callable[..., Any],
        *args: Any,
    ) -> None:
        # The rows are for an actor that Ray starts in the place of this one.
        self._pending[share.actor.do.remote(call, share.rows, *args)] = share

    def _next_answer(self) -> tuple[_Share, Any]:
        """Wait for an answer: that to the oldest of the calls whose answers have arrived."""
        refs = [*self._pending]
        # All that have arrived, in this order: a wait for one returns any of them.
        while not (ready := ray.wait(refs, num_returns=len(refs), timeout=0)[0]):
            starting = [
                str(one) for one in self._pending.values() if "pid" not in one.place
            ]
            if not ray.wait(refs, timeout=_LOG_S)[0] and starting:
                log.warning(
                    "RayRollouts waits for nodes that are still starting: %s.",
                    ", ".join(starting),
                )
        share = self._pending.pop(ready[0])
        try:
            result, share.place, share.rows = ray.get(ready[0])
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, EnvherdError):
                raise
            raise error.cause from error.cause.__cause__  # without Ray's text
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
            text = " ".join(str(getattr(error, "cause", None) or error).split())
            raise WorkerLost(
                f"the call failed: {share} is lost: {type(error).__name__}: {text}. "
                f"ExecutorOptions(on_worker_loss='restart', max_restarts=...) starts the envs of lost nodes on others.",
                env_ids=tuple(share.env_ids),
            ) from None
        return share, result

    # ---- everything else ---------------------------------------------------------------------

    def state_dict(self, *, with_envs: bool | None = None) -> dict[str, Any]:
        """Return the state for a checkpoint: for each node that of its `ParallelEnv`, and of the policy's generator.

        The policy is not included. See `ParallelEnv.state_dict`.
        """
        return {
            "nodes": self._ask(
                lambda node: {
                    **node.env.state_dict(with_envs=with_envs),
                    "torch": torch.get_rng_state(),
                }
            )
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`, of as many nodes with as many envs: the next rollouts return equal data.

        Raises:
            ValueError: a state of other shares; nothing was loaded.
        """
        sizes = [len(share.env_ids) for share in self._shares]
        if [
            len(part["executor"]["episodes"]) for part in state.get("nodes", ())
        ] != sizes:
            raise ValueError(
                f"load_state_dict failed: expected a state of nodes with {sizes} envs, got another."
            )
        self._ask(Node.load, state["nodes"])
        self.is_resumed = all("roots" in part["executor"] for part in state["nodes"])

    def statistics(self) -> list[Statistics]:
        """Return the statistics of each node; those of a node that was replaced begin anew."""
        return self._ask(lambda node: node.env.statistics())

    def _ask(self, call: Callable[..., Any], *parts: Iterable[Any]) -> list[Any]:
        """Make a call of all nodes, each with its part of each argument; return the answers, ordered as the shares."""
        with self._guard:
            self._pending = {}
            for share, *own in zip(self._shares, *parts, strict=True):
                self._begin(share, call, *own)
            answers = sorted(
                (self._next_answer() for _ in self._shares),
                key=lambda answer: answer[0].env_ids,
            )
            return [result for _share, result in answers]

    def close(self) -> None:
        """Close the envs and release the nodes, within seconds. Idempotent."""
        self._guard.shut()
        self._finalizer()


def _connect(address: str | None, at_end: contextlib.ExitStack) -> None:
    """Connect to a cluster until the end, unless this process has done so."""
    if "packed" not in globals():
        raise ClusterError(
            "RayRollouts failed: expected Ray, which is not installed, or lacks a package. Install it, here and on "
            "every node: pip install 'envherd[ray]'."
        )
    if ray.is_initialized():
        return
    host, _, port = (address or "").rpartition(":")
    try:
        if host and port.isdigit():
            socket.create_connection(
                (host.removeprefix("ray://"), int(port)),
                _CONNECT_S,
            ).close()
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"RayRollouts failed: expected a Ray cluster at {address}, got {type(error).__name__}: {error}. Its head "
            f"prints its address when `ray start --head` starts it. Without an address, Ray starts on this machine."
        ) from error
    at_end.callback(ray.shutdown)


def _actor(
    group: Any,
    index: int,
    bundle: Mapping[str, float],
    runtime_env: Any,
    options: ExecutorOptions,
) -> Any:
    """Return the class of actors that run in a bundle of a placement group."""
    restarts = options.max_restarts if options.on_worker_loss == "restart" else 0
    return ray.remote(Node).options(
        num_cpus=bundle.get("CPU", 0),
        num_gpus=bundle.get("GPU", 0),
        memory=bundle.get("memory"),
        resources={
            name: amount
            for name, amount in bundle.items()
            if name not in ("CPU", "GPU", "memory")
        },
        scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            group, index
        ),
        runtime_env=runtime_env,
        max_restarts=restarts,
        # A call is made again where the actor was started again.
        max_task_retries=-1 if restarts else 0,
    )


def _close(shares: Sequence[_Share], group: Any, timeout_s: float) -> None:
    """Close the envs of all nodes that have built them, as far as they do so in time; release the nodes.

    Ray has released them if it was shut down.
    """
    if ray.is_initialized():
        calls = [
            share.actor.do.remote(lambda node: node.env.close(), None)
            for share in shares
            if "pid" in share.place
        ]
        ray.wait(calls, num_returns=len(calls), timeout=timeout_s)
        # It kills the actors.
        ray.util.remove_placement_group(group)
