"""Branches of real envs: 50 steps, a branch, 100 steps with equal actions, and equal bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
import torch

from envherd.executor import ParallelEnv

pytestmark = pytest.mark.slow


def make_gymnasium(name: str, package: str) -> Any:
    pytest.importorskip(package)
    return functools.partial(_make_gymnasium, name, package)


def _make_gymnasium(name: str, package: str) -> Any:
    __import__(package)
    return gymnasium.make(name)


def make_control(domain: str, task: str) -> Any:
    suite = pytest.importorskip("dm_control.suite")
    return functools.partial(suite.load, domain, task)


def make_meltingpot(name: str) -> Any:
    pytest.importorskip("meltingpot")
    from envherd import MeltingPotFactory

    return MeltingPotFactory(name, deterministic=True)


def make_torchrl() -> Any:
    pytest.importorskip("torchrl")
    return _make_torchrl


def _make_torchrl() -> Any:
    from torchrl.envs import GymEnv

    return GymEnv("Pendulum-v1")


def make_vmas() -> Any:
    pytest.importorskip("vmas")
    return _make_vmas


def _make_vmas() -> Any:
    import vmas

    return vmas.make_env("balance", num_envs=4, seed=0)


FAMILIES: dict[str, Callable[[], Any]] = {
    "CartPole": functools.partial(make_gymnasium, "CartPole-v1", "gymnasium"),
    "LunarLander": functools.partial(make_gymnasium, "LunarLander-v3", "Box2D"),
    "HalfCheetah": functools.partial(make_gymnasium, "HalfCheetah-v5", "mujoco"),
    "Pong": functools.partial(make_gymnasium, "ALE/Pong-v5", "ale_py"),
    "MiniGrid": functools.partial(make_gymnasium, "MiniGrid-DoorKey-8x8-v0", "minigrid"),
    "TorchRL": make_torchrl,
    "VMAS": make_vmas,
    "dm_control": functools.partial(make_control, "cheetah", "run"),
    "commons_harvest": functools.partial(make_meltingpot, "commons_harvest__open"),
    "coins": functools.partial(make_meltingpot, "coins"),
    "clean_up": functools.partial(make_meltingpot, "clean_up"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_copies_return_equal_bytes(name):
    num_equal = 0
    with ParallelEnv(3, FAMILIES[name](), num_workers=3, seed=3) as env:
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
