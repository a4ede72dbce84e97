"""A batch over the nodes of a cluster equals that of one machine: data, errors, rollouts, first-K."""

import contextlib
import functools
import itertools
import os
import signal
import time

import pytest
import torch
from tensordict import TensorDict, is_leaf_nontensor

from envherd.executor import (
    ActionError,
    AsyncCollector,
    Busy,
    Collector,
    EnvError,
    ExecutorOptions,
    FactoryError,
    ParallelEnv,
    ResetNeeded,
    WorkerLost,
)
from envherd.executor.cluster import ClusterError, RayParallelEnv
from envherd.workers.testing import AgentsEnv, CountingEnv, FaultyEnv, PairEnv, TextEnv
from tests.cluster.envs import Counter, GatedEnv, HeldCounter, OnceEnv

pytestmark = [pytest.mark.slow, pytest.mark.broken_pool, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(300)]

N = 5
make_env = functools.partial(CountingEnv, None)


@pytest.fixture(scope="module")
def shared_env(cluster):
    """Two nodes with three and two envs; every test sets a different seed."""
    with RayParallelEnv(N, make_env, seed=0, resources_per_node={"CPU": 2}) as env:
        yield env


@pytest.fixture(params=[3])
def pair(request, shared_env):
    """The cluster's env, and one machine's with the same seed."""
    shared_env.set_seed(request.param)
    with ParallelEnv(N, make_env, seed=request.param, num_workers=2) as local:
        yield shared_env, local


def assert_equal(one, other):
    assert one.batch_size == other.batch_size
    assert one.names == other.names
    keys = set(one.keys(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor))
    assert keys == set(other.keys(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor))
    for key in keys:
        ours, theirs = one.get(key), other.get(key)
        if isinstance(ours, torch.Tensor):
            assert ours.dtype == theirs.dtype, key
            assert torch.equal(ours, theirs), key
        else:
            assert ours.tolist() == theirs.tolist(), key


def test_it_is_spread_over_the_nodes(shared_env):
    assert shared_env.envs_per_node == (3, 2)
    assert shared_env.num_workers == 4
    assert len({node.node_id for node in shared_env.nodes}) == 2
    assert [worker.env_ids for worker in shared_env.statistics().workers] == [(0, 1), (2,), (3,), (4,)]
    assert len(set(shared_env.call("pid"))) == 4
    assert shared_env.statistics().path == "steps in Python, because the envs run in a Ray cluster"


def test_steps_and_resets_are_those_of_one_machine(pair):
    envs = pair
    roots = [env.reset() for env in envs]
    assert_equal(*roots)
    num_ends = 0
    for _ in range(12):
        made = [env.step_and_maybe_reset(env.rand_action(root)) for env, root in zip(envs, roots, strict=True)]
        steps, roots = zip(*made, strict=True)
        assert_equal(*steps)
        assert_equal(*roots)
        num_ends += int(steps[0]["next", "done"].sum())
    assert num_ends > 5
    mask = torch.tensor([False, True, False, False, True])
    assert_equal(*[env.reset(TensorDict({"_reset": mask}, [N])) for env in envs])
    assert_equal(*[env.step(env.rand_action(env.current())) for env in envs])


def test_rollouts_are_those_of_one_machine_and_stay_the_callers(pair):
    kept = []
    for steps in (7, 7, 4, 7):
        data = [env.rollout(steps, break_when_any_done=False, auto_reset=not kept) for env in pair]
        assert_equal(*data)
        kept.append((data[0], data[0].clone()))
    for data, copy in kept:
        assert_equal(data, copy)
    out = kept[0][0]
    again = [env.rollout(7, break_when_any_done=False, out=o) for env, o in zip(pair, (out, None), strict=True)]
    assert_equal(*again)
    assert again[0]["next", "done"].data_ptr() == out["next", "done"].data_ptr()


