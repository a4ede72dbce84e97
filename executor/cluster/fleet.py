"""The hosts of one executor, from a connection to the cluster to a pool that commands them, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from envherd.executor.blueprint import spread
from envherd.executor.cluster.orders import Built, Share
from envherd.executor.cluster.pool import ClusterPool
from envherd.executor.cluster.ray_cluster import COME_UP_S, Connection, Places, living_nodes, take_reports
from envherd.executor.cluster.remote_share import RemoteShare
from envherd.executor.cluster.shares import Resources, divide
from envherd.executor.crew import Blueprint
from envherd.executor.options import ExecutorOptions
from envherd.workers.errors import EnvherdError


class Fleet:
    """See the module.

    Args:
        address: of the cluster.
        node_timeout_s: seconds without a sign of life after which a host is given up.

    Attributes:
        shares: one per host.
    """

    def __init__(self, address: str | None, node_timeout_s: float) -> None:
        self.shares: list[RemoteShare] = []
        self._node_timeout_s = node_timeout_s
        self._hosts: list[Any] = []
        self._places: Places | None = None
        self._connection = Connection(address)

    def reserve(
        self,
        ask: Callable[[Sequence[Resources]], list[Resources]],
        where: tuple[str, float, Mapping[str, Any] | None],
    ) -> None:
        """Reserve a place for every share.

        Args:
            ask: from the resources of the living nodes to what each share is to have.
            where: strategy, seconds to wait for room, and runtime environment; see `Places`.

        Raises:
            ClusterError: there is no room.
        """
        self._bundles = ask(living_nodes())
        self._places = Places(self._bundles, *where)

    def build(self, blueprint: Blueprint, options: ExecutorOptions, num_workers: int | None) -> ClusterPool:
        """Start the hosts and have them build their envs.

        Args:
            blueprint: of the whole batch; its blocks are not used.
            options: of the executor.
            num_workers: on each node; None for one per processor of its share.

        Raises:
            ClusterError, FactoryError, WorkerLost, WorkerTimeout: close the fleet.
        """
        assert self._places is not None
        self._hosts = [self._places.start_host(index) for index in range(len(self._bundles))]
        reports = take_reports(self._hosts, COME_UP_S)
        processors = [
            max(1, min(report.cores, int(bundle.get("CPU", report.cores)) or report.cores))
            for report, bundle in zip(reports, self._bundles, strict=True)
        ]
        weights = [bundle.get("CPU", 0) or report.cores for report, bundle in zip(reports, self._bundles, strict=True)]
        counts = divide(len(blueprint.factories), weights)
        first_env = first_worker = 0
        for index, (count, host, report) in enumerate(zip(counts, self._hosts, reports, strict=True)):
            workers = min(count, num_workers or processors[index])
            span = slice(first_env, first_env + count)
            share = Share(
                first_env_id=first_env,
                first_worker_id=first_worker,
                factories=blueprint.factories[span],
                env_kwargs=blueprint.env_kwargs[span],
                num_workers=workers,
                root_seed=blueprint.root_seed,
                preload=blueprint.preload,
                options=dataclasses.replace(options, poison=False, first_env_id=options.first_env_id + first_env),
            )
            self.shares.append(RemoteShare(index, share, report, self._node_timeout_s))
            self.shares[-1].adopt(host)
            first_env, first_worker = first_env + count, first_worker + workers
        for share_there in self.shares:
            self._await_built(share_there)
        blocks = tuple(
            tuple(env_id + one.first_env_id for env_id in block)
            for one in self.shares
            for block in spread(one.num_envs, len(one.worker_ids))
        )
        whole = dataclasses.replace(blueprint, blocks=blocks)
        return ClusterPool(whole, self.shares, options, self)

    def _await_built(self, share: RemoteShare) -> None:
        """Wait for a share's envs, as long as its host lives."""
        while True:
            try:
                built = ray.get(share.built_ref, timeout=1.0)
            except ray.exceptions.GetTimeoutError:
                silence = share.silence()
                if silence is not None:
                    raise silence from None
                continue
            except ray.exceptions.RayError as error:
                raise share.gone(error) from None
            if isinstance(built, EnvherdError):
                raise built
            assert isinstance(built, Built)
            share.take_built(built)
            return

    def replace(self, share: RemoteShare) -> bool:
        """Find another place for a share whose host is gone, and have a new host begin to build it.

        Returns:
            Whether there was room.
        """
        assert self._places is not None
        if not self._places.move(share.share_id):
            return False
        host = self._places.start_host(share.share_id)
        self._hosts[share.share_id] = host
        share.adopt(host)
        return True

    def give_back(self) -> None:
        """End what hosts there are, give back their places and the connection. Idempotent."""
        if not ray.is_initialized():
            return
        for host in self._hosts:
            try:
                ray.kill(host, no_restart=True)
            except Exception:  # it is gone already
                continue
        self._hosts = []
        if self._places is not None:
            self._places.close()
        self._connection.close()
