"""The cluster as Ray shows it: connect, reserve a place for every share, start hosts there, and replace them.

Guarantees: what was reserved or started is given back by `close`, and by Ray itself when
this process ends; a wait for room is bounded.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util import placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from envherd.executor.cluster.errors import ClusterError
from envherd.executor.cluster.host import NodeHost, versions
from envherd.executor.cluster.orders import Report
from envherd.executor.cluster.shares import Resources, refusal

log = logging.getLogger("envherd")

#: Threads of a host: one for orders, one for answers, one that says that it lives.
_GROUPS = {"act": 1, "answer": 1, "watch": 1}
#: Seconds for a host's process to come up: it imports torch, on a machine that may be busy.
COME_UP_S = 180.0
#: Seconds for the head of a cluster to accept a connection.
_CONNECT_S = 5.0
#: Seconds for Ray to find another place for a share whose node is gone.
_MOVE_S = 10.0

#: What a call of a host raises when the host, its node or an object is gone.
GONE = (ray.exceptions.RayError,)


class Connection:
    """A connection to a cluster; shared by all executors of this process, ended with the last if one of them began it.

    Args:
        address: of the cluster; None for Ray's own choice (the one in use, RAY_ADDRESS, or a new one on this machine).
    """

    _began_here = False
    _count = 0

    def __init__(self, address: str | None) -> None:
        if not ray.is_initialized():
            check_address(address)
            try:
                ray.init(address=address, log_to_driver=False, configure_logging=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ClusterError(
                    f"RayParallelEnv failed: expected a Ray cluster at {address!r}, got {type(error).__name__}: "
                    f"{error}. Start one with `ray start --head`, or leave `address` out to start one on this machine."
                ) from error
            Connection._began_here = True
        Connection._count += 1
        self._is_open = True

    def close(self) -> None:
        """Let go of it. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        Connection._count -= 1
        if Connection._began_here and not Connection._count:
            Connection._began_here = False
            ray.shutdown()


def check_address(address: str | None) -> None:
    """Refuse an address at which nothing answers, within seconds; Ray itself would try for most of a minute.

    Raises:
        ClusterError: it is `host:port`, and no connection can be made.
    """
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto", or of a kind that Ray reads
    try:
        socket.create_connection((host.removeprefix("ray://"), int(port)), _CONNECT_S).close()
    except OSError as error:
        raise ClusterError(
            f"connecting failed: expected a Ray cluster at {address}, got {type(error).__name__}: {error}. Its head "
            f"prints its address when `ray start --head` starts it (port 6379 unless another is given)."
        ) from error


def living_nodes() -> list[Resources]:
    """Return the resources of every living node."""
    return [dict(node["Resources"]) for node in _nodes() if node["Alive"]]


def _nodes() -> list[dict[str, Any]]:
    return ray.nodes()  # type: ignore[no-untyped-call]  # Ray says nothing of its type