def test_envs_are_received_in_any_order_with_the_same_data(pair):
    remote, local = pair
    for env in pair:
        env.reset()
    for _ in range(4):
        for env in pair:
            env.send(env.rand_action(env.current()))
        parts = [remote.recv(k) for k in (1, 3, 1)]
        with pytest.raises(ValueError, match="expected envs that were sent, got none"):
            remote.recv(1)
        got = torch.cat(parts)
        theirs = local.recv()
        assert_equal(*[td[td["env_ids"].argsort()] for td in (got, theirs)])


@pytest.mark.parametrize("in_background", [0, 1])
def test_an_async_collector_gives_every_step_once_as_one_machine_makes_it(pair, in_background):
    remote, local = pair
    collector = AsyncCollector(
        remote,
        lambda root: root.set("action", root["observation"][:, 1] % 4),
        frames_per_batch=20,
        layout="flat",
        in_background=in_background,
        close_env=False,
    )
    with collector:
        data = torch.cat([collector.collect() for _ in range(4)])
        statistics = collector.statistics()
    assert statistics.frames >= 80
    assert 0 < statistics.queue_p50_s <= statistics.queue_p99_s
    root = local.reset()
    made = []
    for _ in range(int(data["step"].max()) + 1):
        td, root = local.step_and_maybe_reset(root.set("action", root["observation"][:, 1] % 4))
        made.append(td["next", "observation"].clone())
    for env_id in range(N):
        own = data[data["env_ids"] == env_id]
        assert own["step"].tolist() == list(range(len(own)))
        assert torch.equal(own["next", "observation"], torch.stack(made)[: len(own), env_id])
    assert torch.equal(data["policy_version"], torch.zeros(80, dtype=torch.int64))


def test_remote_rollouts_are_those_of_one_machine(pair):
    remote, local = pair
    rollouts = remote.remote_rollouts()
    policy = Counter()
    for round_ in range(3):
        kwargs = {"auto_reset": round_ == 0, "break_when_any_done": False}
        assert_equal(*[env.rollout(9, policy, **kwargs) for env in (rollouts, local)])
        assert rollouts.version == round_
        assert_equal(remote.current(), local.current())
        for env in pair:
            env.reset(TensorDict({"_reset": env.current()["done"]}, [N]))
        assert_equal(*[env.step_and_maybe_reset(policy(env.current()))[1] for env in pair])
        with torch.no_grad():
            policy.shift += 1


def test_the_reset_after_a_step_does_not_overwrite_the_root_from_a_remote_rollout(shared_env):
    shared_env.set_seed(5)
    shared_env.rollout(1)
    for _ in range(3):
        shared_env.remote_rollouts().rollout(1)
        root = shared_env.reset(TensorDict({"_reset": shared_env.current()["done"]}, [N]))
        for _ in range(4):  # to the ends of episodes
            shared_env.send(shared_env.rand_action(root))
            td = shared_env.recv(env_ids=list(range(N)))
            assert torch.equal(td["observation"], root["observation"])
            root = shared_env.current()


def test_a_collector_takes_both(pair):
    remote, local = pair
    policy = Counter()
    for env in (remote, remote.remote_rollouts(policy_factory=HeldCounter)):
        local.set_seed(8)
        remote.set_seed(8)
        theirs = Collector(local, policy, frames_per_batch=4 * N, close_env=False)
        ours = Collector(env, policy, frames_per_batch=4 * N, close_env=False)
        for _ in range(3):
            assert_equal(ours.collect(), theirs.collect())


def test_hosts_do_not_take_one_policy_for_another(shared_env):
    shared_env.set_seed(6)
    for action in (1, 3):  # each with another maker of rollouts
        data = shared_env.remote_rollouts().rollout(2, lambda td, action=action: take_action(td, action))
        assert (data["action"] == action).all()


