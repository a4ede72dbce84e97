"""Rollouts: their content, the ownership of their memory, and the envs' roots afterwards."""

import functools
import gc
import os
import threading

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from envherd.executor import (
    ActionError,
    AsyncCollector,
    Busy,
    Closed,
    ExecutorOptions,
    ParallelEnv,
    SerialEnv,
)
from envherd.executor.rollouts import storage
from envherd.executor.rollouts.policy_state import leaf_keys
from envherd.executor.rollouts.storage import Lease
from envherd.executor.show.loggers import EpisodeLogger
from envherd.shm.specs import EnvSpec, LeafSpec
from envherd.workers.testing import CountingEnv, PlainEnv
from envherd.workers.testing.envs import action_leaf
from tests.envs.counting_envs import AgentsEnv, PairEnv, TextEnv
from tests.executor.calls import both, ones
from tests.faults.children import in_child
from tests.gates import wait_for

long_env = functools.partial(CountingEnv, 1_000)
short_env = functools.partial(CountingEnv, 3)


@both
def test_the_second_dimension_is_time_also_of_envs_that_are_batches(make):
    with make(3, PairEnv, seed=0) as env:
        data = env.rollout(4, break_when_any_done=False)
    assert data.batch_size == (3, 4, 2)
    assert data.names == data["next"].names == [None, "time", None]
    steps = data["observation"][..., 1]
    goes_on = ~data["next", "done"][:, :-1, :, 0]
    assert torch.equal(steps[:, 1:][goes_on], steps[:, :-1][goes_on] + 1)


@both
def test_every_column_is_one_step(make):
    with make(3, long_env, seed=0) as env:
        data = env.rollout(5, ones)
    assert data.batch_size == (3, 5)
    assert data.names == [None, "time"]
    steps = torch.arange(5).expand(3, 5)
    assert torch.equal(data["observation"][..., 1], steps)
    assert torch.equal(data["next", "observation"][..., 1], steps + 1)
    assert torch.equal(
        data["next", "observation"][..., 2], torch.ones(3, 5, dtype=torch.int64)
    )
    assert torch.equal(data["next", "reward"], steps.unsqueeze(-1) + 1 + 1 / 8)
    assert torch.equal(data["action"], torch.ones(3, 5, dtype=torch.int64))
    assert not data["next", "done"].any()


@both
def test_it_stops_at_the_first_end_of_any_env(make):
    with make(2, [functools.partial(CountingEnv, 4), long_env], seed=0) as env:
        data = env.rollout(10, ones)
        assert data.batch_size == (2, 4)
        assert data["next", "done"].squeeze(-1).tolist() == [
            [False, False, False, True],
            [False] * 4,
        ]
        assert env.statistics().steps_per_env == (4, 4)


@both
def test_it_goes_on_over_ends_and_never_mixes_episodes(make):
    with make(2, short_env, seed=0) as env:
        data = env.rollout(8, ones, break_when_any_done=False)
        assert data["observation"][..., 1].tolist() == [[0, 1, 2, 0, 1, 2, 0, 1]] * 2
        assert (
            data["next", "observation"][..., 1].tolist()
            == [[1, 2, 3, 1, 2, 3, 1, 2]] * 2
        )
        assert (
            data["next", "done"].squeeze(-1).tolist()
            == [[False, False, True] * 2 + [False] * 2] * 2
        )
        assert not data["done"].any()
        seeds = data["observation"][..., 0]
        assert torch.equal(seeds, data["next", "observation"][..., 0])
        assert len(seeds.unique()) == 6
        assert env.statistics().steps_per_env == (8, 8)
        assert env.statistics().resets_per_env == (3, 3)


@both
def test_rollout_begins_with_a_reset_or_at_the_current_root(make):
    with make(2, long_env, seed=0) as env:
        assert env.rollout(3, ones)["observation"][:, 0, 1].tolist() == [0, 0]
        more = env.rollout(2, ones, auto_reset=False)
        assert more["observation"][..., 1].tolist() == [[3, 4]] * 2
        root = env.step(ones(env.current()))
        assert root["next", "observation"][:, 1].tolist() == [6, 6]
        assert env.rollout(1, ones)["observation"][:, 0, 1].tolist() == [0, 0]


@both
def test_other_outputs_of_the_policy_are_kept(make):
    def policy(td):
        ones(td)
        td["log_prob"] = td["observation"][:, 1].float() / 10
        td["hidden", "state"] = torch.zeros(2, 4).requires_grad_()
        return td

    with make(2, long_env, seed=0) as env:
        data = env.rollout(3, policy)
    assert torch.allclose(data["log_prob"], torch.tensor([[0.0, 0.1, 0.2]] * 2))
    assert data["hidden", "state"].shape == (2, 3, 4)
    assert not data["hidden", "state"].requires_grad


