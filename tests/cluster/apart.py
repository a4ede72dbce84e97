"""Hosts with separate networks on this machine, a Ray node on each, and a driver whose network is cut.

    python -m tests.cluster.apart ADDRESS IP    the driver: lists what runs on host IP, waits for a line, then steps

The head and the driver are on the first host. Needs root and `ip netns`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

NUM_HOSTS = 3
_NET = "10.77.31"
_PORT = 6399
#: A node that does not answer is dead, and knows it, after some seconds rather than most of a minute.
_CONFIG = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
    "gcs_rpc_server_reconnect_timeout_s": 8,
    "grpc_client_keepalive_time_ms": 2000,
    "grpc_client_keepalive_timeout_ms": 2000,
}


def is_possible() -> bool:
    """Return whether networks can be made here."""
    name = f"envherd-try-{os.getpid()}"
    if os.geteuid() or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        made = _ip("-n", name, "link", "add", "br0", "type", "bridge", is_checked=False) == 0
        _ip("netns", "del", name)
    return made


def _ip(*words: str, is_checked: bool = True) -> int:
    return subprocess.run(["ip", *words], capture_output=True, check=is_checked).returncode


def name_of(host: int) -> str:
    """Return the name of a host's network."""
    return f"envherd-{os.getpid()}-{host}"


def address_of(host: int) -> str:
    """Return a host's address."""
    return f"{_NET}.{host + 1}"


@contextlib.contextmanager
def hosts_apart(folder: Path) -> Iterator[str]:
    """Make the hosts and start a node on each: a head without processors, the others with two; yield its address."""
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for host in range(NUM_HOSTS):
            _make_host(host)
        address = f"{address_of(0)}:{_PORT}"
        head = ("--head", f"--port={_PORT}", f"--system-config={json.dumps(_CONFIG)}")
        for host in range(NUM_HOSTS):  # sequentially, because they choose names in one folder
            options = head if host == 0 else (f"--address={address}", "--num-cpus=2")
            nodes.append(_start(host, *options, folder=folder))
            _wait_until_up(nodes[-1], folder / f"host-{host}.log")
        yield address
    finally:
        for node in reversed(nodes):
            node.terminate()  # `ray start --block` ends what it has started
        for node in nodes:
            node.wait()
        for host in range(NUM_HOSTS):
            _kill_all(name_of(host))
            _ip("netns", "del", name_of(host), is_checked=False)


def _kill_all(name: str) -> None:
    """Kill a host's remaining processes: Ray's helpers outlive a node that was cut off for some time."""
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    for pid in map(int, listed.stdout.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _make_host(host: int) -> None:
    name, first = name_of(host), name_of(0)
    _ip("netns", "add", name)
    _ip("-n", name, "link", "set", "lo", "up")
    if host == 0:
        _ip("-n", first, "link", "add", "br0", "type", "bridge")
        _ip("-n", first, "addr", "add", f"{address_of(0)}/24", "dev", "br0")
        _ip("-n", first, "link", "set", "br0", "up")
        return
    _ip("link", "add", f"port{host}", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("-n", first, "link", "set", f"port{host}", "master", "br0", "up")
    _ip("-n", name, "addr", "add", f"{address_of(host)}/24", "dev", "eth0")
    _ip("-n", name, "link", "set", "eth0", "up")


def environment() -> dict[str, str]:
    """Return the environment of nodes and driver, without another cluster's token in the home folder."""
    return {**os.environ, "RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled"}


def cut(host: int) -> None:
    """Silently drop all packets between a host and the others."""
    _ip("-n", name_of(0), "link", "set", f"port{host}", "down")


def inside(host: int, *command: str) -> list[str]:
    """Return a command that runs on a host."""
    return ["ip", "netns", "exec", name_of(host), *command]


def _start(host: int, *options: str, folder: Path) -> subprocess.Popen[bytes]:
    ray = str(Path(sys.executable).with_name("ray"))
    common = [f"--node-ip-address={address_of(host)}", "--object-store-memory=80000000", "--block"]
    if "--head" in options:
        common += ["--num-cpus=0", "--include-dashboard=false", f"--temp-dir={folder}"]
    with open(folder / f"host-{host}.log", "wb") as log:
        return subprocess.Popen(
            inside(host, ray, "start", *options, *common), stdout=log, stderr=log, env=environment()
        )


def _wait_until_up(node: subprocess.Popen[bytes], log: Path) -> None:
    while "--block" not in log.read_text():
        if node.poll() is not None:
            raise RuntimeError(f"a node did not start:\n{log.read_text()}")
        time.sleep(0.1)


def drive(address: str, ip: str) -> None:
    """Step two shares, one of them on the host that is cut off."""
    import ray

    from envherd.executor import ExecutorOptions
    from envherd.executor.cluster import RayParallelEnv
    from envherd.workers.testing import CountingEnv

    ray.init(address=address, log_to_driver=False, configure_logging=False)
    while sum(node["Alive"] for node in ray.nodes()) < NUM_HOSTS:
        time.sleep(0.1)
    make_env = functools.partial(CountingEnv, 1_000_000)
    options = ExecutorOptions(on_worker_loss="restart")
    on_nodes = functools.partial(RayParallelEnv, num_nodes=2, resources_per_node={"CPU": 1}, node_timeout_s=4.0)
    with on_nodes(4, make_env, seed=0, options=options, num_workers=1) as env:
        root = env.reset()
        home = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        cut_off = next(index for index, node in enumerate(env.nodes) if home[node.node_id] == ip)
        pids = [env.nodes[cut_off].pid, *env.call("pid", env_ids=[2 * cut_off])]
        _say({"cut_off": cut_off, "pids": pids})
        sys.stdin.readline()
        lost = []
        for _ in range(2):
            td, root = env.step_and_maybe_reset(env.rand_action(root))
            lost.append(td["next", "interrupted"].flatten().tolist())
        moved = home[env.nodes[cut_off].node_id]
        _say({"lost": lost, "moved": moved, "losses": env.statistics().worker_losses})


def _say(what: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    drive(*sys.argv[1:])
