"""Connect to a Ray cluster, reserve a place for every host, and start hosts there.

Guarantees: `close` releases all reservations and hosts, and Ray does so when this process ends; a wait for room is
bounded.
"""

from __future__ import annotations

import contextlib
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
from envherd.executor.cluster.messages import Report
from envherd.executor.cluster.shares import Resources, no_room

#: Methods of a host that do not wait for its other methods: they run in another thread.
_APART = ("report", "ping", "close")
#: Seconds for a host's process to start: it imports torch, perhaps on a busy machine.
COME_UP_S = 180.0
#: Seconds for the head of a cluster to accept a connection.
_CONNECT_S = 5.0


class Connection:
    """A connection to a cluster, shared by all executors of this process; the last one closes what the first opened.

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
        """Release it. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        Connection._count -= 1
        if Connection._began_here and not Connection._count:
            Connection._began_here = False
            ray.shutdown()


def check_address(address: str | None) -> None:
    """Refuse an address that does not answer within seconds; Ray itself would try for minutes.

    Raises:
        ClusterError: it is `host:port`, and no connection can be made.
    """
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto", or another form that Ray parses
    end = time.monotonic() + _CONNECT_S
    try:
        socket.create_connection((host.removeprefix("ray://"), int(port)), _CONNECT_S).close()
    except OSError as error:
        if error.errno is None and time.monotonic() < end:  # of a signal handler, not of the socket
            raise
        raise ClusterError(
            f"connecting failed: expected a Ray cluster at {address}, got {type(error).__name__}: {error}. Its head "
            f"prints its address when `ray start --head` starts it (port 6379 unless another is given)."
        ) from error


def living_nodes() -> list[Resources]:
    """Return the resources of every living node."""
    return [dict(node["Resources"]) for node in _nodes() if node["Alive"]]


def _nodes() -> list[dict[str, Any]]:
    return ray.nodes()  # type: ignore[no-untyped-call]  # Ray says nothing of its type


def reserve(
    bundles: Sequence[Resources], timeout_s: float, strategy: str, runtime_env: Mapping[str, Any] | None
) -> list[Place]:
    """Reserve a place for every share.

    Args:
        bundles: resources of each share.
        timeout_s: seconds to wait for room.
        strategy: of the placement group.
        runtime_env: of the hosts, as Ray has it; None for the job's own.

    Raises:
        ClusterError: there is no room.
    """
    group = placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
    is_placed = False
    try:
        is_placed = group.wait(timeout_s)
    finally:
        if not is_placed:
            remove_placement_group(group)
    if not is_placed:
        raise no_room(bundles, living_nodes(), timeout_s)
    return [Place(bundle, group, index, runtime_env) for index, bundle in enumerate(bundles)]


class Place:
    """Where the host of one share runs: a bundle of a placement group, which Ray moves if its node is gone.

    Args:
        bundle: what is reserved there.
        group: of all places.
        index: of the bundle in that group.
        runtime_env: see `reserve`.

    Attributes:
        host: the handle of the host that was started last; None before the first.
    """

    host: Any = None

    def __init__(
        self, bundle: Resources, group: PlacementGroup, index: int, runtime_env: Mapping[str, Any] | None
    ) -> None:
        self.bundle, self.group, self._index = bundle, group, index
        self._runtime_env = runtime_env

    def start_host(self) -> None:
        """Begin to start a host there; do not wait for it."""
        options: dict[str, Any] = {
            "num_cpus": self.bundle.get("CPU", 0),
            "num_gpus": self.bundle.get("GPU", 0),
            "resources": {name: n for name, n in self.bundle.items() if name not in ("CPU", "GPU", "memory")},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, self._index),
            "max_restarts": 0,
        }
        if "memory" in self.bundle:
            options["memory"] = self.bundle["memory"]
        if self._runtime_env is not None:
            options["runtime_env"] = dict(self._runtime_env)
        remote: Any = ray.remote  # its types know no concurrency groups
        made = remote(concurrency_groups={"act": 1, "watch": 1})(NodeHost)
        self.host = made.options(**options).remote()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the host, in its thread; return the reference of its answer at once."""
        thread = "watch" if method in _APART else "act"
        return getattr(self.host, method).options(concurrency_group=thread).remote(*args, **kwargs)

    def end_host(self) -> None:
        """End the host, if it still lives. Never raises."""
        with contextlib.suppress(Exception):
            ray.kill(self.host, no_restart=True) if ray.is_initialized() else None

    def is_there(self) -> bool:
        """Return whether the bundle is on a living node."""
        with contextlib.suppress(Exception):
            node_id = ray.util.placement_group_table(self.group)["bundles_to_node_id"].get(self._index)
            return any(node["Alive"] and node["NodeID"] == node_id for node in _nodes())
        return False


def release(places: Sequence[Place]) -> None:
    """End the hosts at some places of one group, and release it. Never raises."""
    for place in places:
        place.end_host()
    with contextlib.suppress(Exception):
        remove_placement_group(places[0].group) if places and ray.is_initialized() else None


def start_hosts(places: Sequence[Place]) -> list[Report]:
    """Start a host at every place and wait until all have started; return their reports.

    Raises:
        ClusterError: a host did not start, or has different versions than this process.
    """
    for place in places:
        place.start_host()
    reports: list[Report] = []
    for index, place in enumerate(places):
        try:
            reports.append(ray.get(place.call("report"), timeout=COME_UP_S))
        except ray.exceptions.RayError as error:
            raise ClusterError(
                f"RayParallelEnv failed: expected a host for share {index} to come up within {COME_UP_S:g} s, got "
                f"{type(error).__name__}: {error}. Every node needs the same python environment, with envherd[ray]."
            ) from error
    check_versions(versions(), reports)
    return reports


def check_versions(own: Mapping[str, str], reports: Sequence[Report]) -> None:
    """Refuse nodes whose versions differ from the driver's.

    Raises:
        ClusterError: names the first such node, its version and the driver's.
    """
    for report in reports:
        for name, version in own.items():
            theirs = report.versions.get(name, "none")
            if theirs != version:
                raise ClusterError(
                    f"RayParallelEnv failed: expected {name} {version} on every node, as in the driver, got {theirs} "
                    f"on {report.hostname} (node {report.node_id[:8]}). Install the same environment on all nodes."
                )
