"""Rollouts: what is in them, whose memory it is, and where the envs are afterwards."""

import functools
import gc
import os
import threading

import pytest
import torch
from tensordict import LazyStackedTensorDict

from envherd.executor import ActionError, ParallelEnv, SerialEnv, storage
from envherd.executor.storage import Lease
from envherd.workers.testing import AgentsEnv, CountingEnv, TextEnv
from tests.faults.children import in_child
from tests.gates import wait_for

PARALLEL = pytest.param(functools.partial(ParallelEnv, num_workers=2), id="parallel", marks=pytest.mark.slow)
both = pytest.mark.parametrize("make", [PARALLEL, pytest.param(SerialEnv, id="serial")])

long_env = functools.partial(CountingEnv, 1_000)
short_env = functools.partial(CountingEnv, 3)


def ones(td):
    return td.set("action", torch.ones(td.batch_size, dtype=torch.int64))


@both
def test_every_column_is_one_step(make):
    with make(3, long_env, seed=0) as env:
        data = env.rollout(5, ones)
    assert data.batch_size == (3, 5)
    assert data.names == [None, "time"]
    steps = torch.arange(5).expand(3, 5)
    assert torch.equal(data["observation"][..., 1], steps)
    assert torch.equal(data["next", "observation"][..., 1], steps + 1)
    assert torch.equal(data["next", "observation"][..., 2], torch.ones(3, 5, dtype=torch.int64))
    assert torch.equal(data["next", "reward"], steps.unsqueeze(-1) + 1 + 1 / 8)
    assert torch.equal(data["action"], torch.ones(3, 5, dtype=torch.int64))
    assert not data["next", "done"].any()


@both
def test_it_stops_at_the_first_end_of_any_env(make):
    with make(2, [functools.partial(CountingEnv, 4), long_env], seed=0) as env:
        data = env.rollout(10, ones)
        assert data.batch_size == (2, 4)
        assert data["next", "done"].squeeze(-1).tolist() == [[False, False, False, True], [False] * 4]
        assert env.statistics().steps_per_env == (4, 4)


@both
def test_it_goes_on_over_ends_and_never_mixes_episodes(make):
    with make(2, short_env, seed=0) as env:
        data = env.rollout(8, ones, break_when_any_done=False)
        assert data["observation"][..., 1].tolist() == [[0, 1, 2, 0, 1, 2, 0, 1]] * 2
        assert data["next", "observation"][..., 1].tolist() == [[1, 2, 3, 1, 2, 3, 1, 2]] * 2
        assert data["next", "done"].squeeze(-1).tolist() == [[False, False, True] * 2 + [False] * 2] * 2
        assert not data["done"].any()
        seeds = data["observation"][..., 0]
        assert torch.equal(seeds, data["next", "observation"][..., 0])
        assert len(seeds.unique()) == 6
        assert env.statistics().steps_per_env == (8, 8)
        assert env.statistics().resets_per_env == (3, 3)


@both
def test_it_begins_with_a_reset_or_where_the_envs_are(make):
    with make(2, long_env, seed=0) as env:
        assert env.rollout(3, ones)["observation"][:, 0, 1].tolist() == [0, 0]
        more = env.rollout(2, ones, auto_reset=False)
        assert more["observation"][..., 1].tolist() == [[3, 4]] * 2
        root = env.step(ones(env.current()))
        assert root["next", "observation"][:, 1].tolist() == [6, 6]
        assert env.rollout(1, ones)["observation"][:, 0, 1].tolist() == [0, 0]


@both
def test_what_else_the_policy_gives_is_kept(make):
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
def test_a_policy_that_returns_a_new_batch(make):
    with make(2, long_env, seed=0) as env:
        data = env.rollout(3, lambda _: env.rand_action())
    assert torch.equal(data["next", "observation"][..., 2], data["action"])


@both
def test_a_policy_without_an_action_stops_nobody_for_long(make):
    with make(2, long_env, seed=0) as env:
        with pytest.raises(ActionError, match=r"expected a key \('action',\)"):
            env.rollout(3, lambda td: td)
        assert env.rollout(3, ones)["observation"][:, -1, 1].tolist() == [2, 2]


@both
def test_the_callback_sees_every_step_and_may_use_the_executor(make):
    seen = []
    with make(2, long_env, seed=0) as env:
        env.rollout(3, ones, callback=lambda e, td: seen.append((e is env, td["action"].tolist(), len(e.render()))))
    assert seen == [(True, [1, 1], 2)] * 3


@both
def test_the_last_step_can_be_marked_truncated(make):
    with make(2, long_env, seed=0) as env:
        data = env.rollout(3, ones, set_truncated=True)
    assert data["next", "truncated"].squeeze(-1).tolist() == [[False, False, True]] * 2
    assert torch.equal(data["next", "done"], data["next", "truncated"])


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
def test_memory_that_nobody_holds_is_used_again():
    with ParallelEnv(2, functools.partial(CountingEnv, 1_000, size=64), num_workers=2) as env:
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
        child = threading.Thread(target=lambda: seen.append(in_child(lambda: (os.read(read, 1), held[0].tolist())[1])))
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
        monkeypatch.setattr(Lease, "is_open", property(lambda self: (held.clear(), is_open(self))[1]))
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
        filled = env.rollout(9, ones, out=mine)
        assert filled is mine
        assert mine["observation"][..., 1].tolist() == [[0, 1, 2, 3]] * 2


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


@both
def test_text_comes_along(make):
    with make(2, TextEnv, seed=0) as env:
        data = env.rollout(4, break_when_any_done=False)
        key = next(leaf.key for leaf in env.observation_spec if leaf.is_side)
        roots, nexts = data[key], data[("next", *key)]
        done = data["next", "done"].squeeze(-1)
        for i in range(2):
            for t in range(3):
                assert isinstance(roots[i][t], str)
                assert (roots[i][t + 1] == nexts[i][t]) == (not done[i, t])


@pytest.mark.parametrize(("steps", "message"), [(0, "at least 1"), (-3, "at least 1")])
def test_no_steps_is_no_rollout(steps, message):
    with SerialEnv(2, long_env) as env, pytest.raises(ValueError, match=message):
        env.rollout(steps)
