"""Rollouts on the nodes of a cluster: the data of one machine, weights by version, order, resumption, errors.

Actors and nodes that are lost interrupt rows as on one machine; the rest continues.
"""

import functools
import io
import itertools
import os
import signal
import time

import pytest
import torch
from tensordict import is_leaf_nontensor

from tests.extras import skip_without

skip_without("ray")

import ray

from envherd import (
    Busy,
    Closed,
    ClusterError,
    Collector,
    EnvError,
    ExecutorOptions,
    FactoryError,
    ParallelEnv,
    WorkerLost,
)
from envherd.executor.cluster.rollouts import RayRollouts
from envherd.workers.testing import CountingEnv
from tests.envs.breaking_envs import FaultyEnv
from tests.envs.cluster_envs import Counter, HeldCounter, Sampler
from tests.envs.counting_envs import AgentsEnv, PairEnv, TextEnv
from tests.envs.disturbing_envs import HaltingEnv
from tests.envs.sized_envs import SleepingEnv
from tests.gates import Gate, interrupt, wait_for

pytestmark = [
    pytest.mark.long,
    pytest.mark.broken_pool,
    pytest.mark.usefixtures("cluster"),
    pytest.mark.timeout(300),
]

N = 5
ONE = {"CPU": 1}
make_env = functools.partial(CountingEnv, None)
on_machine = functools.partial(ParallelEnv, N, make_env, num_workers=2)


@pytest.fixture(scope="module")
def shared(cluster):
    """Two nodes with three and two envs."""
    with RayRollouts(
        N, make_env, seed=3, num_nodes=2, resources_per_node=ONE
    ) as rollouts:
        yield rollouts


@pytest.fixture
def fresh(shared):
    """The same at the beginning of new episodes, and one machine's envs at the same place."""
    shared.rollout(1)
    shared.is_resumed = False
    with on_machine(seed=3) as local:
        state = local.state_dict(with_envs=False)
        parts = shared.state_dict(with_envs=False)
        state["executor"]["episodes"] = [
            one for part in parts["nodes"] for one in part["executor"]["episodes"]
        ]
        local.load_state_dict(state)
        yield shared, local


def assert_equal(one, other):
    assert (one.batch_size, one.names) == (other.batch_size, other.names)
    ours, theirs = (
        {
            key: td.get(key)
            for key in td.keys(
                include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor
            )
        }
        for td in (one, other)
    )
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == theirs[key].dtype, key
            assert torch.equal(value, theirs[key]), key
        else:
            assert value.tolist() == theirs[key].tolist(), key


def test_rollouts_are_those_of_one_machine_on_three_nodes():
    """`fresh` has two nodes."""
    policy = Counter()
    where = {"num_nodes": 3, "resources_per_node": ONE, "strategy": "STRICT_SPREAD"}
    # A worker for each env, also of those that share a processor.
    where["options"] = ExecutorOptions(alone=True)
    with (
        RayRollouts(N, make_env, seed=7, **where) as rollouts,
        on_machine(seed=7) as local,
    ):
        for version in range(3):
            how = {"auto_reset": version == 0}
            data = rollouts.rollout(9, policy, **how)
            assert_equal(
                data, local.rollout(9, policy, break_when_any_done=False, **how)
            )
            assert rollouts.version == version
            assert data["next", "done"].sum() > 5
            data.zero_()  # it is the caller's
            change_in_place(policy)
        assert rollouts.num_workers == N
        places = {share.place.partition(",")[0] for share in rollouts._shares}
        assert len(places) == 3
        assert sum(one.env_steps for one in rollouts.statistics()) == 27 * N


def test_a_collector_takes_it_and_a_policy_has_its_own_state(fresh):
    collectors = [
        Collector(env, Counter(), frames_per_batch=4 * N, close_env=False)
        for env in fresh
    ]
    for _ in range(3):
        assert_equal(*[collector.collect() for collector in collectors])
    state = Sampler()
    next_of = {0: 3, 3: 3}
    assert (fresh[0].rollout(3, state)["count"] == torch.arange(3)).all()
    for batch in itertools.islice(fresh[0].stream(3, state), 4):
        share = int(batch["env_ids"][0, 0])
        assert (batch["count"] == torch.arange(3) + next_of[share]).all()
        next_of[share] += 3


def take_no_action(td):
    return td.set("action", torch.zeros(td.batch_size, dtype=torch.int64))


@pytest.mark.parametrize(
    "factories",
    [
        [TextEnv] * 2,
        [PairEnv] * 2,
        [CountingEnv, "CartPole-v1", AgentsEnv, "Acrobot-v1"],
    ],
)
def test_texts_batches_and_unlike_envs_come_as_on_one_machine(factories):
    is_alike = factories[0] is factories[1]
    policy = take_no_action if is_alike else None
    with (
        RayRollouts(factories, seed=4, num_nodes=2, resources_per_node=ONE) as rollouts,
        ParallelEnv(factories, seed=4) as local,
    ):
        for auto_reset in (True, False):
            ours = rollouts.rollout(5, policy, auto_reset=auto_reset)
            theirs = local.rollout(
                5, policy, auto_reset=auto_reset, break_when_any_done=False
            )
            for one, other in zip(ours.unbind(0), theirs.unbind(0), strict=True):
                assert {*one.keys(include_nested=True)} == {
                    *other.keys(include_nested=True)
                }
                if is_alike:
                    assert_equal(one, other)


