"""Gymnasium envs for the tests of the SB3 facade; imported by workers, so without Stable-Baselines3."""

import copy
import os
import signal
import sys

import gymnasium
import numpy as np
from gymnasium import spaces

BOX = spaces.Box(-1e6, 1e6, (3,), np.float32)
SPACES = {
    "box": BOX,
    "discrete": spaces.Discrete(7),
    "discrete from 3": spaces.Discrete(7, start=3),
    "multi-discrete": spaces.MultiDiscrete([4, 5]),
    "multi-discrete from 2": spaces.MultiDiscrete([4, 5], start=[2, 0]),
    "multi-binary": spaces.MultiBinary(3),
    "scalar box": spaces.Box(-10.0, 10.0, (), np.float64),
    "image": spaces.Box(0, 255, (4, 5, 3), np.uint8),
    "dict": spaces.Dict(
        {
            "reward": BOX,
            "action": spaces.Discrete(4),
            "state": spaces.Box(0, 255, (2, 2), np.uint8),
        }
    ),
    "dict of scalars": spaces.Dict(
        {"z": spaces.Box(-1.0, 1.0, ()), "a": spaces.Discrete(3)}
    ),
    "tuple": spaces.Tuple((spaces.Discrete(4), BOX)),
}


class SampledEnv(gymnasium.Env):
    """Observes samples of any space; ends after `length` steps, `terminated` in even episodes, else `truncated`."""

    def __init__(
        self, space="box", length=5, action_space="discrete", render_mode="rgb_array"
    ):
        self.observation_space = copy.deepcopy(SPACES[space])
        self.action_space = copy.deepcopy(SPACES[action_space])
        self.length = length
        self.render_mode = render_mode
        self.episode = -1
        self.given = []
        self.colour = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.given.append((seed, options))
        self.episode += 1
        self.num_steps = 0
        return self.observation_space.sample(), {"episode": self.episode, "seed": seed}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.num_steps += 1
        is_over = self.num_steps == self.length
        info = {
            "num_steps": self.num_steps,
            "array": np.arange(2),
            "TimeLimit.truncated": "overwritten",
        }
        both = (is_over and self.episode % 2 == 0, is_over and self.episode % 3 != 0)
        return (
            self.observation_space.sample(),
            float(self.np_random.random()),
            *both,
            info,
        )

    def render(self):
        return (
            np.full((2, 3, 3), self.colour, np.uint8)
            if self.render_mode == "rgb_array"
            else None
        )

    def add(self, one, *, other=0):
        return one + other + self.colour

    def loaded(self, *names):
        return [name for name in names if name in sys.modules]


class FailingEnv(SampledEnv):
    """Raises in its third step overall."""

    num_calls = 0

    def step(self, action):
        self.num_calls += 1
        if self.num_calls == 3:
            raise LookupError("the third step")
        return super().step(action)


class Tagged(gymnasium.Wrapper):
    """A wrapper for `env_is_wrapped`."""


def return_it(env):
    return env


def make_tagged():
    return Tagged(SampledEnv())


class SharingEnv(SampledEnv):
    """Keeps what its function captured."""

    def __init__(self, captured):
        super().__init__()
        self.captured = captured

    def note(self, what):
        self.captured.append(what)
        return list(self.captured)


class DyingEnv(SampledEnv):
    """Its process is killed by action 6."""

    def step(self, action):
        if action == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def make_cartpole(max_episode_steps=25):
    return gymnasium.make("CartPole-v1", max_episode_steps=max_episode_steps)


def make_short_cartpole():
    return make_cartpole(9)


class SilentMaskedEnv(gymnasium.Env):
    """Forbids action `step % 4`, with the mask in its infos; an illegal action costs 10, a legal one gives 1."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(4)

    def __init__(self, length=4):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.num_steps = 0
        return self.see(), {"action_mask": self.mask()}

    def step(self, action):
        is_illegal = not self.mask()[action]
        self.num_steps += 1
        info = {"action_mask": self.mask(), "was_illegal": bool(is_illegal)}
        return (
            self.see(),
            -10.0 if is_illegal else 1.0,
            self.num_steps == self.length,
            False,
            info,
        )

    def see(self):
        return np.array([self.num_steps / 10, 1], np.float32)

    def mask(self):
        return np.arange(4) != self.num_steps % 4


class MaskedEnv(SilentMaskedEnv):
    """The same with the method that sb3-contrib looks for."""

    def action_masks(self):
        return self.mask()
