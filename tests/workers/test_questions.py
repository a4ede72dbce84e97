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


@pytest.mark.parametrize(
    ("name", "value", "expected", "elsewhere"),
    [
        ("unwrapped.length", [0.25, 0.75], [0.25, 0.75], "__dict__"),
        ("mark", 3, [3, 3], "unwrapped.__dict__"),
    ],
)
def test_an_attribute_is_set_on_the_env_of_its_path_alone(
    env, name, value, expected, elsewhere
):
    """A plain name is that of the outermost wrapper."""
    env.set(name, value)
    assert env.get(name) == expected
    assert env.call(f"{elsewhere}.__contains__", name) == [False, False]


def test_a_path_that_there_is_not_names_the_env(env):
    with pytest.raises(EnvError, match="nowhere"):
        env.set("nowhere.length", 1)
