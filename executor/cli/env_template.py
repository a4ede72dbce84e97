"""An env with its own interface, and the adapter and factory that envherd needs to run it.

Replace `MyEnv` by your env, describe it in `MyAdapter`, and build it in `make_env`. Then:

    envherd check env_template:make_env      # does it keep the rules that training relies on?
    envherd rollout env_template:make_env    # how fast is it?

A Gymnasium, PettingZoo, dm_env or TorchRL env needs no adapter: return it from `make_env`.
"""

import random
from typing import Any

import numpy as np

from envherd import Adapter, Discrete, EnvSpec, LeafSpec, register


class MyEnv:
    """A walk from 0 to a goal, in which a fifth of the steps go back by one."""

    def __init__(self, goal: int = 10) -> None:
        self.goal = goal
        self.position = 0
        self.random = random.Random()

    def begin(self, seed: int | None) -> None:
        """Start an episode at 0. A seed determines its random steps."""
        if seed is not None:
            self.random.seed(seed)
        self.position = 0

    def walk(self, direction: int) -> bool:
        """Make one step in a direction (-1, 0 or 1); return whether the goal is reached."""
        self.position += direction if self.random.random() < 0.8 else -1
        return self.position >= self.goal


class MyAdapter(Adapter):
    """Describes the observation and action of `MyEnv`, starts its episodes, and makes one step per call."""

    family = "my_env"

    def __init__(self, env: MyEnv) -> None:
        self.env = env
        self.num_steps = 0
        self.spec = EnvSpec(
            observation=(LeafSpec(("position",), (1,), "float32"),),
            action=(LeafSpec(("action",), (), "int64", Discrete(3)),),  # 0, 1 or 2
            family=self.family,
        )

    def reset(
        self,
        seed: int | None,
        options: Any = None,
        mask: Any = None,
    ) -> list[Any]:
        """Start an episode; return the observation, a value for each leaf of the spec.

        A seed determines this episode; with None, the env's generator continues. `options` come from the caller's
        `reset(options=...)`. `mask` is only for envs that are batches themselves.
        """
        self.num_steps = 0
        self.env.begin(seed)
        return self._observation()

    def step(self, action: list[Any]) -> tuple[list[Any], list[float], bool, bool]:
        """Make one step; return observation, rewards, terminated and truncated. Never reset here."""
        self.num_steps += 1
        is_there = self.env.walk(action[0] - 1)
        return self._observation(), [float(is_there)], is_there, self.num_steps == 100

    def _observation(self) -> list[Any]:
        return [np.array([self.env.position], np.float32)]


def make_env(**kwargs: Any) -> MyEnv:
    """Build one env; a worker calls this, with the keyword arguments of `env_kwargs` or `--env-kwargs`."""
    register(MyEnv, MyAdapter)
    return MyEnv(**kwargs)
