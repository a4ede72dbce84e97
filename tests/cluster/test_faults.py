"""A cluster loses workers, hosts, nodes, its driver: rows are interrupted, the rest continues, no process stays."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch

from envherd.executor import ExecutorOptions, ParallelEnv, WorkerLost
from envherd.executor.cluster import RayParallelEnv
from envherd.workers.testing import CountingEnv
from tests.cluster.envs import GatedEnv
from tests.gates import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.broken_pool,
    pytest.mark.usefixtures("cluster"),
    pytest.mark.timeout(300),
]

N = 4
ENDLESS = functools.partial(CountingEnv, 1_000_000)
ONE = {"CPU": 1}


def step(env):
    return env.step_and_maybe_reset(env.rand_action(env.current()))


def interrupted(td):
    return td["next", "interrupted"].flatten().tolist()


def check_loss(env, lost):
    """Step once after a loss: its rows are interrupted and begin new episodes, the others continue."""
    before = env.current()["observation"].clone()
    td, root = step(env)
    assert interrupted(td) == lost
    rows = torch.tensor(lost)
    assert torch.equal(td["next", "observation"][rows], before[rows]), "the last true observation"
    assert td["next", "truncated"].flatten().tolist() == lost
    assert not td["next", "terminated"].any()
    assert not td["next", "reward"][rows].any()
    assert (td["next", "observation"][~rows, 1] == before[~rows, 1] + 1).all()
    assert (root["observation"][rows, 1] == 0).all()
    td, _ = step(env)
    assert interrupted(td) == [False] * N


def add_node(cluster):
    """Add an empty node; restore the handler of SIGTERM that Ray replaces."""
    handler = signal.getsignal(signal.SIGTERM)
    node = cluster.add_node(num_cpus=1, resources={"mine": 1}, object_store_memory=80 * 2**20)
    signal.signal(signal.SIGTERM, handler)
    return node


@pytest.mark.full
def test_what_is_lost_is_replaced_and_the_rest_goes_on(cluster):
    options = ExecutorOptions(on_worker_loss="restart", max_restarts=9)
    nodes = [add_node(cluster) for _ in range(2)]
    mine = {"CPU": 1, "mine": 1}
    try:
        timeouts = {"node_timeout_s": 4.0, "placement_timeout_s": 20.0}
        with RayParallelEnv(
            N, ENDLESS, seed=0, resources_per_node=mine, num_workers=2, options=options, **timeouts
        ) as env:
            env.reset()
            step(env)
            os.kill(env.statistics().workers[3].pid, signal.SIGKILL)
            check_loss(env, [False, False, False, True])
            os.kill(env.nodes[0].pid, signal.SIGSTOP)  # silent, like a node behind a cut network
            stopped = env.nodes[0].pid
            check_loss(env, [True, True, False, False])
            assert env.nodes[0].pid != stopped
            gone = next(node for node in nodes if node.node_id == env.nodes[1].node_id)
            nodes.remove(gone)
            nodes.append(add_node(cluster))
            cluster.remove_node(gone)
            check_loss(env, [False, False, True, True])
            assert env.nodes[1].node_id == nodes[-1].node_id, "moved to where there is room"
            cluster.remove_node(nodes.pop())
            env.send(env.rand_action(env.current()))
            with pytest.raises(WorkerLost, match="no living node has had room"):
                receive_for_ever(env, [0, 1])
            assert env.statistics().worker_losses == 7
    finally:
        for node in nodes:
            cluster.remove_node(node)


def receive_for_ever(env, env_ids):
    """Step some envs repeatedly during a search of seconds for another share's place."""
    began = time.monotonic()
    try:
        while True:
            assert sorted(env.recv(2)["env_ids"].tolist()) == env_ids
            env.send(env.current(env_ids).set("action", env.rand_action()["action"][env_ids]), env_ids)
            assert time.monotonic() - began < 5, "nobody waits for it"
            began = time.monotonic()
    finally:
        assert time.monotonic() - began < 5


