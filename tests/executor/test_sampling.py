"""Random actions: legal ones, also where envs say with each observation which those are."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from envherd.executor import SerialEnv
from tests.workers.pettingzoo_envs import Village


class Masked(gymnasium.Env):
    """Has `n` actions and allows two of them, which change from step to step, or none."""

    def __init__(self, n: int = 5, *, allows_none: bool = False) -> None:
        self.observation_space = spaces.Dict({"action_mask": spaces.MultiBinary(n), "place": spaces.Box(0, 1, (1,))})
        self.action_space = spaces.Discrete(n)
        self.num_actions = n
        self.allows_none = allows_none

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.num_steps = 0
        return self._see(), {}

    def step(self, action: Any) -> Any:
        self.num_steps += 1
        return self._see(), 0.0, False, self.num_steps == 7, {}

    def _see(self) -> Any:
        mask = np.zeros(self.num_actions, np.int8)
        if not self.allows_none:
            mask[[self.num_steps % self.num_actions, (self.num_steps + 2) % self.num_actions]] = 1
        return {"action_mask": mask, "place": np.zeros(1, np.float32)}


def test_only_what_the_mask_allows_is_drawn_and_all_of_that():
    with SerialEnv(2, Masked, seed=0) as env:
        data = env.rollout(60, break_when_any_done=False)
        steps = data["action_mask"].to(torch.float).argmax(-1)
        assert data["action_mask"].bool().gather(-1, data["action"][..., None]).all()
        assert len(set(zip(steps.flatten().tolist(), data["action"].flatten().tolist(), strict=True))) > 5
        without_roots = torch.cat([env.rand_action()["action"] for _ in range(50)])
    assert set(without_roots.tolist()) == set(range(5))


def test_unlike_envs_have_their_own_masks():
    with SerialEnv(2, [Masked, lambda: Masked(4)], seed=0) as env:
        root = env.reset()
        for _ in range(20):
            root = env.rand_action(root)
            for i in range(2):
                assert root[i]["action_mask"][root[i]["action"]] == 1
            root = env.step_and_maybe_reset(root)[1]


@pytest.mark.parametrize("factories", [Masked, [Masked, lambda: Masked(4), Masked]])
def test_actions_of_some_envs_are_drawn_for_these(factories):
    with SerialEnv(3, factories, seed=0) as env:
        root, env_ids = env.reset(), torch.tensor([2, 1])
        for _ in range(20):
            env.send(env.rand_action(root))
            received = env.recv(env_ids=env_ids)
            assert received["env_ids"].tolist() == [2, 1]
            for i in range(2):
                assert received[i]["action_mask"][received[i]["action"]] == 1
            env.recv()
            env.send(env.rand_action(env.current(env_ids)))  # of these alone
            env.recv()
            root = env.current()


def test_where_nothing_is_allowed_action_0_is_drawn():
    with SerialEnv(1, lambda: Masked(allows_none=True), seed=0) as env:
        assert not env.rollout(5)["action"].any()


def test_masks_of_agents_hold_within_their_group():
    with SerialEnv(2, Village, seed=0) as env:
        data = env.rollout(30, break_when_any_done=False)
    for group in ("wolf", "sheep"):
        assert not data[group, "action_mask"].all()
        assert data[group, "action_mask"].gather(-1, data[group, "action"][..., None]).all()


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_seed_draws_the_same(seed):
    drawn = []
    for _ in range(2):
        with SerialEnv(2, Masked, seed=seed) as env:
            drawn.append(env.rollout(20)["action"])
    assert (drawn[0] == drawn[1]).all()