def change_data(policy):
    policy.shift.data.add_(1)


def change_in_place(policy):
    with torch.no_grad():
        policy.shift += 1


@pytest.mark.parametrize("change", [change_data, change_in_place])
@pytest.mark.parametrize("kind", ["module", "bfloat16", "function", "method"])
def test_every_change_of_the_weights_reaches_the_nodes(shared, kind, change):
    module = Counter(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    before = shared.version
    for shift in range(3):
        policy = {"function": lambda td: module(td), "method": module.forward}.get(  # noqa: PLW0108
            kind, module
        )
        for version in (1, 1):
            data = shared.rollout(2, policy)
            assert shared.version == before + shift + version
        assert torch.equal(data["action"], (data["observation"][..., 1] + shift) % 5)
        change(module)


def test_no_node_starves_and_a_slow_one_delays_none(shared):
    """The policy cannot be pickled, so the nodes build it."""
    policy = HeldCounter()
    with pytest.raises(
        ClusterError, match="a policy that can be pickled, got HeldCounter"
    ):
        shared.rollout(2, policy)
    factories = [
        functools.partial(SleepingEnv, step_s, length=1_000) for step_s in (0.0, 0.02)
    ]
    with RayRollouts(
        factories, num_nodes=2, resources_per_node=ONE, policy_factory=HeldCounter
    ) as rollouts:
        change_in_place(policy)
        assert (rollouts.rollout(2, policy)["action"] == 1 + torch.arange(2)).all()
        fast = [
            int(batch["env_ids"][0, 0])
            for batch in itertools.islice(rollouts.stream(20), 20)
        ]
        assert fast.count(0) > 12, "it was not delayed"
        found = []
        for batch in itertools.islice(rollouts.stream(2), 8):
            time.sleep(0.3)  # the learner: both nodes are ready whenever it asks
            found.append(int(batch["env_ids"][0, 0]))
        assert found[2:] == [found[2], found[3]] * 3
        assert found[2] != found[3]


def test_a_stream_names_the_version_of_its_weights_and_continues_episodes(
    shared,
):
    policy = Counter()
    shared.rollout(1, policy)
    first = shared.version
    stream, last, began_with = (
        shared.stream(6, policy),
        {},
        {0: 0, 3: 0},
    )
    for batch in itertools.islice(stream, 8):
        share = int(batch["env_ids"][0, 0])
        assert batch["env_ids"].tolist() == [
            [i] * 6 for i in ({0: (0, 1, 2), 3: (3, 4)}[share])
        ]
        version = batch["policy_version"] - first
        assert (version == began_with[share]).all()
        assert torch.equal(
            batch["action"], (batch["observation"][..., 1] + version) % 5
        )
        began_with[share] = shared.version - first
        root = batch["observation"][:, 0]
        if share in last:
            assert ((root[:, 1] == 0) | (root == last[share]).all(1)).all()
        last[share] = batch["next", "observation"][:, -1]
        change_in_place(policy)
    shared.rollout(1, policy)
    with pytest.raises(Busy, match="another call was made since"):
        next(stream)


def test_a_loaded_state_continues_with_the_same_data(shared):
    policy = Sampler()
    shared.rollout(4, policy)
    file = io.BytesIO()
    torch.save(shared.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)

    def go_on():
        yield shared.rollout(7, policy, auto_reset=False)
        yield shared.rollout(7, auto_reset=False)

    expected = list(go_on())
    shared.load_state_dict(state)
    assert shared.is_resumed
    for ours, theirs in zip(go_on(), expected, strict=True):
        assert_equal(ours, theirs)
    with RayRollouts(N, make_env, num_nodes=2, resources_per_node=ONE) as other:
        other.load_state_dict(state)
        with Collector(other, policy, frames_per_batch=7 * N) as collector:
            assert_equal(collector.collect(), expected[0])
    with pytest.raises(
        ValueError, match=r"a state of nodes with \[3, 2\] envs, got another"
    ):
        shared.load_state_dict({"nodes": state["nodes"][:1]})


def pid_of(rollouts, index):
    return int(rollouts._shares[index].place.rpartition(" ")[2])


def test_after_errors_and_interrupts_nodes_are_usable_and_closing_releases_them(
    tmp_path,
):
    free = ray.available_resources()["CPU"]
    faulty = functools.partial(FaultyEnv, "value_error", step=4)
    factories = [functools.partial(HaltingEnv, Gate(tmp_path), 1), faulty]
    with RayRollouts(
        factories, num_nodes=2, resources_per_node=ONE, seed=0
    ) as rollouts:
        interrupt(Gate(tmp_path), lambda: rollouts.rollout(2))
        assert rollouts.rollout(2)["observation"][0, :, 1].tolist() == [0, 1]
        for _ in range(2):
            with pytest.raises(
                EnvError,
                match=r"raised ValueError: .* \(env 1, worker 0, pid \d+, .*node ",
            ) as caught:
                rollouts.rollout(20)
            assert caught.value.env_ids == (1,)
        with pytest.raises(ZeroDivisionError):
            rollouts.rollout(2, lambda _: 1 / 0)
        assert rollouts.rollout(1, auto_reset=False).batch_size == (2, 1)
        pid = pid_of(rollouts, 1)
        os.kill(pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(
                WorkerLost, match=r"\(envs 1-1\) is lost: ActorDiedError.*'restart'"
            ):
                rollouts.rollout(2)
        wait_for(lambda: not os.path.exists(f"/proc/{pid}"))
        rollouts.close()
    with pytest.raises(Closed):
        rollouts.rollout(1)
    # Not "!=": an earlier test's may be released only now.
    while ray.available_resources().get("CPU", 0) < free:
        time.sleep(0.05)


def broken():
    raise OSError("no such level")


class Foreign:
    """Cannot be built elsewhere."""

    def __reduce__(self):
        return os.listdir, ("/no/such/folder",)

    def __call__(self):
        return CountingEnv()


def test_a_node_that_cannot_build_its_envs_is_named():
    one = {"num_nodes": 1, "resources_per_node": ONE}
    with pytest.raises(
        FactoryError,
        match=r"raised OSError: no such level \(env 0, worker 0, pid \d+.*node ",
    ) as caught:
        RayRollouts(1, broken, **one)
    assert "in broken" in str(caught.value.__cause__)
    with pytest.raises(
        ClusterError,
        match=r"expected node \S+ to read the factories, got FileNotFoundError: .*/no/such",
    ):
        RayRollouts(1, Foreign(), **one)


def test_more_than_there_is_is_refused():
    with pytest.raises(ClusterError, match=r"room for 7 shares of 1 CPU.*2 CPU"):
        RayRollouts(8, make_env, num_nodes=7)
    with pytest.raises(
        ClusterError, match=r"room for 5 shares of 2 CPU.*got none within 0.2 s"
    ):
        RayRollouts(
            8,
            make_env,
            num_nodes=5,
            resources_per_node={"CPU": 2},
            placement_timeout_s=0.2,
        )


def test_the_example_learns_from_both_nodes(cluster, run_example):
    printed = run_example("ray_rollouts", "--address", cluster.address)
    assert printed.count("(4, 64) of version") == 12
    assert "(8, 64) of version 12, from all nodes at once" in printed


# ---- lost actors and nodes -----------------------------------------------------------------------

RESTART = ExecutorOptions(on_worker_loss="restart", max_restarts=2)
make_short = functools.partial(CountingEnv, 4)
#: All envs of one share, and four envs on two nodes.
LOST = [2, 3]


def test_envs_lost_with_their_node_begin_new_episodes_after_an_interrupted_row():
    policy = Counter()
    with (
        RayRollouts(
            4, make_short, seed=5, num_nodes=2, resources_per_node=ONE, options=RESTART
        ) as rollouts,
        ParallelEnv(4, make_short, seed=5, num_workers=1, options=RESTART) as local,
    ):

        def roll(num_steps, *, auto_reset=False):
            ours = rollouts.rollout(num_steps, policy, auto_reset=auto_reset)
            theirs = local.rollout(
                num_steps, policy, auto_reset=auto_reset, break_when_any_done=False
            )
            assert_equal(ours[:2], theirs[:2])
            return ours

        last = roll(6, auto_reset=True)["next", "observation"][LOST, -1]
        # The first loss is in mid-episode, the second at an end.
        for num_steps, is_cut in ((5, True), (2, False)):
            os.kill(pid_of(rollouts, 1), signal.SIGKILL)
            change_in_place(policy)
            data = roll(num_steps)
            interrupted = data["next", "interrupted"].squeeze(-1)
            assert interrupted.nonzero().tolist() == [[2, 0], [3, 0]][: 2 * is_cut]
            if is_cut:
                assert torch.equal(data["next", "observation"][LOST, 0], last)
            assert (data["observation"][LOST, int(is_cut), 1] == 0).all()
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
            num_cpus=1,
            resources={"mine": 1},
            object_store_memory=80 * 2**20,
            wait=False,
        )
        for _ in range(2)
    ]
    cluster.wait_for_nodes()
    signal.signal(signal.SIGTERM, handler)
    try:
        make_slow = functools.partial(SleepingEnv, 0.02, length=1_000)
        with RayRollouts(
            2, make_slow, num_nodes=1, resources_per_node=mine, options=RESTART
        ) as rollouts:
            before = rollouts.rollout(2, Counter())
            stream = rollouts.stream(100, Counter())
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
            assert before.batch_size == (2, 2)
    finally:
        for node in nodes:
            cluster.remove_node(node)