def test_a_lost_host_is_raised_and_the_executor_can_be_closed():
    with RayParallelEnv(2, ENDLESS, num_nodes=2, resources_per_node=ONE) as env:
        env.reset()
        os.kill(env.nodes[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match=r"node .* is lost with workers 1-1 \(envs 1-1\)") as caught:
            step(env)
        assert caught.value.env_ids == (1,)
        assert caught.value.partial["observation"][0, 1] == 1, "the other node's env was stepped"
        with pytest.raises(WorkerLost, match="is lost with workers 1-1"):
            env.remote_rollouts().rollout(2)


def test_an_env_lost_with_its_host_goes_on_as_one_lost_with_its_worker():
    options = ExecutorOptions(on_worker_loss="restart")
    make_env = functools.partial(CountingEnv, 4)
    with (
        RayParallelEnv(2, make_env, num_nodes=2, resources_per_node=ONE, seed=1, options=options) as env,
        ParallelEnv(2, make_env, num_workers=2, seed=2, options=options) as local,
    ):
        state = local.state_dict(with_envs=False)
        state["executor"] |= {"seed": 5, "episodes": [7, 9]}
        found = []
        for one, kill in ((env, lambda: env.nodes[1].pid), (local, lambda: local.statistics().workers[1].pid)):
            one.load_state_dict(state)
            one.reset()
            for _ in range(6):
                step(one)
            os.kill(kill(), signal.SIGKILL)
            steps, roots = zip(*(step(one) for _ in range(6)), strict=True)
            counts = [(worker.env_steps, worker.resets) for worker in one.statistics().workers]
            found.append(
                (
                    torch.stack(steps),
                    torch.stack(roots),
                    counts,
                    one.state_dict(with_envs=False)["executor"]["episodes"],
                )
            )
    for ours, theirs in zip(found[0][:2], found[1][:2], strict=True):
        assert (ours == theirs).all()
    assert found[0][2:] == found[1][2:]


@pytest.mark.parametrize("on_worker_loss", [pytest.param("raise", marks=pytest.mark.full), "restart"])
def test_a_host_that_is_lost_in_a_remote_rollout_is_raised_or_its_successor_makes_it_again(tmp_path, on_worker_loss):
    gate = tmp_path / "gate"
    options = ExecutorOptions(on_worker_loss=on_worker_loss)
    make_gated = functools.partial(GatedEnv, str(gate))
    with RayParallelEnv(2, make_gated, num_nodes=2, resources_per_node=ONE, options=options) as env:
        env.reset()
        killed = env.nodes[1].pid

        def kill_it():
            wait_for(lambda: len([*tmp_path.glob("gate-waits-*")]) == 2)  # both envs are in the rollout
            os.kill(killed, signal.SIGKILL)
            gate.touch()

        kill = threading.Thread(target=kill_it)
        kill.start()
        rollouts = env.remote_rollouts()
        if on_worker_loss == "raise":
            with pytest.raises(WorkerLost, match=r"node .* is lost with workers 1-1"):
                rollouts.rollout(3)
        else:
            data = rollouts.rollout(3)
            assert data["observation"][..., 1].tolist() == [[0, 1, 2]] * 2
            assert not data["next", "interrupted"].any()
            assert env.nodes[1].pid != killed
            assert step(env)[0]["observation"][:, 1].tolist() == [3, 3]
            assert env.statistics().worker_losses == 1
        kill.join()


DRIVER = """
import os, sys, functools
from envherd.executor.cluster import RayParallelEnv
from envherd.workers.testing import CountingEnv
from tests.cluster.envs import GatedEnv
make_env = functools.partial(CountingEnv, 9)
env = RayParallelEnv(1, make_env, num_nodes=1, resources_per_node={"CPU": 1}, address=sys.argv[1])
env.reset()
print(env.nodes[0].pid, *env.call("pid"), flush=True)
sys.stdin.read()
"""


@pytest.mark.full
def test_a_lost_driver_leaves_nobody_behind(cluster):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, cluster.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with driver:
        try:
            pids = [int(word) for word in driver.stdout.readline().split()]
            assert len(pids) == 2
            assert all(map(psutil.pid_exists, pids))
        finally:
            driver.kill()
    while any(map(is_alive, pids)):  # the test's timeout bounds it
        time.sleep(0.02)


def is_alive(pid):
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
