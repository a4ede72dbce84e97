"""The Gymnasium adapter on real Gymnasium envs, compared with the same envs driven by hand."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from envherd.shm.specs import Discrete, EnvSpec, LeafSpec
from envherd.workers import plain
from envherd.workers.adapters.gymnasium.adapter import GymnasiumAdapter
from envherd.workers.errors import SpecError
from tests.extras import needs
from tests.workers.adapter_values import stored


class Scripted(gymnasium.Env):
    """Returns scripted results from `step` and `reset`."""

    observation_space: spaces.Space = spaces.Box(-1, 1, (2,), np.float32)
    action_space: spaces.Space = spaces.Discrete(2)

    def __init__(self, answer: Any = None, first: Any = ([0.0, 0.0], {})) -> None:
        self.answer = answer
        self.first = first
        self.resets: list[dict[str, Any]] = []

    def reset(self, **kwargs: Any) -> Any:
        self.resets.append(kwargs)
        return self.first

    def step(self, action: Any) -> Any:
        return self.answer


def answering(**answer: Any) -> Scripted:
    """Return an env with a normal step except for `answer`."""
    usual = {
        "observation": np.zeros(2, np.float32),
        "reward": 0.0,
        "terminated": False,
        "truncated": False,
        "info": {},
    }
    return Scripted(tuple((usual | answer).values()))


def scripted(**answer: Any) -> GymnasiumAdapter:
    return GymnasiumAdapter(answering(**answer))


def test_spec_of_cartpole():
    spec = GymnasiumAdapter(gymnasium.make("CartPole-v1", render_mode="rgb_array")).spec
    assert [(leaf.key, leaf.shape, leaf.dtype) for leaf in spec.observation] == [
        (("observation",), (4,), "float32")
    ]
    assert spec.action == (LeafSpec(("action",), (), "int64", Discrete(2)),)
    assert spec.reward == (LeafSpec(("reward",), (1,), "float32"),)
    assert [leaf.key for leaf in spec.done] == [
        ("done",),
        ("terminated",),
        ("truncated",),
    ]
    assert spec.family == "gymnasium"
    assert spec.metadata == {
        "env_id": "CartPole-v1",
        "render_mode": "rgb_array",
        "render_fps": 50,
    }
    assert EnvSpec.from_plain(plain.decode(plain.encode(spec.to_plain()))) == spec


def test_autoreset_wrapper_changes_nothing():
    adapter = GymnasiumAdapter(
        gymnasium.wrappers.Autoreset(gymnasium.make("CartPole-v1"))
    )
    plainly = GymnasiumAdapter(gymnasium.make("CartPole-v1"))
    for seed in (1, 2):
        np.testing.assert_equal(adapter.reset(seed), plainly.reset(seed))
        terminated = False
        while not terminated:
            *wrapped, terminated, _ = adapter.step([1])
            np.testing.assert_equal(wrapped, plainly.step([1])[:2])


def test_observation_is_the_env_s_own_array():
    buffer = np.zeros(2, np.float32)
    assert scripted(observation=buffer).step([0])[0][0] is buffer


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (1, 1.0),
        (True, 1.0),
        (np.True_, 1.0),
        (np.float64(0.25), 0.25),
        (np.float32(0.25), 0.25),
        (np.int32(-3), -3.0),
        (np.array(2.5), 2.5),
        (np.array([2.5]), 2.5),
        ([0.5], 0.5),
    ],
)
def test_reward_becomes_a_float(reward, expected):
    adapter = scripted(reward=reward)
    value = adapter.step([0])[1]
    assert type(value[0]) is float
    assert stored(adapter.spec.reward, value)["reward",] == [expected]


def test_several_rewards_need_a_reward_space():
    def make():  # like multi-agent envs with Gymnasium's methods (lbforaging, rware)
        return Scripted((np.zeros(2, np.float32), [0.5, 2], False, False, {}))

    adapter = GymnasiumAdapter(make())
    adapter.reset(0)
    with pytest.raises(
        SpecError,
        match=r"got list of float64 \(2,\).*env\.unwrapped\.reward_space = .*COUNT",
    ) as error:
        adapter.step([0])
    env = gymnasium.wrappers.TimeLimit(make(), 10)
    exec(
        str(error.value).rpartition(": ")[2].rstrip(".").replace("COUNT", "2"),
        {**globals(), "numpy": np, "env": env},
    )
    adapter = GymnasiumAdapter(env)
    adapter.reset(0)
    assert stored(adapter.spec.reward, adapter.step([0])[1])["reward",].tolist() == [
        0.5,
        2.0,
    ]


BOOLS = [
    True,
    False,
    np.True_,
    np.False_,
    np.array([True]).reshape(()),
    np.array([False]),
    torch.tensor([False]),
]
NUMBERS = [
    0,
    1,
    1.0,
    -0.0,
    np.int8(1),
    np.uint8(0),
    np.float32(1),
    np.array(1),
    np.array([[1.0]]),
    torch.tensor(1),
]


@pytest.mark.parametrize("flag", BOOLS + NUMBERS, ids=repr)
@pytest.mark.parametrize("name", ["terminated", "truncated"])
def test_flags_become_bools(name, flag):
    flags = dict(
        zip(
            ("terminated", "truncated"),
            scripted(**{name: flag}).step([0])[2:],
            strict=True,
        )
    )
    assert flags.pop(name) is bool(flag)
    assert list(flags.values()) == [False]


def test_an_exception_of_the_env_comes_through():
    class Failing(Scripted):
        def step(self, action):
            raise ValueError("not enough values to unpack")

    with pytest.raises(ValueError, match="not enough values") as caught:
        GymnasiumAdapter(Failing()).step([0])
    assert not isinstance(caught.value, SpecError)


def test_reset_hands_over_the_seed_and_a_copy_of_the_options():
    env = Scripted()
    adapter = GymnasiumAdapter(env)
    assert adapter.info == {}
    options = {"options": {"level": [1]}}
    adapter.reset(7, options)
    adapter.reset(None)
    adapter.reset(None, {})
    assert env.resets == [
        {"seed": 7, "options": {"level": [1]}},
        {"seed": None, "options": None},
        {"seed": None, "options": None},
    ]
    env.resets[0]["options"].pop("level").append(2)
    assert options == {"options": {"level": [1]}}


@needs("box2d")
def test_render():
    drawing = GymnasiumAdapter(gymnasium.make("FrozenLake-v1", render_mode="rgb_array"))
    drawing.reset(0)
    picture = drawing.render()
    assert picture.dtype == np.uint8
    assert picture.ndim == 3
    assert picture.any()
    drawing.close()
    talking = GymnasiumAdapter(gymnasium.make("FrozenLake-v1", render_mode="ansi"))
    talking.reset(0)
    assert talking.render() is None


def test_state_dict_of_an_env_that_has_one():
    class Saving(Scripted):
        def state_dict(self):
            return {"at": 3}

        def load_state_dict(self, state):
            self.loaded = state

    env = Saving()
    adapter = GymnasiumAdapter(gymnasium.wrappers.TimeLimit(env, 5))
    adapter.load_state_dict(adapter.state_dict())
    assert env.loaded == {"at": 3}
    with pytest.raises(ValueError, match="expected what state_dict"):
        GymnasiumAdapter(Scripted()).load_state_dict({})
