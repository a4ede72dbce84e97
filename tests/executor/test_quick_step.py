"""A step with isolated generators and the short intake are equivalent to the plain ways."""

from __future__ import annotations

import functools

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from envherd.executor import ExecutorOptions, SerialEnv
from envherd.executor.batches.actions import GroupIntake
from envherd.shm.slab import Slab, plan_slab
from envherd.shm.specs import Discrete, EnvSpec, LeafSpec
from envherd.workers.testing import AgentsEnv, CountingEnv, TextEnv

NUM_ENVS = 3

ENVS = {
    "one leaf": functools.partial(CountingEnv, 3),
    "agents": AgentsEnv,
    "side values": TextEnv,
    "cartpole": functools.partial(gymnasium.make, "CartPole-v1", max_episode_steps=7),
}


def transitions(make_env, **options):
    """Return the data of 12 steps and two rollouts; `isolate_rng` swaps the global generators around every step."""
    with SerialEnv(NUM_ENVS, make_env, seed=3, options=ExecutorOptions(**options)) as env:
        root, seen = env.reset(), []
        for _ in range(12):
            td, root = env.step_and_maybe_reset(env.rand_action(root))
            seen.append(td.clone())
        seen += env.rollout(7, break_when_any_done=False).unbind(1)
        seen += env.rollout(5, auto_reset=False, break_when_any_done=False).unbind(1)
        statistics = env.statistics()
        return seen, (statistics.env_steps, statistics.resets)


@pytest.mark.parametrize("name", ENVS)
def test_plain_and_isolated_steps_agree(name):
    plain, plain_counts = transitions(ENVS[name])
    isolated, isolated_counts = transitions(ENVS[name], isolate_rng=True)
    assert plain_counts == isolated_counts
    assert any(bool(one["next", "done"].any()) for one in isolated)
    for ours, theirs in zip(plain, isolated, strict=True):
        assert set(ours.keys(include_nested=True)) == set(theirs.keys(include_nested=True))
        for key in ours.keys(include_nested=True, leaves_only=True):
            if isinstance(ours[key], torch.Tensor):
                assert torch.equal(ours[key], theirs[key]), key
            else:
                assert ours[key] == theirs[key], key


def batch(action):
    return TensorDict({"action": action}, [NUM_ENVS])


@pytest.fixture
def env():
    with SerialEnv(NUM_ENVS, functools.partial(CountingEnv, 50), seed=0) as env:
        env.reset()
        yield env


@pytest.mark.parametrize(
    "action",
    [
        torch.tensor([0, 1, 0]),
        torch.tensor([0, 1, 0], dtype=torch.int32),
        torch.tensor([0, 9, 1, 9, 0, 9])[::2],
        torch.nn.Parameter(torch.tensor([0.0, 1.0, 0.0])).detach().long(),
    ],
    ids=["plain", "int32", "strided", "from a parameter"],
)
def test_every_form_of_legal_actions_arrives(env, action):
    td = env.step(batch(action))
    assert td["next", "observation"][:, 2].tolist() == [0, 1, 0]


def test_side_inputs_are_not_passed_over():
    spec = EnvSpec(
        observation=(LeafSpec(("observation",), (1,), "float32"),),
        action=(LeafSpec(("action",), (), "int64", Discrete(2)), LeafSpec(("note",), (), "", is_side=True)),
        family="plain",
    )
    plan = plan_slab([spec, spec], num_workers=1, num_ring=2)
    intake = GroupIntake(Slab(plan, np.zeros(plan.nbytes, np.uint8)).groups[0], "strict")
    assert [leaf.key for leaf in intake.side_leaves] == [("note",)]
    assert not intake.take(TensorDict({"action": torch.tensor([0, 1])}, [2]))