class Places:
    """Places for shares, one bundle each.

    Args:
        bundles: what each share is given.
        strategy: of the placement group.
        timeout_s: seconds to wait for room.
        runtime_env: of the hosts, as Ray has it; None for the job's own.

    Raises:
        ClusterError: there is no room.
    """

    def __init__(
        self, bundles: Sequence[Resources], strategy: str, timeout_s: float, runtime_env: Mapping[str, Any] | None
    ) -> None:
        self._bundles = bundles
        self._runtime_env = runtime_env
        self._groups: list[PlacementGroup] = []
        self._home: list[tuple[PlacementGroup, int]] = []
        self._searches: dict[int, tuple[PlacementGroup | None, float]] = {}
        group = self._reserve(bundles, strategy, timeout_s)
        if group is None:
            raise refusal(bundles, living_nodes(), timeout_s)
        self._home = [(group, index) for index in range(len(bundles))]

    def _reserve(self, bundles: Sequence[Resources], strategy: str, timeout_s: float) -> PlacementGroup | None:
        group = placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
        try:
            if group.wait(timeout_s):
                self._groups.append(group)
                return group
        except BaseException:
            remove_placement_group(group)
            raise
        remove_placement_group(group)
        return None

    def start_host(self, share_id: int) -> Any:
        """Start a host where a share's place is; return its handle at once."""
        group, index = self._home[share_id]
        bundle = self._bundles[share_id]
        options: dict[str, Any] = {
            "num_cpus": bundle.get("CPU", 0),
            "num_gpus": bundle.get("GPU", 0),
            "resources": {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            "max_restarts": 0,
        }
        if "memory" in bundle:
            options["memory"] = bundle["memory"]
        if self._runtime_env is not None:
            options["runtime_env"] = dict(self._runtime_env)
        remote: Any = ray.remote  # its types know no concurrency groups
        made = remote(concurrency_groups=_GROUPS)(NodeHost)
        return made.options(**options).remote()

    def begin_move(self, share_id: int) -> bool:
        """Begin to look for another place for a share whose host is gone; return whether any node is large enough."""
        bundle = self._bundles[share_id]
        fitting = [node for node in living_nodes() if all(node.get(name, 0) >= n for name, n in bundle.items())]
        if not fitting:
            return False
        other = None
        if not self._is_there(*self._home[share_id]):  # else the host alone was lost
            other = placement_group([dict(bundle)], strategy="PACK")
            self._groups.append(other)
        self._searches[share_id] = (other, time.monotonic() + _MOVE_S)
        return True

    def finish_move(self, share_id: int) -> bool | None:
        """Return whether a place has been found; None while it is looked for. Never waits."""
        other, end = self._searches[share_id]
        if self._is_there(*self._home[share_id]):  # Ray may have moved the bundle itself, to where there was room
            if other is not None:
                self._give_back(other)
        elif other is not None and self._is_there(other, 0):
            self._home[share_id] = (other, 0)
        elif time.monotonic() < end:
            return None
        else:
            if other is not None:
                self._give_back(other)
            del self._searches[share_id]
            return False
        del self._searches[share_id]
        return True

    def _give_back(self, group: PlacementGroup) -> None:
        self._groups.remove(group)
        with contextlib.suppress(Exception):
            remove_placement_group(group)

    def _is_there(self, group: PlacementGroup, index: int) -> bool:
        """Return whether a bundle's node lives."""
        with contextlib.suppress(Exception):
            table = ray.util.placement_group_table(group)
            node_id = table["bundles_to_node_id"].get(index)
            return any(node["Alive"] and node["NodeID"] == node_id for node in _nodes())
        return False

    def close(self) -> None:
        """Give all places back."""
        for group in self._groups:
            with contextlib.suppress(Exception):
                remove_placement_group(group)
        self._groups.clear()


def call(host: Any, group: str, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a host in one of its threads; return the reference of its answer at once."""
    return getattr(host, method).options(concurrency_group=group).remote(*args, **kwargs)


def take_reports(hosts: Sequence[Any], timeout_s: float) -> list[Report]:
    """Wait until all hosts are up; return what they say of themselves.

    Raises:
        ClusterError: one did not come up, or has other versions than this process.
    """
    reports: list[Report] = []
    for index, host in enumerate(hosts):
        try:
            reports.append(ray.get(call(host, "watch", "report"), timeout=timeout_s))
        except GONE as error:
            raise ClusterError(
                f"RayParallelEnv failed: expected a host for share {index} to come up within {timeout_s:g} s, got "
                f"{type(error).__name__}: {error}. Every node needs the same python environment, with envherd[ray]."
            ) from error
    check_versions(versions(), reports)
    return reports


def check_versions(own: Mapping[str, str], reports: Sequence[Report]) -> None:
    """Refuse nodes with other versions than the driver's.

    Raises:
        ClusterError: names the first node, what it has, and what the driver has.
    """
    for report in reports:
        for name, version in own.items():
            theirs = report.versions.get(name, "none")
            if theirs != version:
                raise ClusterError(
                    f"RayParallelEnv failed: expected {name} {version} on every node, as in the driver, got {theirs} "
                    f"on {report.hostname} (node {report.node_id[:8]}). Install the same environment on all nodes."
                )
