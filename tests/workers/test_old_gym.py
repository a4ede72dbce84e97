"""Envs of the API before Gymnasium: the package gym itself, and envs written like its older ones."""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest

from envherd.executor import ParallelEnv, SerialEnv, SpecError
from envherd.workers.adapters import OldGymFactory
from tests.extras import needs, skip_without


class OldWalk:
    """An env in the style of gym 0.21: a separate seed(), four values, no info from reset, spaces of any package."""

    metadata: ClassVar[dict[str, Any]] = {"render.modes": ["rgb_array"], "video.frames_per_second": 30}
    observation_space: Any = gymnasium.spaces.Box(-100, 100, (2,), np.float64)
    action_space: Any = gymnasium.spaces.Discrete(2)

    def __init__(self, length: int = 50, *, says_limit: bool = True) -> None:
        self.length, self.says_limit = length, says_limit
        self.seed(0)

    def seed(self, seed: int | None = None) -> list[Any]:
        self.rng = np.random.RandomState(seed)
        return [seed]

    def reset(self) -> np.ndarray:
        self.count, self.place = 0, self.rng.uniform(-1, 1)
        return np.array([self.place, 0.0])

    def step(self, action: int) -> Any:
        self.count += 1
        self.place += action - 0.5 + self.rng.uniform(-0.1, 0.1)
        is_out, is_late = abs(self.place) > 6, self.count == self.length
        info = {"TimeLimit.truncated": not is_out} if is_late and self.says_limit else {}
        return np.array([self.place, self.count]), np.float64(self.place), is_out or is_late, info

    def render(self, mode: str = "human") -> Any:
        assert mode == "rgb_array"
        return np.arange(60, dtype=np.uint8).reshape(4, 5, 3)


class OldWalkOfGymnasium(OldWalk, gymnasium.Env):
    """Claims to be a Gymnasium env, and is not."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return OldWalk.reset(self)


def of_gym(max_steps: int, *, is_old: bool) -> Any:
    """Return an env of the real package, through its own old API or its last."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        skip_without("old-gym")
        gym: Any = importlib.import_module("gym")
        env = gym.make("CartPole-v1", disable_env_checker=True, max_episode_steps=max_steps, render_mode="rgb_array")
        if is_old:
            env = gym.wrappers.StepAPICompatibility(env, output_truncation_bool=False)
    return env


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_old", [False, True])
def test_ends_are_those_of_gym(is_old: Any) -> None:
    """Truncated when gym's own fifth value says so, for both APIs."""
    with SerialEnv(2, OldGymFactory(of_gym), seed=0, env_kwargs={"max_steps": 12, "is_old": is_old}) as env:
        data = env.rollout(300, break_when_any_done=False)["next"]
        assert env.render()[0].shape == (400, 600, 3)
    lengths = data["truncated"].sum(), data["terminated"].sum()
    assert min(lengths) > 0
    is_far = (data["observation"][..., 2].abs() > 0.2095) | (data["observation"][..., 0].abs() > 2.4)
    assert (data["terminated"][..., 0] == is_far).all()


def test_horizons_of_fifty_steps() -> None:
    """Every cut is `truncated`, reported by the env or only by `horizon`; run in the executor's workers."""
    for factory in (OldGymFactory(OldWalk), OldGymFactory(functools.partial(OldWalk, says_limit=False), horizon=50)):
        with SerialEnv(2, factory, seed=0) as env:
            data = env.rollout(150, break_when_any_done=False)["next"]
            assert env.render()[1].shape == (4, 5, 3)
            env.set("length", 7)
            assert env.get("length") == [7, 7]
            env.reset()
            assert env.rollout(9)["next", "done"].sum() == 2
        at_limit = data["observation"][..., 1] == 50
        assert at_limit.any()
        is_out = data["observation"][..., 0].abs() > 6
        assert (data["truncated"][..., 0] == at_limit & ~is_out).all()
        assert (data["terminated"][..., 0] == is_out).all()


def test_without_a_horizon_a_silent_cut_is_an_end() -> None:
    with SerialEnv(1, OldGymFactory(functools.partial(OldWalk, length=5, says_limit=False)), seed=0) as env:
        data = env.rollout(5)["next"]
    assert data["terminated"][0, 4].item()


@needs("old-gym")
@pytest.mark.filterwarnings("ignore")
def test_spaces_of_gym_become_gymnasiums() -> None:
    from gym import spaces as old

    from envherd.workers.adapters.gymnasium.old_gym import as_gymnasium

    space = old.Dict(
        a=old.Box(-1, 1, (2, 3), np.float64),
        b=old.Tuple((old.Discrete(3, start=1), old.MultiDiscrete([2, 3]), old.MultiBinary(4))),
    )
    new: Any = as_gymnasium(space, "observation_space")
    assert isinstance(new, gymnasium.spaces.Dict)
    sample = space.sample()
    assert new.contains({"a": sample["a"], "b": tuple(sample["b"])})
    with pytest.raises(SpecError, match=r"expected a space of gym or gymnasium .* got builtins.NoneType"):
        as_gymnasium(None, "action_space")


@needs("old-gym")
@pytest.mark.slow
def test_an_id_of_gym_in_a_worker() -> None:
    with ParallelEnv(1, OldGymFactory("CartPole-v1"), num_workers=1, env_kwargs={"disable_env_checker": True}) as env:
        assert env.rollout(3)["observation"].shape == (1, 3, 4)
