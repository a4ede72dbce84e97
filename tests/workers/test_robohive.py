"""Envs of RoboHive's class keep the contract, and give the same data as when driven by hand."""

from __future__ import annotations

import importlib.util
import warnings

import pytest

from tests.extras import skip_without

skip_without("mujoco")
if importlib.util.find_spec("robohive") is None:
    pytest.skip("needs RoboHive 0.7: tests/workers/robohive_cart.py says how", allow_module_level=True)

import torch

from envherd.executor import ParallelEnv
from envherd.workers.testing import Contract

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tests.workers.robohive_cart import LIMIT, make_cart

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_keeps_the_contract():
    report = Contract(make_cart, num_steps=110).check_all()
    assert report.num_ends > 1


def as_tensor(observation):
    return torch.as_tensor(observation, dtype=torch.float32)


def test_an_episode_is_that_of_an_env_driven_by_hand():
    plain = make_cart()
    with ParallelEnv(1, make_cart, num_workers=1, seed=0) as env:
        root = env.reset(seed=[5])
        observation, _ = plain.reset(seed=5)
        has_ended = False
        while not has_ended:
            assert torch.equal(root["observation"][0], as_tensor(observation))
            root["action"] = torch.full((1, 1), 0.5)
            td, root = env.step_and_maybe_reset(root)
            observation, reward, terminated, truncated, _ = plain.step(td["action"][0].numpy())
            following = td["next"]
            assert torch.equal(following["observation"][0], as_tensor(observation))
            assert following["reward"].item() == pytest.approx(reward)
            assert (following["terminated"].item(), following["truncated"].item()) == (terminated, truncated)
            has_ended = terminated or truncated
        assert terminated
        assert abs(observation[0]) > LIMIT