@both
def test_a_policy_that_returns_a_new_batch_whose_ids_are_no_data(make):
    with make(2, long_env, seed=0) as env:
        data = env.rollout(3, lambda _: env.rand_action())
        with_ids = env.rollout(2, lambda _: ones(env.current([0, 1])))
    assert torch.equal(data["next", "observation"][..., 2], data["action"])
    assert "env_ids" not in with_ids.keys()  # noqa: SIM118  # a batch is no dict


@both
def test_rollout_works_after_a_policy_without_action(make):
    with make(2, long_env, seed=0) as env:
        with pytest.raises(ActionError, match=r"expected a key \('action',\)"):
            env.rollout(3, lambda td: td)
        assert env.rollout(3, ones)["observation"][:, -1, 1].tolist() == [2, 2]


@both
def test_the_callback_sees_every_step_and_may_use_the_executor(make):
    seen = []
    with make(2, long_env, seed=0) as env:
        env.rollout(
            3,
            ones,
            callback=lambda e, td: seen.append(
                (e is env, td["action"].tolist(), len(e.render()))
            ),
        )
    assert seen == [(True, [1, 1], 2)] * 3


@both
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("tasks", ["equal", "different"])
def test_policy_and_callback_can_ask_where_the_envs_are(make, breaks, tasks):
    """`current` returns the policy's root; in the callback it returns the policy's next root."""
    acted_on, asked, after = [], [], []
    envs = (
        [short_env, short_env]
        if tasks == "equal"
        else [short_env, functools.partial(CountingEnv, 5, size=4)]
    )

    def policy(td):
        acted_on.append(td["observation"].clone())
        asked.append(env.current()["observation"])
        return ones(td)

    with make(2, envs, seed=0) as env:
        env.reset()
        for _ in range(2):  # the rollout continues after other steps
            env.step(ones(env.current()))
        env.rollout(
            7,
            policy,
            auto_reset=False,
            break_when_any_done=breaks,
            callback=lambda env, _: after.append(
                env.current([1, 0])["observation"].flip(0)
            ),
        )
        last = env.current()["observation"]
    assert all(
        torch.equal(one, other) for one, other in zip(acted_on, asked, strict=True)
    )
    assert all(
        torch.equal(one, other)
        for one, other in zip([*acted_on[1:], last], after, strict=True)
    )


@both
def test_text_is_where_the_envs_are_too(make):
    with make(2, TextEnv, seed=0) as env:
        asked = []

        def ask(env, _):
            asked.append(list(env.current()["text"]))

        rolled = env.rollout(4, break_when_any_done=False, callback=ask)
        broken = env.rollout(4, callback=ask)
    roots = [[rolled["text"][i][t] for i in range(2)] for t in range(1, 4)]
    assert asked[:3] == roots
    length = broken.batch_size[1]
    assert asked[4:] == [
        [broken["next", "text"][i][t] for i in range(2)] for t in range(length)
    ]


@both
def test_the_callback_is_given_next_and_what_the_policy_put_there(make):
    shown = []

    def policy(td):
        td["next"] = TensorDict({"hidden": td["observation"][:, 1:2] + 0.5}, [2])
        return ones(td)

    options = ExecutorOptions(on_worker_loss="restart")
    with make(2, short_env, seed=0, options=options) as env:
        data = env.rollout(
            5,
            policy,
            break_when_any_done=False,
            callback=lambda _, td: shown.append(td.clone()),
        )
    keys = leaf_keys(data)
    assert {("next", "hidden"), ("next", "interrupted"), ("next", "reward")} <= set(
        keys
    )
    for step, td in enumerate(shown):
        for key in keys:
            assert torch.equal(td[key], data[:, step][key])


@both
def test_send_and_recv_are_refused_in_a_rollout(make):
    with make(2, long_env, seed=0) as env:
        for forbidden in (
            lambda *_: env.recv(),
            lambda *_: env.send(ones(env.current())),
            lambda *_: env.reset(),
        ):
            with pytest.raises(Busy, match="a rollout is in progress"):
                env.rollout(2, ones, callback=forbidden)
        assert env.rollout(2, ones)["observation"][..., 1].tolist() == [[0, 1]] * 2


