"""The SB3 facade returns the transitions of SB3's own `DummyVecEnv`, bit for bit, and invents none."""

import functools
from contextlib import closing

from tests.extras import skip_without

skip_without("sb3")

import numpy as np
import pytest
from gymnasium.spaces import Discrete
from stable_baselines3.common.vec_env import DummyVecEnv

from envherd.sb3 import SubprocVecEnv
from tests.envs.sb3_envs import SPACES, SampledEnv, make_cartpole, make_short_cartpole

TWO_WORKERS = functools.partial(SubprocVecEnv, num_workers=2)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*precision lowered"),
]


def same(one, other):
    """Assert that two values have the same structure, types of arrays, dtypes and bits."""
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, (tuple, list)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            same(mine, theirs)
    else:
        # Not a scalar for an array of shape ().
        assert isinstance(one, np.ndarray) == isinstance(other, np.ndarray)
        one, other = np.asarray(one), np.asarray(other)
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes() or np.array_equal(one, other)


def play(make, env_fns, num_steps):
    """Return all outputs of a vec env over some random steps, and the number of ends of each kind."""
    with closing(make(env_fns)) as env:
        returned = [(str(env.observation_space), str(env.action_space))]
        env.seed(5)
        returned.append((env.reset(), list(env.reset_infos)))
        space = env.action_space
        is_stacked = bool(space.shape) or isinstance(space, Discrete)
        space.seed(11)
        ends = {"terminated": 0, "truncated": 0}
        for _ in range(num_steps):
            actions = [space.sample() for _ in env_fns]
            obs, rewards, dones, infos = env.step(
                np.stack(actions) if is_stacked else actions
            )
            returned.append(
                (
                    obs,
                    rewards,
                    dones,
                    [dict(sorted(info.items())) for info in infos],
                    list(env.reset_infos),
                )
            )
            for done, info in zip(dones, infos, strict=True):
                assert ("terminal_observation" in info) == done
                ends["truncated" if info["TimeLimit.truncated"] else "terminated"] += (
                    bool(done)
                )
        return returned, ends


def test_equals_sb3_on_cartpole_with_ends_of_both_kinds():
    env_fns = [make_cartpole, make_short_cartpole, make_cartpole]
    expected, ends = play(DummyVecEnv, env_fns, 120)
    found, _ = play(TWO_WORKERS, env_fns, 120)
    assert ends["terminated"] > 3
    assert ends["truncated"] > 3
    same(found, expected)


@pytest.mark.parametrize("space", SPACES)
def test_equals_sb3_in_every_space(space):
    """Of observations and of actions, which the env asserts to be in its space."""
    env_fns = [
        functools.partial(SampledEnv, space, length, space) for length in (3, 4, 5)
    ]
    expected, ends = play(DummyVecEnv, env_fns, 30)
    found, _ = play(TWO_WORKERS, env_fns, 30)
    assert min(ends.values()) > 1
    same(found, expected)
