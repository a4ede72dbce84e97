"""A cluster loses actors and nodes: rows are interrupted as on one machine, the rest continues."""

import functools
import os
import signal

import pytest
import torch

from tests.extras import skip_without

skip_without("ray")

from envherd import ExecutorOptions, ParallelEnv, WorkerLost
from envherd.executor.cluster.rollouts import RayRollouts
from envherd.workers.testing import CountingEnv
from tests.cluster.test_rollouts import ONE, assert_equal
from tests.envs.cluster_envs import Counter, SlowEnv
from tests.gates import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.broken_pool,
    pytest.mark.usefixtures("cluster"),
    pytest.mark.timeout(300),
]

RESTART = ExecutorOptions(on_worker_loss="restart")
make_env = functools.partial(CountingEnv, 4)
#: All envs of one share, and four envs on two nodes.
LOST = [2, 3]


def pid_of(rollouts, index):
    return int(
        rollouts.state_dict(with_envs=False)["nodes"][index]["place"].rpartition(" ")[2]
    )


def test_envs_lost_with_their_node_continue_as_those_lost_with_their_workers():
    policy = Counter()
    with (
        RayRollouts(
            4, make_env, seed=5, num_nodes=2, resources_per_node=ONE, options=RESTART
        ) as rollouts,
        ParallelEnv(4, make_env, seed=5, num_workers=4, options=RESTART) as local,
    ):

        def roll(num_steps, *, auto_reset=False):
            ours = rollouts.rollout(num_steps, policy, auto_reset=auto_reset)
            assert_equal(
                ours,
                local.rollout(
                    num_steps, policy, auto_reset=auto_reset, break_when_any_done=False
                ),
            )
            return ours["next", "interrupted"].squeeze(-1)

        roll(6, auto_reset=True)
        # 6 and 11 steps are in mid-episode, 12 are at an end.
        for num_steps in (5, 1, 4):
            for index in LOST:
                os.kill(local.statistics().workers[index].pid, signal.SIGKILL)
            os.kill(pid_of(rollouts, 1), signal.SIGKILL)
            with torch.no_grad():
                policy.shift += 1
            interrupted = roll(num_steps)
            assert interrupted.nonzero().tolist() in ([[2, 0], [3, 0]], [])
            roll(3)
        assert rollouts.num_losses == 3
        os.kill(pid_of(rollouts, 1), signal.SIGKILL)
        with pytest.raises(
            WorkerLost, match=r"node \S+, pid \d+ \(envs 2-3\) is lost: ActorDiedError"
        ) as caught:
            rollouts.rollout(3, policy)
        assert caught.value.env_ids == (2, 3)


def test_lost_nodes_share_restarts_on_another_node_during_a_rollout(
    cluster,
):
    mine = {"CPU": 1, "mine": 1}
    handler = signal.getsignal(signal.SIGTERM)  # which Ray replaces
    nodes = [
        cluster.add_node(
            num_cpus=1, resources={"mine": 1}, object_store_memory=80 * 2**20
        )
        for _ in range(2)
    ]
    signal.signal(signal.SIGTERM, handler)
    try:
        make_slow = functools.partial(SlowEnv, 0.02)
        with RayRollouts(
            2, make_slow, num_nodes=1, resources_per_node=mine, options=RESTART
        ) as rollouts:
            before = rollouts.rollout(2, Counter())
            stream = rollouts.stream(100, Counter(), overlap=True)
            first = next(stream)
            place = rollouts._shares[0].place
            gone = next(node for node in nodes if node.node_id[:8] in place)
            nodes.remove(gone)
            cluster.remove_node(gone)
            data = next(stream)
            assert data["next", "interrupted"].squeeze(-1).nonzero().tolist() == [
                [0, 0],
                [1, 0],
            ]
            assert torch.equal(
                data["next", "observation"][:, 0], first["next", "observation"][:, -1]
            )
            assert (data["observation"][:, 1, 1] == 0).all()
            assert nodes[0].node_id[:8] in rollouts._shares[0].place
            assert (before.batch_size, rollouts.num_losses) == ((2, 2), 1)
    finally:
        for node in nodes:
            cluster.remove_node(node)


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_loss_is_raised_by_default(is_silent):
    with RayRollouts(
        2, make_env, num_nodes=2, resources_per_node=ONE, node_timeout_s=30.0
    ) as rollouts:
        rollouts.rollout(2)
        pid = pid_of(rollouts, 1)
        rollouts._node_timeout_s = 2.0
        os.kill(pid, signal.SIGSTOP if is_silent else signal.SIGKILL)
        why = "it gave no sign of life for 2 s" if is_silent else "ActorDiedError"
        for error in (why, "ActorDiedError"):
            with pytest.raises(
                WorkerLost, match=rf"\(envs 1-1\) is lost: {error}.*'restart'"
            ):
                rollouts.rollout(2)
        wait_for(lambda: not os.path.exists(f"/proc/{pid}"))
