"""`RayParallelEnv`: the executor over the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from envherd.executor.batched import BatchedEnv, Parts
from envherd.executor.batches.transfer import as_device
from envherd.executor.cluster.errors import ClusterError
from envherd.executor.cluster.messages import Report
from envherd.executor.keywords import names_right_keyword
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.base import Pool
from envherd.executor.pools.blueprint import (
    EnvKwargs,
    MakeEnv,
    as_factories,
    check_agreement,
    checked_options,
    counted,
    draw,
)
from envherd.executor.rollouts.stepwise import StepwiseRun
from envherd.shm.platforms import require
from envherd.workers.build import Factory
from envherd.workers.errors import FactoryError
from envherd.workers.interpreters import interpreter_of

if TYPE_CHECKING:
    from envherd.executor.cluster.engine import ClusterEngine
    from envherd.executor.cluster.remote_rollouts import RemoteRollouts
    from envherd.executor.policy import Policy

Strategy = Literal["STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK"]


class RayParallelEnv(BatchedEnv):
    """N envs on the nodes of a Ray cluster, stepped as one batch: the same API and the same data as `ParallelEnv`.

    Each node gets a share of contiguous envs and a host, which runs them as a `ParallelEnv` does. A command splits the
    batch of actions, calls every host, and combines the rows.

    Args:
        num_envs: N; at least one per node.
        make_env: a callable that builds one env, or a list of N callables. Pickled by value and called on the nodes.
        num_nodes: number of shares; None for one on every node with processors (or with `resources_per_node`).
        resources_per_node: what Ray reserves for each share, `{"CPU": 16, "GPU": 1, ...}`, or a list of these; None for
            all whole processors of each node.
        address: of the cluster; None for the cluster in use, else RAY_ADDRESS, else a new one on this machine.
        envs_per_node: number of envs of each share; None spreads them in proportion to the processors.
        num_workers: worker processes on each node; None for one per processor of its share.
        env_kwargs: keyword arguments of the factory calls: one dict for all, or a list of N.
        seed: root seed of everything random; None draws one.
        device: of the batches; None leaves them on the CPU.
        copy: accepted as by `ParallelEnv`; batches are always the caller's own memory.
        options: see `ExecutorOptions`; the nodes enforce its deadlines and its loss policy.
        strategy: how Ray places shares, also those of a lost node: "SPREAD" puts each on a different node if it can,
            "STRICT_SPREAD" always.
        runtime_env: Ray's runtime environment of the hosts; None for the job's own.
        node_timeout_s: seconds without a sign of life after which a node counts as lost.
        placement_timeout_s: seconds to wait for room, at the start and when a share must move.

    Attributes:
        nodes: one `Report` per share: node id, host name, processors, memory, versions.

    Raises:
        ClusterError: Ray is missing, cannot be reached or has no room, or versions on a node differ from this
            process's.
        FactoryError, SpecError, WorkerLost, WorkerTimeout: as `ParallelEnv`.
    """

    @names_right_keyword
    def __init__(  # noqa: PLR0913  # what `ParallelEnv` takes, and where it shall run
        self,
        num_envs: int | Sequence[Factory | str],
        make_env: MakeEnv | None = None,
        *,
        num_nodes: int | None = None,
        resources_per_node: Mapping[str, float] | Sequence[Mapping[str, float]] | None = None,
        address: str | None = None,
        envs_per_node: Sequence[int] | None = None,
        num_workers: int | None = None,
        env_kwargs: EnvKwargs = None,
        seed: int | None = None,
        device: Any = None,
        copy: bool = True,
        options: ExecutorOptions | None = None,
        strategy: Strategy = "SPREAD",
        runtime_env: Mapping[str, Any] | None = None,
        node_timeout_s: float = 30.0,
        placement_timeout_s: float = 60.0,
    ) -> None:
        count, make_env = counted(num_envs, make_env)
        options = checked_options(options, copy=copy)
        if options.reset_ahead:
            raise ValueError("RayParallelEnv failed: expected reset_ahead=False, got True. Only ParallelEnv has it.")
        if options.start_method == "portable":
            raise ValueError("RayParallelEnv failed: expected the start method 'zygote' or 'spawn', got 'portable'.")
        require("RayParallelEnv")
        if options.alone:
            raise ValueError("RayParallelEnv failed: expected alone=False, got True. Set num_workers instead.")
        options.refuse_capsules("RayParallelEnv")
        options.refuse_interrupts("RayParallelEnv")
        where_to = as_device(device)
        factories = as_factories(count, make_env)
        if any(interpreter_of(factory) for factory in factories):
            raise FactoryError("RayParallelEnv failed: expected factories for this interpreter, got an InPython.")
        blueprint = draw(factories, env_kwargs, 1, seed, options)
        _need_ray()
        from envherd.executor.cluster.engine import ClusterEngine
        from envherd.executor.cluster.hosts import Hosts

        self._hosts = hosts = Hosts(address, (node_timeout_s, placement_timeout_s), options)
        try:
            where = strategy, runtime_env
            hosts.start(blueprint, (num_nodes, resources_per_node), envs_per_node, num_workers, where)
            check_agreement(hosts.specs, factories, blueprint.env_kwargs)
            super().__init__(
                cast("Pool", hosts),
                seed=blueprint.root_seed,
                device=where_to,
                copy=True,  # no frame is a view of a worker's
                options=options,
                parts=Parts(engine=ClusterEngine, run=StepwiseRun),
            )
        except BaseException:
            hosts.close(timeout_s=0)
            raise

    def remote_rollouts(self, policy_factory: Callable[[], Policy] | None = None) -> RemoteRollouts:
        """Return a maker of rollouts with envs and policy on the same nodes; a `Collector` accepts it.

        Args:
            policy_factory: builds the policy on a node, for policies that cannot be pickled.
        """
        from envherd.executor.cluster.remote_rollouts import RemoteRollouts

        return RemoteRollouts(cast("ClusterEngine", self.engine), self._hosts, policy_factory, self.close)

    @property
    def nodes(self) -> tuple[Report, ...]:
        """Each host's report on its node."""
        return tuple(host.report for host in self._hosts.all)

    @property
    def envs_per_node(self) -> tuple[int, ...]:
        """Number of envs of each share."""
        return tuple(len(host.env_ids) for host in self._hosts.all)


def _need_ray() -> None:
    """Raise a `ClusterError` if Ray cannot be imported."""
    try:
        import ray  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "ray":  # Ray is installed, and lacks a package
            raise
        raise ClusterError(
            f"RayParallelEnv failed: expected Ray, got {type(error).__name__}: {error}. "
            f"Install it, here and on every node: pip install 'envherd[ray]'."
        ) from error