@both
@pytest.mark.parametrize("where", ["policy", "callback"])
@pytest.mark.parametrize("step", [0, 2])
def test_closing_in_a_rollout_ends_it(make, where, step):
    env = make(2, long_env, seed=0)
    calls = []

    def close(_, td=None):
        calls.append(1)
        if len(calls) > step:
            env.close()

    policy = (lambda td: (close(env), ones(td))[1]) if where == "policy" else ones
    with pytest.raises(Closed):
        env.rollout(3, policy, callback=close if where == "callback" else None)
    assert len(calls) == step + 1


class Stateful(PlainEnv):
    """Counts in a state that each step takes and returns, like stateless simulators."""

    spec = EnvSpec(
        observation=(LeafSpec(("count",), (1,), "int64"),),
        action=(action_leaf(),),
        state=(LeafSpec(("count",), (1,), "int64"),),
        family="plain",
    )

    def reset(self, seed, options=None):
        return [np.zeros(1, np.int64)]

    def step(self, action):
        return [action[1] + 1], [0.0], False, False


@both
def test_state_that_the_policy_leaves_out_is_that_of_the_step_before(make):
    with make(2, Stateful, seed=0) as env:
        data = env.rollout(4, lambda td: ones(TensorDict({}, td.batch_size)))
        assert data["next", "count"].squeeze(-1).tolist() == [[1, 2, 3, 4]] * 2
        data = env.rollout(
            2, lambda td: ones(TensorDict({}, td.batch_size)), auto_reset=False
        )
        assert data["next", "count"].squeeze(-1).tolist() == [[5, 6]] * 2


def test_an_async_collector_sends_the_state_that_the_policy_has_written():
    def act(td):
        return ones(td).set("count", td["count"] + 100)

    with AsyncCollector(SerialEnv(2, Stateful), act, frames_per_batch=4) as collector:
        data = collector.collect()
        assert data["next", "count"].equal(data["count"] + 1)
        assert data["count"].max() == 201


def test_an_async_collector_names_the_entries_that_lack_an_action():
    with (
        AsyncCollector(
            SerialEnv(2, Stateful), lambda td: td, frames_per_batch=4
        ) as collector,
        pytest.raises(ActionError, match=r"none among .*count"),
    ):
        collector.collect()


@both
def test_a_callback_that_raises_after_an_end_costs_no_episode(make):
    def raise_at_the_end(env, td):
        if td["next", "done"].any():
            raise KeyError("mine")

    with make(2, short_env, seed=0) as env:
        with pytest.raises(KeyError):
            env.rollout(6, ones, break_when_any_done=False, callback=raise_at_the_end)
        assert env.current()["observation"][:, 1].tolist() == [0, 0]
        env.rollout(1, ones, auto_reset=False)
        assert env.statistics().resets_per_env == (2, 2)


@both
def test_the_last_step_and_its_agents_can_be_marked_truncated(make):
    with make(2, AgentsEnv, seed=0) as env:
        data = env.rollout(2, set_truncated=True)
    for key in ("done", "truncated"):
        assert data["next", key].squeeze(-1).tolist() == [[False, True]] * 2
        assert data["next", "agents", key][:, -1].all()
        assert not data["next", "agents", key][:, 0].any()
    assert not data["next", "agents", "terminated"].any()


@both
def test_later_rollouts_do_not_touch_earlier_data(make):
    with make(2, functools.partial(CountingEnv, 1_000, size=8), seed=0) as env:
        kept = [env.rollout(4, ones) for _ in range(8)]
        copies = [data.clone() for data in kept]
        for _ in range(4):
            env.rollout(4, ones)
            gc.collect()
    for data, copied in zip(kept, copies, strict=True):
        assert (data == copied).all()


@pytest.mark.slow
def test_unheld_rollout_memory_is_reused():
    with ParallelEnv(
        2, functools.partial(CountingEnv, 1_000, size=64), num_workers=2
    ) as env:
        addresses = set()
        for _ in range(10):
            data = env.rollout(16, ones)
            addresses.add(data["next", "pixels"].data_ptr())
            del data
            gc.collect()
        assert len(addresses) <= 2
        first = env.rollout(16, ones)["next", "pixels"]
        second = env.rollout(16, ones)["next", "pixels"]
        assert first.data_ptr() != second.data_ptr()


@pytest.mark.slow
def test_memory_that_a_forked_process_may_hold_is_not_used_again():
    with ParallelEnv(2, long_env, num_workers=1, seed=0) as env:
        held = [env.rollout(5, ones)["observation"]]
        steps = held[0].tolist()
        read, write = os.pipe()
        seen, forks = [], storage._num_forks
        child = threading.Thread(
            target=lambda: seen.append(
                in_child(lambda: (os.read(read, 1), held[0].tolist())[1])
            )
        )
        child.start()
        wait_for(lambda: storage._num_forks == forks + 2)
        held.clear()
        for _ in range(3):
            gc.collect()
            env.rollout(5, ones, auto_reset=False)
        os.write(write, b"x")
        child.join()
        os.close(read)
        os.close(write)
    assert seen == [steps]


