"""A node stalls, or its store is full: rows are interrupted or complete, no process stays."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch

from envherd.executor import ExecutorOptions, ParallelEnv
from envherd.executor.cluster import RayParallelEnv
from envherd.workers.testing import CountingEnv
from tests.cluster import apart
from tests.cluster.test_faults import N, add_node, interrupted, is_alive, step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.broken_pool,
    pytest.mark.usefixtures("cluster"),
    pytest.mark.timeout(400),
]

ENDLESS = functools.partial(CountingEnv, 1_000_000)


def raylet_of(node):
    return node.all_processes["raylet"][0].process.pid


def below(pid):
    return [process.pid for process in psutil.Process(pid).children(recursive=True)]


@pytest.mark.full
def test_a_stalled_raylet(cluster):
    options = ExecutorOptions(on_worker_loss="restart", max_restarts=9)
    nodes = [add_node(cluster) for _ in range(3)]
    mine = {"CPU": 1, "mine": 1}
    try:
        with RayParallelEnv(
            N, ENDLESS, seed=0, num_nodes=2, resources_per_node=mine, num_workers=1, options=options
        ) as env:
            env.reset()
            step(env)
            stalled = next(node for node in nodes if node.node_id == env.nodes[0].node_id)
            os.kill(raylet_of(stalled), signal.SIGSTOP)
            there = below(raylet_of(stalled))
            env.send(env.rand_action(env.current()))
            first = env.recv(2)
            assert sorted(first["env_ids"].tolist()) in ([0, 1], [2, 3], [0, 2], [0, 3], [1, 2], [1, 3])
            env.recv()
            stepped, end = 0, time.monotonic() + 120
            while not (lost := interrupted(step(env)[0]))[0]:  # its host works until Ray declares the node dead
                stepped += 1
                assert lost == [False] * N
                assert time.monotonic() < end
                time.sleep(0.1)
            assert lost == [True, True, False, False]
            assert env.nodes[0].node_id not in (stalled.node_id, env.nodes[1].node_id), "moved to the third node"
            assert interrupted(step(env)[0]) == [False] * N
            os.kill(raylet_of(stalled), signal.SIGCONT)  # it learns that it counts as dead, and kills its processes
            wait_until_gone(there)
            assert env.statistics().worker_losses == 1
    finally:
        for node in nodes:
            cluster.remove_node(node)


@pytest.mark.full
@pytest.mark.skipif(not apart.is_possible(), reason="needs root and `ip netns`")
def test_a_network_that_is_cut():
    folder = Path(tempfile.mkdtemp(prefix="ev"))  # short: sockets have their paths in it
    try:
        with apart.hosts_apart(folder) as address:
            command = [sys.executable, "-m", "tests.cluster.apart", address, apart.address_of(2)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": apart.environment()}
            with subprocess.Popen(apart.inside(0, *command), **pipes) as driver:
                there = said_by(driver)
                assert all(map(is_alive, there["pids"]))
                apart.cut(2)
                driver.stdin.write("go on\n")
                driver.stdin.flush()
                told = said_by(driver)
            assert told["lost"] == [[there["cut_off"] == env_id // 2 for env_id in range(4)], [False] * 4]
            assert told["moved"] == apart.address_of(1)
            assert told["losses"] in (1, 2), "a successor may be lost too: Ray counts on the silent node for a while"
            wait_until_gone(there["pids"])  # its raylet gives up and kills its processes
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def said_by(driver):
    """Return the driver's next line, skipping Ray's output."""
    return json.loads(next(line for line in driver.stdout if line.startswith("{")))


def wait_until_gone(pids):
    while any(map(is_alive, pids)):  # the test's timeout bounds it
        time.sleep(0.02)


@pytest.mark.full
def test_more_than_the_object_store_holds_comes_whole():
    heavy = functools.partial(CountingEnv, 1_000, size=1024)
    with (
        RayParallelEnv(2, heavy, seed=3, num_nodes=1, resources_per_node={"CPU": 1}) as env,
        ParallelEnv(2, heavy, seed=3, num_workers=1) as local,
    ):
        kwargs = {"break_when_any_done": False}
        held = [env.remote_rollouts().rollout(25, **kwargs)]  # 100 MB; the stores have 80
        assert sum(value.nbytes for value in held[0].values(True, True)) > 80 * 2**20  # noqa: FBT003
        env.set_seed(3)
        pair = env, local
        ours, theirs = (one.rollout(6, **kwargs) for one in pair)
        assert torch.equal(ours["next", "pixels"], theirs["next", "pixels"])
        assert (env.statistics().worker_losses, env.statistics().interrupted) == (0, 0)
