"""Attributes of envs: reading, setting and calling by dotted names, through Gymnasium's wrappers."""

from typing import Any

import gymnasium
import pytest

from envherd.executor import EnvError, SerialEnv


def make_cartpole() -> Any:
    env: Any = gymnasium.make("CartPole-v1")
    env.unwrapped.length = 0.5
    return env


@pytest.fixture
def env():
    with SerialEnv(2, make_cartpole, seed=0) as env:
        env.reset()
        yield env


def test_an_attribute_of_the_inner_env_is_set_there(env):
    env.set("unwrapped.length", [0.25, 0.75])
    assert env.get("unwrapped.length") == [0.25, 0.75]
    assert env.call("__dict__.__contains__", "unwrapped.length") == [False, False]


def test_a_plain_name_is_set_on_the_outermost_wrapper(env):
    env.set("mark", 3)
    assert env.get("mark") == [3, 3]
    assert env.call("unwrapped.__dict__.__contains__", "mark") == [False, False]


def test_a_path_that_there_is_not_names_the_env(env):
    with pytest.raises(EnvError, match="nowhere"):
        env.set("nowhere.length", 1)
