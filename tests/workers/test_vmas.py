"""VMAS: the rows of the real simulator, for any order of resets, and TorchRL's keys."""

from __future__ import annotations

from typing import Any

from tests.extras import skip_without

skip_without("vmas")

import numpy as np
import pytest
import torch
import vmas

from envherd.executor import ExecutorOptions, ParallelEnv, SerialEnv
from envherd.executor.testing import Contract
from envherd.workers.adapters.named import VmasFactory
from envherd.workers.adapters.simulators.vmas import VmasAdapter

pytestmark = pytest.mark.slow


def balance(num_rows: int = 4, **kwargs: Any) -> Any:
    return vmas.make_env("balance", num_envs=num_rows, max_steps=14, **kwargs)


def test_every_rule_holds():
    assert Contract(balance, num_steps=16).check_all().num_ends > 1


def test_envs_of_a_process_have_random_states_of_their_own():
    def still(td: Any) -> Any:
        return td.set(("agents", "action"), torch.zeros(*td.batch_size, 3, 2))

    with ParallelEnv(2, balance, num_workers=2, seed=4) as env:
        apart = env.rollout(20, still, break_when_any_done=False)
    with SerialEnv(2, balance, seed=4) as env:
        before = [np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
        together = env.rollout(20, still, break_when_any_done=False)
        assert [np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()] == before
    for key in apart.keys(include_nested=True, leaves_only=True):
        assert torch.equal(apart[key], together[key]), key


@pytest.mark.parametrize(
    ("scenario", "kwargs"),
    [
        ("balance", {}),
        ("simple_tag", {}),
        ("simple_speaker_listener", {}),
        ("balance", {"continuous_actions": False}),
    ],
)
def test_keys_and_shapes_are_those_of_torchrl(scenario, kwargs):
    from torchrl.envs.libs.vmas import VmasEnv

    from envherd.workers.adapters.torchrl.adapter import TorchRLAdapter

    theirs = TorchRLAdapter(VmasEnv(scenario, num_envs=3, categorical_actions=True, **kwargs)).spec
    ours = VmasAdapter(vmas.make_env(scenario, num_envs=3, **kwargs)).spec
    for name in ("observation", "action", "reward", "done"):
        mine = {leaf.key: (leaf.shape, leaf.dtype) for leaf in getattr(ours, name)}
        assert mine == {leaf.key: (leaf.shape, leaf.dtype) for leaf in getattr(theirs, name)}
    assert dict(ours.groups) == dict(theirs.groups)
    assert ours.metadata["group_map"] == theirs.metadata["group_map"]


@pytest.mark.parametrize(
    ("scenario", "kwargs"),
    [
        ("simple_speaker_listener", {}),
        ("simple_tag", {"continuous_actions": False}),
        ("navigation", {"continuous_actions": False, "multidiscrete_actions": True}),
        ("football", {"dict_spaces": True}),
    ],
)
def test_all_kinds_of_spaces_are_stepped(scenario, kwargs):
    def make_env() -> Any:
        return vmas.make_env(scenario, num_envs=3, max_steps=4, **kwargs)

    with SerialEnv(1, make_env, seed=0, options=ExecutorOptions(check_finite=True)) as env:
        data = env.rollout(6, break_when_any_done=False)
    assert data["next", "truncated"][0, :, :, 0].sum(0).tolist() == [1, 1, 1]


def test_an_end_is_terminated_or_out_of_time_and_may_be_both():
    with SerialEnv(1, balance, seed=0) as env:
        td = env.rollout(14, break_when_any_done=False)["next"]
    assert td["truncated"].any()
    assert torch.equal(td["done"], td["terminated"] | td["truncated"])


def test_scenarios_that_draw_when_they_are_built_are_seeded():
    kwargs = {"n_agents": 2}
    with SerialEnv(1, VmasFactory("balance", num_rows=2, max_steps=3), env_kwargs=kwargs, seed=0) as env:
        data = env.rollout(4, break_when_any_done=False)
        assert env.specs[0].metadata["agent_count"] == 2
    with SerialEnv(1, VmasFactory("balance", num_rows=2, max_steps=3), env_kwargs=kwargs, seed=0) as env:
        again = env.rollout(4, break_when_any_done=False)
    assert torch.equal(data["agents", "observation"], again["agents", "observation"])
