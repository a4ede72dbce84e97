"""Envs for the tests of the Gymnasium facade, in a separate module so that workers do not import the tests."""

import time
import warnings
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import (
    Box,
    Dict,
    Discrete,
    Graph,
    MultiBinary,
    MultiDiscrete,
    OneOf,
    Sequence,
    Text,
    Tuple,
)

from tests.gates import Gate
from tests.gymnasium_versions import discrete


class Nested(gymnasium.Env):
    """Terminates or truncates after a few steps; returns large infos and new arrays."""

    observation_space = Dict(
        {
            "done": Box(-9, 9, (), np.float64),
            "state": Tuple((Discrete(9), Box(0, 255, (2, 2), np.uint8))),
        }
    )
    action_space = Dict({"a": Discrete(3, start=-1), "b": Box(-1, 1, (2,), np.float32)})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.limit = int(self.np_random.integers(2, 6))
        self.count = 0
        return self._observation(), {
            "limit": self.limit,
            "options": options,
            "seed": {"given": str(seed)},
            "final_info": {"limit": self.limit},
        }

    def step(self, action):
        self.count += 1
        is_over = self.count == self.limit
        info = {
            "action": action,
            "count": self.count,
            "nested": {"half": self.count / 2, "array": np.arange(2)},
        }
        if self.count == 1:
            info["rare"] = self
        reward = self.np_random.random() + float(action["b"][0]) + int(action["a"])
        return (
            self._observation(),
            reward,
            is_over and self.limit % 2 == 0,
            is_over and self.limit % 2 == 1,
            info,
        )

    def _observation(self):
        picture = self.np_random.integers(0, 256, (2, 2), dtype=np.uint8)
        return {"done": self.np_random.random(), "state": (self.count, picture)}

    def __eq__(self, other):
        return isinstance(other, Nested)

    __hash__ = None  # type: ignore[assignment]  # it cannot be hashed


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
    """Its reward is its action, and its info describes the action."""

    observation_space = Box(-9, 9, (1,), np.float32)
    action_space: gymnasium.Space = Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return (
            np.zeros(1, np.float32),
            float(action[0]),
            False,
            False,
            {"type": f"{type(action).__name__}"},
        )


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
    """Its observations show the arguments of its reset."""

    observation_space = Box(0, 1, (1,), np.float32)
    action_space = Discrete(2)

    def reset(self, **kwargs):
        return np.zeros(1, np.float32), {"kwargs": str(sorted(kwargs))}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, True, False, {}


class Reporting(gymnasium.Env):
    """Draws its infos: envs of one batch have other keys, or values of other types, in common with their resets."""

    observation_space = Box(0, 1, (1,), np.float32)
    action_space = Discrete(2)
    values: ClassVar[dict[str, Any]] = {
        "x": np.float64,
        "mixed": lambda value: [value, np.float32(value), f"{value}"][int(3 * value)],
        "flag": lambda value: value < 0.5,
        "array": lambda value: np.full(2, value),
        "text": str,
        "deep": lambda value: {"x": value, "text": str(value)},
    }

    def _info(self):
        keys = (list(self.values), ["x"], ["array", "x", "deep"], ["flag", "mixed"], [])
        chosen = keys[self.np_random.integers(len(keys))]
        return {key: self.values[key](self.np_random.random()) for key in chosen}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), self._info()

    def step(self, action):
        has_ended = self.np_random.random(2) < 0.2
        return np.ones(1, np.float32), 1.0, *map(bool, has_ended), self._info()


MAKES = {
    "cartpole": lambda: gymnasium.make("CartPole-v1"),
    "pendulum": lambda: gymnasium.make("Pendulum-v1", max_episode_steps=7),
    "nested": Nested,
    "reporting": Reporting,
}


class Odd(Exception):
    """A package's own exception, whose constructor takes two arguments."""

    def __init__(self, code, reason):
        super().__init__(code, reason)


ERRORS = {
    "value": ValueError("no"),
    "key": KeyError("k"),
    "odd": Odd(1, "100% odd"),
    "os": OSError(2, "gone"),
}


class Failing(gymnasium.Env):
    """Raises what `fails` names in its next step, or in its next reset if that is seeded 13; counts its steps."""

    observation_space = Box(0, 99, (1,), np.float32)
    action_space = Discrete(2)
    fails = ""

    def __init__(self):
        self.count = 0

    def reset(self, *, seed=None, options=None):
        if seed == 13:
            raise ERRORS[self.fails or "value"]
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        if self.fails:
            raise ERRORS[self.fails]
        self.count += 1
        return np.full(1, self.count, np.float32), 1.0, self.count == 3, False, {}

    def refuse(self):
        raise PermissionError("not today")


class Slow(Failing):
    """Takes `pause` seconds for a step, a reset and a nap; its steps wait at its gate, if it has one."""

    pause = 0.0
    gate: Gate | None = None

    def reset(self, *, seed=None, options=None):
        time.sleep(self.pause)
        return super().reset(seed=seed)

    def step(self, action):
        time.sleep(self.pause)
        if self.gate:
            self.gate.pass_through()
        return super().step(action)

    def nap(self):
        time.sleep(self.pause)
        return "rested"


class Custom(gymnasium.Space):
    """Text that begins with an s."""

    def sample(self, mask=None, probability=None):
        return f"s{self.np_random.integers(9)}"

    def contains(self, x):
        return isinstance(x, str) and x.startswith("s")

    def __eq__(self, other):
        return isinstance(other, Custom)

    __hash__ = None  # type: ignore[assignment]  # it cannot be hashed


SPACES = {
    "float16": Box(-1, 1, (2,), np.float16),
    "bool": Box(0, 1, (2,), np.bool_),  # type: ignore[arg-type]  # what Gymnasium takes
    "uint64": Box(0, 9, (1,), np.uint64),
    "discrete": Discrete(5, start=-2),
    "small": discrete(5, np.int8),
    "multi": MultiDiscrete([[2, 3], [4, 5]], start=[[1, 1], [-2, -2]]),  # type: ignore[list-item]  # what Gymnasium takes
    "binary": MultiBinary((2, 3)),
    "text": Text(5),
    "graph": Graph(Box(-1, 1, (2,)), Discrete(3)),
    "sequence": Sequence(Box(0, 1, (1,))),
    "stacked": Sequence(Box(0, 1, (1,)), stack=True),
    "one of": OneOf((Discrete(3), Box(0, 1, (2,)))),
    "nested": Dict(
        {
            "x": Tuple((Text(3), Dict({"y": Box(0, 1, ()), "action": Discrete(2)}))),
            "reward": Box(0, 1, (3,)),
        }
    ),
    "custom": Tuple((Custom(), Discrete(3))),
}


class Echo(gymnasium.Env):
    """Its observation is its action, which must be in its space."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012  # so declared by Gymnasium

    def __init__(self, space, render_mode=None):
        self.observation_space = self.action_space = space
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        self.action = action
        # Gymnasium's warnings about its own scalars.
        with warnings.catch_warnings(action="ignore"):
            assert action in self.action_space, action
        return action, 0, False, False, {}

    def render(self):
        return np.full((2, 2, 3), 7, np.uint8)


class WithActions(Echo):
    """Any observation space, and two actions."""

    def __init__(self, space):
        super().__init__(space)
        self.action_space = Discrete(2)