@pytest.mark.slow
def test_the_last_tensor_may_go_while_the_next_rollout_begins(monkeypatch):
    held = []
    is_open = Lease.is_open.fget
    with ParallelEnv(1, long_env, num_workers=1) as env:
        held += [env.rollout(num_steps, ones) for num_steps in (1, 2)]
        monkeypatch.setattr(
            Lease, "is_open", property(lambda self: (held.clear(), is_open(self))[1])
        )
        assert env.rollout(3, ones).batch_size == (1, 3)


@both
def test_out_is_filled(make):
    with make(2, long_env, seed=0) as env:
        first = env.rollout(4, ones)
        address = first["next", "observation"].data_ptr()
        again = env.rollout(4, ones, auto_reset=False, out=first)
        assert again is first
        assert again["observation"][..., 1].tolist() == [[4, 5, 6, 7]] * 2
        assert again["next", "observation"].data_ptr() == address
        mine = first.clone()
        filled = env.rollout(4, ones, out=mine)
        assert filled is mine
        assert mine["observation"][..., 1].tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.slow
def test_workers_write_straight_into_an_out_that_an_earlier_rollout_returned():
    seen = []

    def policy(td):
        seen.append(td["observation"].data_ptr())
        return ones(td)

    with ParallelEnv(2, long_env, num_workers=2) as env:
        out = env.rollout(4, ones)
        env.rollout(4, policy, out=out)
    assert seen == [out["observation"][:, step].data_ptr() for step in range(4)]


@both
def test_rollout_fills_only_its_slice_of_out(make):
    with make(3, long_env, seed=0) as env:
        whole = env.rollout(6, ones)
        kept = whole.clone()
        filled = env.rollout(3, ones, auto_reset=False, out=whole[:, :3])
        assert filled["observation"][..., 1].tolist() == [[6, 7, 8]] * 3
        assert (whole[:, 3:] == kept[:, 3:]).all()
        filled = env.rollout(2, ones, auto_reset=False, out=whole)
        assert filled["observation"][..., 1].tolist() == [[9, 10]] * 3
        assert whole["observation"][..., 1].tolist() == [[9, 10, 8, 3, 4, 5]] * 3
        with_another = whole.copy().set(
            "observation", torch.zeros_like(whole["observation"])
        )
        filled = env.rollout(6, ones, out=with_another)
        assert filled["observation"][..., 1].tolist() == [[0, 1, 2, 3, 4, 5]] * 3
        assert whole["observation"][..., 1].tolist() == [[9, 10, 8, 3, 4, 5]] * 3


@both
def test_an_out_of_other_envs_is_refused(make):
    with make(3, long_env, seed=0) as env:
        data = env.rollout(4, ones)
        kept = data.clone()
        for out in (
            data[:2],
            *(TensorDict({}, shape) for shape in [(4, 4), (3,), (3, 0), (3, 4, 2)]),
        ):
            with pytest.raises(
                ValueError, match=r"expected out of batch size \[3, T\]"
            ):
                env.rollout(4, ones, out=out)
        assert (data == kept).all()
        with pytest.raises(ValueError, match=r"expected out to hold .*reward"):
            env.rollout(
                4,
                ones,
                out=TensorDict(
                    {"next": TensorDict({"reward": torch.zeros(3, 4)}, [3, 4])}, [3, 4]
                ),
            )


@both
def test_an_out_of_different_tasks_is_a_lazy_stack(make):
    with make(2, [short_env, functools.partial(CountingEnv, 3, size=4)], seed=0) as env:
        first = env.rollout(3, ones)
        again = env.rollout(3, ones, auto_reset=False, out=first)
        assert again is first
        with pytest.raises(ValueError, match="lazy stack"):
            env.rollout(3, ones, out=TensorDict({}, [2, 3]))


@both
def test_out_of_a_rollout_that_broke(make):
    with make(2, functools.partial(CountingEnv, 3), seed=0) as env:
        out = env.rollout(6, ones, break_when_any_done=False)
        broken = env.rollout(6, ones, out=out)
        assert broken.batch_size == (2, 3)
        assert broken["next", "observation"][..., 1].tolist() == [[1, 2, 3]] * 2


