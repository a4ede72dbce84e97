"""Random actions are legal, also if envs return a mask with each observation."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from envherd.executor import SerialEnv
from envherd.shm.specs import Box, LeafSpec
from envherd.workers.random_values import drawer
from tests.extras import needs


class Masked(gymnasium.Env):
    """Has `n` actions and allows two of them, which change from step to step, or none."""

    def __init__(self, n: int = 5, *, allows_none: bool = False) -> None:
        self.observation_space = spaces.Dict(
            {"action_mask": spaces.MultiBinary(n), "place": spaces.Box(0, 1, (1,))}
        )
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
            mask[
                [
                    self.num_steps % self.num_actions,
                    (self.num_steps + 2) % self.num_actions,
                ]
            ] = 1
        return {"action_mask": mask, "place": np.zeros(1, np.float32)}


def test_only_what_the_mask_allows_is_drawn_and_all_of_that():
    with SerialEnv(2, Masked, seed=0) as env:
        data = env.rollout(60, break_when_any_done=False)
        steps = data["action_mask"].to(torch.float).argmax(-1)
        assert data["action_mask"].bool().gather(-1, data["action"][..., None]).all()
        assert (
            len(
                set(
                    zip(
                        steps.flatten().tolist(),
                        data["action"].flatten().tolist(),
                        strict=True,
                    )
                )
            )
            > 5
        )
        without_roots = torch.cat([env.rand_action()["action"] for _ in range(50)])
    assert set(without_roots.tolist()) == set(range(5))


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


def test_action_0_is_drawn_if_the_mask_allows_none():
    with SerialEnv(1, lambda: Masked(allows_none=True), seed=0) as env:
        assert not env.rollout(5)["action"].any()


@needs("pettingzoo")
def test_masks_of_agents_hold_within_their_group():
    from tests.envs.pettingzoo_envs import Village

    with SerialEnv(2, Village, seed=0) as env:
        data = env.rollout(30, break_when_any_done=False)
    for group in ("wolf", "sheep"):
        assert not data[group, "action_mask"].all()
        assert (
            data[group, "action_mask"]
            .gather(-1, data[group, "action"][..., None])
            .all()
        )


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_seed_draws_the_same(seed):
    drawn = []
    for _ in range(2):
        with SerialEnv(2, Masked, seed=seed) as env:
            drawn.append(env.rollout(20)["action"])
    assert (drawn[0] == drawn[1]).all()


@pytest.mark.parametrize("env_ids", [[0, 2], [1], [2, 0, 1], None])
def test_unlike_envs_get_their_actions_in_any_batch(env_ids):
    with SerialEnv(3, [Masked, lambda: Masked(4), Masked], seed=0) as env:
        env.reset()
        td = env.rand_action(env.current(env_ids))
        for row in td.unbind(0):
            assert row["action_mask"][row["action"]] == 1
        if env_ids is None:
            td = env.rand_action(TensorDict({}, [3]))
            assert all(
                0 <= row["action"] < 4 + (i != 1) for i, row in enumerate(td.unbind(0))
            )


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint64"])
def test_the_whole_range_of_integers_is_drawn(dtype):
    limits = np.iinfo(dtype)
    draw = drawer(
        LeafSpec(
            ("action",),
            (4,),
            dtype,
            Box(np.array(limits.min, dtype), np.array(limits.max, dtype)),
        )
    )
    drawn = draw(np.random.default_rng(0), (200, 4))
    assert (drawn.dtype, drawn.shape) == (np.dtype(dtype), (200, 4))
    eighth = (int(limits.max) - int(limits.min)) // 8
    assert drawn.min() < limits.min + eighth
    assert drawn.max() > limits.max - eighth
    narrow = drawer(
        LeafSpec(
            ("action",),
            (),
            dtype,
            Box(np.array(limits.max - 1, dtype), np.array(limits.max, dtype)),
        )
    )
    assert set(narrow(np.random.default_rng(0), (50,)).tolist()) == {
        limits.max - 1,
        limits.max,
    }


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_whole_range_of_floats_is_drawn(dtype):
    limits = np.finfo(dtype)
    draw = drawer(
        LeafSpec(
            ("action",), (4,), dtype, Box(np.array(limits.min), np.array(limits.max))
        )
    )
    drawn = draw(np.random.default_rng(0), (200, 4))
    assert np.isfinite(drawn).all()
    assert drawn.min() < limits.min / 2
    assert drawn.max() > limits.max / 2


def test_bounds_may_be_missing_on_a_side():
    for low, high in ((-np.inf, 3.0), (250.0, np.inf), (-np.inf, np.inf)):
        draw = drawer(
            LeafSpec(("action",), (2,), "uint8", Box(np.array(low), np.array(high)))
        )
        drawn = draw(np.random.default_rng(0), (50, 2))
        assert max(low, 0) <= drawn.min()
        assert drawn.max() <= min(high, 255)