def test_a_stream_says_how_stale_its_rollouts_are(shared_env):
    policy = Counter()
    rollouts = shared_env.remote_rollouts()
    shared_env.set_seed(1)
    seen = {}
    for batch in itertools.islice(rollouts.stream(6, policy), 8):
        assert batch.data.batch_size == (len(batch.env_ids), 6)
        assert batch.staleness == rollouts.version - batch.version
        shift = batch.data["action"] - batch.data["observation"][..., 1]
        assert (shift % 5 == batch.version % 5).all(), "the rollout was made with the weights that it names"
        before = seen.setdefault(batch.node, batch.data["next", "observation"][:, :0])
        if before.shape[1]:
            goes_on = batch.data["observation"][:, 0, 1] == before[:, -1, 1]
            assert (goes_on | (batch.data["observation"][:, 0, 1] == 0)).all()
        seen[batch.node] = batch.data["next", "observation"]
        with torch.no_grad():
            policy.shift += 1
        with pytest.raises(Busy):
            shared_env.step(shared_env.rand_action())
    assert sum(map(len, seen.values())) == N
    shared_env.reset()


def test_a_policy_that_cannot_be_pickled_is_named(shared_env):
    with pytest.raises(ClusterError, match="a policy that can be pickled, got HeldCounter"):
        shared_env.remote_rollouts().rollout(2, HeldCounter())
    with pytest.raises(ValueError, match="nodes act separately"):
        shared_env.remote_rollouts().rollout(2, break_when_any_done=True)
    with pytest.raises(ValueError, match="nodes act separately"):
        shared_env.remote_rollouts().rollout(2, callback=print)


def test_refusals_touch_nothing(shared_env):
    shared_env.set_seed(2)
    shared_env.reset()
    before = shared_env.statistics().env_steps
    with pytest.raises(ActionError, match=r"got 9 at \(3,\) \(env 3\)"):
        shared_env.step(TensorDict({"action": torch.tensor([0, 0, 0, 9, 0])}, [N]))
    assert shared_env.statistics().env_steps == before
    with pytest.raises(EnvError, match=r"no attribute 'nothing' \(env 4, worker 3, pid \d+, node "):
        shared_env.call("nothing", env_ids=[4])


@pytest.mark.parametrize("make_other", [PairEnv, TextEnv])
def test_parts_of_envs_are_reset_and_side_values_come_as_on_one_machine(make_other):
    kwargs = {"num_workers": 1, "seed": 4}
    with (
        RayParallelEnv(2, make_other, num_nodes=1, resources_per_node={"CPU": 1}, **kwargs) as remote,
        ParallelEnv(2, make_other, **kwargs) as local,
    ):
        pair = remote, local
        roots = [env.reset() for env in pair]
        for _ in range(3):
            roots = [env.step_and_maybe_reset(env.rand_action(root))[1] for env, root in zip(pair, roots, strict=True)]
            assert_equal(*roots)
        mask = torch.zeros(roots[0]["done"].shape, dtype=torch.bool)
        mask[1].view(-1)[0] = True
        assert_equal(*[env.reset(TensorDict({"_reset": mask}, env.batch_size)) for env in pair])
        rollouts = remote.remote_rollouts()
        for _ in range(2):
            kwargs = {"auto_reset": False, "break_when_any_done": False}
            assert_equal(*[env.rollout(5, take_no_action, **kwargs) for env in (rollouts, local)])
            assert_equal(remote.current(), local.current())
            for env in pair:
                env.reset(TensorDict({"_reset": env.current()["done"]}, env.batch_size))
        assert_equal(*[env.step(take_no_action(env.current())) for env in pair])


def take_no_action(td):
    return take_action(td, 0)


def take_action(td, action):
    return td.set("action", torch.full(td.batch_size, action))


