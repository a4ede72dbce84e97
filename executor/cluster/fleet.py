"""The hosts of one executor, from a connection to the cluster to hosts that have built their envs, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from envherd.executor.cluster.errors import ClusterError
from envherd.executor.cluster.orders import Report, Share, Survey
from envherd.executor.cluster.ray_cluster import COME_UP_S, GONE, Connection, Places, call, living_nodes, take_reports
from envherd.executor.cluster.remote_share import RemoteShare
from envherd.executor.cluster.shares import Resources, divide
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.blueprint import spread
from envherd.executor.pools.crew import Blueprint
from envherd.executor.sizing.probing import ProbeLimits, Subject
from envherd.workers.errors import EnvherdError


def processors_of(reports: Sequence[Report], bundles: Sequence[Resources]) -> list[int]:
    """Return how many processors each share may use."""
    return [
        max(1, min(report.cores, int(bundle.get("CPU", report.cores)) or report.cores))
        for report, bundle in zip(reports, bundles, strict=True)
    ]


def weights_of(reports: Sequence[Report], bundles: Sequence[Resources]) -> list[float]:
    """Return in which proportion envs are spread over shares."""
    return [bundle.get("CPU", 0) or report.cores for report, bundle in zip(reports, bundles, strict=True)]


class Fleet:
    """See the module.

    Args:
        address: of the cluster.
        node_timeout_s: seconds without a sign of life after which a host is given up.

    Attributes:
        shares: one per host.
        bundles: what each has reserved.
    """

    def __init__(self, address: str | None, node_timeout_s: float) -> None:
        self.shares: list[RemoteShare] = []
        self.bundles: list[Resources] = []
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
        self.bundles = ask(living_nodes())
        self._places = Places(self.bundles, *where)

    def start(self) -> list[Report]:
        """Start the hosts; return what they say of themselves.

        Raises:
            ClusterError: one did not come up, or has other versions than this process.
        """
        assert self._places is not None
        self._hosts = [self._places.start_host(index) for index in range(len(self.bundles))]
        return take_reports(self._hosts, COME_UP_S)

    def build(self, blueprint: Blueprint, options: ExecutorOptions, num_workers: int | None) -> Blueprint:
        """Start the hosts and let them build their envs; return the blueprint with the blocks of all hosts' workers.

        Args:
            blueprint: of the whole batch; its blocks are not used.
            options: of the executor.
            num_workers: on each node; None for one per processor of its share.

        Raises:
            ClusterError, FactoryError, WorkerLost, WorkerTimeout: close the fleet.
        """
        reports = self.start()
        processors = processors_of(reports, self.bundles)
        counts = divide(len(blueprint.factories), weights_of(reports, self.bundles))
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
            share_there.take_built(share_there.get(share_there.built_ref))
        blocks = tuple(
            tuple(env_id + one.first_env_id for env_id in block)
            for one in self.shares
            for block in spread(one.num_envs, len(one.worker_ids))
        )
        return dataclasses.replace(blueprint, blocks=blocks)

    def ping(self, index: int) -> None:
        """Wait for a sign of life of a host that has been started."""
        ray.get(call(self._hosts[index], "watch", "ping"))

    def survey(self, indices: Sequence[int], subject: Subject, limits: ProbeLimits) -> list[Survey]:
        """Have hosts that have been started measure an env, at the same time; return what each has found.

        Raises:
            ClusterError: a host was lost. FactoryError, EnvError, ProbeFailed: the env could not be measured.
        """
        refs = [call(self._hosts[index], "act", "survey", subject, limits) for index in indices]
        try:
            found = ray.get(refs)
        except GONE as error:
            raise ClusterError(f"sizing failed: a node was lost meanwhile: {type(error).__name__}: {error}") from error
        for one in found:
            if isinstance(one, EnvherdError):
                raise one
        return list(found)

    def begin_move(self, share: RemoteShare) -> bool:
        """Begin to look for a place for a share whose host is gone; return whether any node could be one."""
        assert self._places is not None
        return self._places.begin_move(share.share_id)

    def finish_move(self, share: RemoteShare) -> bool | None:
        """Have a new host begin to build a share if its place has been found; never waits.

        Returns:
            Whether there is a place; None while that is not known.
        """
        assert self._places is not None
        is_found = self._places.finish_move(share.share_id)
        if not is_found:
            return is_found
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
