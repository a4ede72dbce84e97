"""Envs for the tests of the Gymnasium facade; a module of its own, so that workers need not import the tests."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Tuple


class Nested(gymnasium.Env):
    """Terminates or truncates after a few steps; says much; gives new arrays."""

    observation_space = Dict(
        {"done": Box(-9, 9, (), np.float64), "state": Tuple((Discrete(9), Box(0, 255, (2, 2), np.uint8)))}
    )
    action_space = Dict({"a": Discrete(3, start=-1), "b": Box(-1, 1, (2,), np.float32)})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.limit = int(self.np_random.integers(2, 6))
        self.count = 0
        return self._observation(), {"limit": self.limit, "options": options, "seed": {"given": str(seed)}}

    def step(self, action):
        self.count += 1
        is_over = self.count == self.limit
        info = {"action": action, "count": self.count, "nested": {"half": self.count / 2, "array": np.arange(2)}}
        if self.count == 1:
            info["rare"] = self
        reward = self.np_random.random() + float(action["b"][0]) + int(action["a"])
        return self._observation(), reward, is_over and self.limit % 2 == 0, is_over and self.limit % 2 == 1, info

    def _observation(self):
        picture = self.np_random.integers(0, 256, (2, 2), dtype=np.uint8)
        return {"done": self.np_random.random(), "state": (self.count, picture)}

    def __eq__(self, other):
        return isinstance(other, Nested)

    __hash__ = None


class Reusing(gymnasium.Env):
    """Writes every observation to the same array; ends every third step."""

    observation_space = Box(0, 9, (1,), np.float32)
    action_space = Discrete(2)

    def __init__(self):
        self.array = np.zeros(1, np.float32)

    def reset(self, *, seed=None, options=None):
        self.array[:] = 0
        return self.array, {}

    def step(self, action):
        self.array += 1
        return self.array, 0.0, bool(self.array[0] == 3), False, {}


class Precise(gymnasium.Env):
    """Its reward is its action, and its info says what it was given."""

    observation_space = Box(-9, 9, (1,), np.float32)
    action_space = Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), float(action[0]), False, False, {"type": f"{type(action).__name__}"}


class Horizon(gymnasium.Env):
    """Counts; its observation is the count, its episodes have 50 steps."""

    observation_space = Box(0, 50, (1,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        return np.full(1, self.count, np.float32), 1.0, False, self.count == 50, {}


class Particular(gymnasium.Env):
    """Tells how it was reset."""

    observation_space = Box(0, 1, (1,), np.float32)
    action_space = Discrete(2)

    def reset(self, **kwargs):
        return np.zeros(1, np.float32), {"kwargs": str(sorted(kwargs))}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, True, False, {}


MAKES = {
    "cartpole": lambda: gymnasium.make("CartPole-v1"),
    "pendulum": lambda: gymnasium.make("Pendulum-v1", max_episode_steps=7),
    "nested": Nested,
}