@pytest.mark.full
def test_workers_are_recycled_on_their_nodes_and_the_data_are_the_same():
    options = ExecutorOptions(recycle_after=1)
    kwargs = {"resources_per_node": {"CPU": 1}, "num_workers": 2, "options": options}
    with RayParallelEnv(3, make_env, seed=5, **kwargs) as remote, ParallelEnv(3, make_env, seed=5) as local:
        pids = set(remote.call("pid"))
        pair = remote, local
        roots = [env.reset() for env in pair]
        for _ in range(8):
            made = [env.step_and_maybe_reset(env.rand_action(root)) for env, root in zip(pair, roots, strict=True)]
            steps, roots = zip(*made, strict=True)
            assert_equal(*steps)
            assert_equal(*roots)
        stepped = remote.statistics().recycled
        assert stepped > 0
        assert_equal(*[env.reset() for env in pair])
        for _ in range(8):
            for env in pair:
                env.send(env.rand_action(env.current()))
            theirs, ours = local.recv(), torch.cat([remote.recv(1) for _ in range(3)])
            assert_equal(ours[ours["env_ids"].argsort()], theirs[theirs["env_ids"].argsort()])
        sent = remote.statistics().recycled
        assert sent > stepped
        kwargs = {"auto_reset": False, "break_when_any_done": False}
        assert_equal(*[env.rollout(9, Counter(), **kwargs) for env in (remote.remote_rollouts(), local)])
        statistics = remote.statistics()
        assert statistics.recycled > sent
        assert (statistics.interrupted, statistics.worker_losses) == (0, 0)
        assert pids.isdisjoint(remote.call("pid"))
        assert [worker.pid for worker in statistics.workers] == [*dict.fromkeys(remote.call("pid"))]
        assert sum(worker.generation for worker in statistics.workers) == statistics.recycled


def step_until_it_raises(env):
    while True:
        env.step_and_maybe_reset(env.rand_action(env.current()))


def send_until_it_raises(env):
    while True:
        env.send(env.rand_action(env.current()))
        env.recv()


@pytest.mark.parametrize("go_on", [step_until_it_raises, pytest.param(send_until_it_raises, marks=pytest.mark.full)])
def test_a_successor_that_cannot_be_built_is_told(tmp_path, go_on):
    options = ExecutorOptions(recycle_after=1)
    make_once = functools.partial(OnceEnv, str(tmp_path / "built"))
    with RayParallelEnv(1, make_once, num_nodes=1, resources_per_node={"CPU": 1}, options=options) as env:
        env.reset()
        with pytest.raises(WorkerLost, match="exit code 3"):
            go_on(env)


def test_unlike_envs_faults_and_a_slow_node(tmp_path):
    gate = tmp_path / "gate"
    factories = [
        functools.partial(CountingEnv, 1_000),
        functools.partial(FaultyEnv, "value_error"),
        functools.partial(GatedEnv, str(gate)),
        AgentsEnv,
    ]
    with RayParallelEnv(4, factories, seed=0, resources_per_node={"CPU": 2}, envs_per_node=[2, 2]) as env:
        assert env.envs_per_node == (2, 2)
        env.reset()
        actions = env.rand_action()
        env.send(actions)
        assert env.recv(1)["env_ids"].tolist() == [0]
        assert env.recv(1)["env_ids"].tolist() == [1], "the other env of that node was ready too"
        with pytest.raises(TimeoutError, match="Nothing is lost"):
            env.recv(1, timeout_s=0.05)
        env.send(actions[:1], [0])
        assert env.recv(1)["env_ids"].tolist() == [0], "a slow node holds nobody up"
        gate.touch()
        assert env.recv()["env_ids"].tolist() == [2, 3]
        with pytest.raises(EnvError, match=r"raised ValueError: .* \(env 1, worker 1, pid \d+, node ") as caught:
            step_until_it_raises(env)
        assert caught.value.env_ids == (1,)
        with pytest.raises(ResetNeeded, match=r"envs \[1\]"):
            env.step(env.rand_action(env.current()))
        env.reset(TensorDict({"_reset": torch.tensor([False, True, False, False])}, [4]))
        with pytest.raises(EnvError, match="raised ValueError"):
            send_until_it_raises(env)
        assert env.recv()["env_ids"].tolist() == [0, 2, 3], "the others have stepped"
        assert env.statistics().env_errors == 2


