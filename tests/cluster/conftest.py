"""One Ray cluster of three nodes on this machine, for all tests here.

It is started before the first count of a test's resources, so the check after each test finds only resources left by
the executor. The driver's own sockets and maps of Ray's object store are not counted; actors and their descendants are,
on any node.
"""

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import Possessions, command, descendants
from tests.extras import skip_without

_STORE_BYTES = 80 * 2**20
#: Seconds for Ray to end a killed actor on a busy machine.
_GRACE_S = 20.0


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Return a cluster: a head without processors, where the driver is, and three nodes with two."""
    skip_without("ray")
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # Ray spells it so; else whatever else runs here goes first, by far
    head = {
        "num_cpus": 0,
        "include_dashboard": False,
        # No test reads what it copies, and it takes a processor's time.
        "include_log_monitor": False,
        "object_store_memory": _STORE_BYTES,
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=2, object_store_memory=_STORE_BYTES, wait=False)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def actors() -> list[str]:
    """Return envherd's descendants of this process: actors, helpers, workers."""
    lines = {pid: command(pid) for pid in sorted(descendants())}
    return [
        f"process {pid}: {line[:200]}"
        for pid, line in lines.items()
        if "::Node" in line or "envherd" in line
    ]


def is_rays(line: str) -> bool:
    """Return whether a descriptor is one of the driver's connections to Ray, or a thread was not started by Python.

    Ray's threads log an error of an earlier test's actor.
    """
    if line.startswith("thread Dummy-"):
        return True
    is_ipc = any(
        kind in line
        for kind in (
            "socket:",
            "anon_inode:",
            "pipe:",
            "/dev/shm/plasma",
            "/tmp/ray",
            "(deleted)",
        )
    )
    return line.startswith("descriptor") and is_ipc


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves anything behind on any node; see the fixture of this name in `tests/conftest.py`."""
    for name in ("cluster", "shared"):
        if name in request.fixturenames:
            request.getfixturevalue(name)
    before, running = Possessions(), set(actors())
    yield
    end = time.monotonic() + _GRACE_S
    while True:
        left = [line for line in before.gained() if not is_rays(line)]
        left += [line for line in actors() if line not in running]
        if not left or time.monotonic() > end:
            break
        time.sleep(0.05)
    if left:
        pytest.fail("the test left behind:\n  " + "\n  ".join(left))