@both
def test_different_tasks_come_as_a_lazy_stack(make):
    tasks = [long_env, functools.partial(CountingEnv, 1_000, size=4), AgentsEnv]
    with make(3, tasks, seed=0) as env:
        root = env.reset()
        assert isinstance(root, LazyStackedTensorDict)
        assert root[1]["pixels"].shape == (4, 4)
        assert "pixels" not in root[0].keys()  # noqa: SIM118  # a TensorDict's keys
        root = env.step(env.rand_action())
        assert root[1]["next", "pixels"].unique().tolist() == [1]
        data = env.rollout(2)
        assert data.batch_size == (3, 2)
        assert data[1]["next", "pixels"].shape == (2, 4, 4)


class Nested(gymnasium.Env):
    """Has an observation and an action that are plain, or inside a tuple and a dict."""

    def __init__(self, *, is_observed_nested: bool, acts_nested: bool) -> None:
        number, choice = (
            gymnasium.spaces.Box(0, 99, (2,), np.float32),
            gymnasium.spaces.Discrete(3),
        )
        self._is_tuple = is_observed_nested
        self.observation_space = (
            gymnasium.spaces.Tuple((number, number)) if is_observed_nested else number
        )
        self.action_space = (
            gymnasium.spaces.Dict({"a": choice}) if acts_nested else choice
        )

    def _observe(self):
        value = np.full(2, self._num_steps, np.float32)
        return (value, value) if self._is_tuple else value

    def reset(self, *, seed=None, options=None):
        self._num_steps = 0
        return self._observe(), {}

    def step(self, action):
        self._num_steps += 1
        return self._observe(), 1.0, self._num_steps == 4, False, {}


@both
@pytest.mark.parametrize(
    "kinds",
    [
        [(0, 0), (0, 1)],
        [(1, 0), (0, 0)],
        [(1, 0), (0, 1), (0, 0)],
        [(1, 1), (0, 0), (1, 1)],
    ],
)
def test_a_leaf_of_one_task_may_be_a_group_of_another(make, kinds):
    """Keys that the policy adds are kept, in the root and from `next` to the next root."""
    tasks = [
        functools.partial(Nested, is_observed_nested=bool(one), acts_nested=bool(other))
        for one, other in kinds
    ]
    num_envs, seen = len(kinds), []

    def act(td: TensorDictBase) -> TensorDictBase:
        td = env.rand_action(td)
        td.set("note", torch.full((num_envs, 1), len(seen)))
        return td.set(("next", "memory"), td.get("memory") + 1)

    with make(
        num_envs, tasks, seed=0, options=ExecutorOptions(episode_statistics=True)
    ) as env:
        primer = TensorDict({"memory": torch.zeros(num_envs, 1)}, [num_envs])
        out = env.rollout(9, act, primer=primer, break_when_any_done=False)
        data = env.rollout(
            9,
            act,
            primer=primer,
            break_when_any_done=False,
            out=out,
            callback=lambda _, td: seen.append(td["next"]),
        )
        assert data["note"].squeeze(-1).tolist() == [[*range(9)]] * num_envs
        assert (
            data["memory"].squeeze(-1).tolist()
            == [[0, 1, 2, 3, 0, 1, 2, 3, 0]] * num_envs
        )
        for row, (is_nested, acts_nested) in enumerate(kinds):
            leaf = data[row]["next", "observation"]
            leaf = leaf["0"] if is_nested else leaf
            assert leaf[:, 0].tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 1]
            assert (
                data[row]["action", "a"].shape == (9,)
                if acts_nested
                else data[row]["action"].shape == (9,)
            )
        assert env.rollout(3, set_truncated=True)["next", "truncated"][:, -1].all()
        logger = EpisodeLogger()
        logger.add(data)
        assert logger.num_episodes == 2 * num_envs


@both
def test_rollout_has_text_observations(make):
    with make(2, TextEnv, seed=0) as env:
        data = env.rollout(4, break_when_any_done=False)
        key = next(leaf.key for leaf in env.observation_spec if leaf.is_side)
        roots, nexts = data[key], data[("next", *key)]
        done = data["next", "done"].squeeze(-1)
        for i in range(2):
            for t in range(3):
                assert isinstance(roots[i][t], str)
                assert (roots[i][t + 1] == nexts[i][t]) == (not done[i, t])


@both
def test_text_is_filled_into_out_too(make):
    with make(2, TextEnv) as env:
        out = env.rollout(2)
        before = out.get("text").tolist()
        data = env.rollout(2, out=out)
        assert data.get("text").tolist() == [
            [f"{o[0]}:{o[1]}" for o in row] for row in data["observation"].tolist()
        ]
        assert data.get("text").tolist() != before
