"""Branches of real envs: 50 steps, a branch, 100 steps with equal actions, and equal bytes."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
import torch

from envherd.executor import MeltingPotFactory, ParallelEnv
from tests.extras import needs

#: Imported once by a helper, rather than by each worker.
PRELOADED = tuple(
    name
    for name in (
        "Box2D",
        "mujoco",
        "ale_py",
        "minigrid",
        "torchrl.envs",
        "dm_control.suite",
        "meltingpot.substrate",
    )
    if importlib.util.find_spec(name.partition(".")[0]) is not None
)
pytestmark = [pytest.mark.slow, pytest.mark.preloads(*PRELOADED)]


def make_gymnasium(name: str, package: str) -> Any:
    __import__(package)
    return gymnasium.make(name)


def make_control(domain: str, task: str) -> Any:
    from dm_control import suite

    return suite.load(domain, task)


def make_torchrl() -> Any:
    from torchrl.envs import GymEnv

    return GymEnv("Pendulum-v1")


#: Family -> its factory, and the extra that it needs.
FAMILIES: dict[str, tuple[Callable[[], Any], str]] = {
    "CartPole": (
        functools.partial(make_gymnasium, "CartPole-v1", "gymnasium"),
        "gymnasium",
    ),
    "LunarLander": (
        functools.partial(make_gymnasium, "LunarLander-v3", "Box2D"),
        "box2d",
    ),
    "HalfCheetah": (
        functools.partial(make_gymnasium, "HalfCheetah-v5", "mujoco"),
        "mujoco",
    ),
    "Pong": (functools.partial(make_gymnasium, "ALE/Pong-v5", "ale_py"), "atari"),
    "MiniGrid": (
        functools.partial(make_gymnasium, "MiniGrid-DoorKey-8x8-v0", "minigrid"),
        "minigrid",
    ),
    "TorchRL": (make_torchrl, "torchrl"),
    "dm_control": (functools.partial(make_control, "cheetah", "run"), "dm-control"),
    "commons_harvest": (
        MeltingPotFactory("commons_harvest__open", deterministic=True),
        "meltingpot",
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=needs(extra)) for name, (_, extra) in FAMILIES.items()],
)
@pytest.mark.long
def test_copies_return_equal_bytes(name):
    num_equal = 0
    with ParallelEnv(3, FAMILIES[name][0], num_workers=3, seed=3) as env:
        td = env.reset()
        for _ in range(50):
            td = env.step_and_maybe_reset(env.rand_action(td))[1]
        env.branch(0, [1, 2])
        for step in range(100):
            root = env.current()
            assert_equal_rows(root)
            actions = env.rand_action(root)
            for row in (1, 2):
                actions[row] = actions[0].clone()
            data = env.step(actions)["next"]
            assert_equal_rows(data)
            num_equal = step + 1
            if data["done"].any():  # the next episodes differ
                break
    assert num_equal > 5


def assert_equal_rows(td: Any) -> None:
    for key in td.keys(include_nested=True, leaves_only=True):
        assert all(torch.equal(td[key][0], td[key][row]) for row in (1, 2)), key