@contextlib.contextmanager
def interrupted_after(seconds):
    """Raise KeyboardInterrupt in this thread after some seconds."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupted_call_leaves_a_usable_executor(tmp_path):
    gate = tmp_path / "gate"
    factories = [functools.partial(CountingEnv, 1_000), functools.partial(GatedEnv, str(gate))]
    with RayParallelEnv(factories, seed=0, num_nodes=2, resources_per_node={"CPU": 1}) as env:
        env.reset()
        with interrupted_after(1.0):
            env.step(env.rand_action())
        gate.touch()
        assert env.current()["truncated"].all()
        with pytest.raises(ResetNeeded):
            env.step(env.rand_action())
        env.reset()
        env.step(env.rand_action())
        gate.unlink()
        env.send(env.rand_action())
        with interrupted_after(1.0):
            env.recv()
        gate.touch()
        assert env.recv()["next", "observation"][:, 1].tolist() == [2, 2], "nothing is lost"
        gate.unlink()
        with interrupted_after(1.0):
            env.step(env.rand_action())
        began = time.monotonic()
    assert time.monotonic() - began < 60


def test_a_killed_worker_costs_its_envs_rows_also_between_send_and_recv():
    options = ExecutorOptions(on_worker_loss="restart")
    make_endless = functools.partial(CountingEnv, 1_000)
    with RayParallelEnv(N, make_endless, seed=0, resources_per_node={"CPU": 2}, options=options) as env:
        env.reset()
        for by_send in (False, True):
            os.kill(env.call("pid", env_ids=[2])[0], signal.SIGKILL)
            if by_send:
                env.send(env.rand_action()[[2, 4]], [2, 4])
                td = env.recv()
                assert td["next", "interrupted"].flatten().tolist() == [True, False]
                assert torch.equal(td["next", "observation"][0], td["observation"][0])
            else:
                td, _ = env.step_and_maybe_reset(env.rand_action())
                assert td["next", "interrupted"].flatten().tolist() == [False, False, True, False, False]
            assert env.current()["observation"][:, 1].tolist() == [1, 1, 0, 1, 1 + by_send]
        assert env.statistics().interrupted == env.statistics().worker_losses == 2
    with RayParallelEnv(N, make_endless, seed=0, resources_per_node={"CPU": 2}) as env:
        env.reset()
        os.kill(env.call("pid", env_ids=[2])[0], signal.SIGKILL)
        with pytest.raises(WorkerLost, match=r"worker 1 .*SIGKILL") as caught:
            env.step(env.rand_action())
        assert caught.value.partial["observation"][:, 1].tolist() == [1, 1, 0, 1, 1]
        resets = env.statistics().resets_per_env
        with pytest.raises(WorkerLost, match="worker 1 "):
            env.reset()
        assert env.statistics().resets_per_env == resets, "no other node has reset its envs"


def test_a_factory_that_raises_and_versions_that_differ_are_said(tmp_path):
    def broken():
        raise OSError("no such level")

    with pytest.raises(FactoryError, match=r"raised OSError: no such level \(env 0, worker 0, pid \d+, node "):
        RayParallelEnv(1, broken, num_nodes=1, resources_per_node={"CPU": 1})
    info = tmp_path / "tensordict-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tensordict\nVersion: 9.9\n")
    runtime_env = {"env_vars": {"PYTHONPATH": str(tmp_path)}}
    with pytest.raises(ClusterError, match=r"expected tensordict [\d.]+ on every node, as in the driver, got 9.9 on"):
        RayParallelEnv(1, make_env, num_nodes=1, resources_per_node={"CPU": 1}, runtime_env=runtime_env)


def test_more_than_there_is_is_refused():
    with pytest.raises(ClusterError, match=r"room for 7 shares of 1 CPU.*8 CPU"):
        RayParallelEnv(8, make_env, num_nodes=7)
    with pytest.raises(ClusterError, match=r"room for 2 shares of 64 CPU.*got none within 0.2 s"):
        RayParallelEnv(8, make_env, num_nodes=2, resources_per_node={"CPU": 64}, placement_timeout_s=0.2)
