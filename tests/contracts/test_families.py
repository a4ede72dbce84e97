"""The contract on real envs of every family, through a bare block and through both executors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from envherd.workers.adapters.meltingpot_factory import MeltingPotFactory
from envherd.workers.testing import Contract, PartialResetContract
from tests.contracts.executor_batch import BATCHES


def cartpole() -> Any:
    import gymnasium

    return gymnasium.make("CartPole-v1")


def pendulum_of_five_steps() -> Any:
    import gymnasium

    return gymnasium.make("Pendulum-v1", max_episode_steps=5)


def taxi() -> Any:
    import gymnasium

    return gymnasium.make("Taxi-v4", max_episode_steps=7)


def nested_spaces() -> Any:
    """Return an env whose observations and actions are Dicts and Tuples of everything with a fixed shape."""
    import gymnasium
    import numpy as np
    from gymnasium import spaces

    class Nested(gymnasium.Env[Any, Any]):
        observation_space = spaces.Dict(
            {
                "place": spaces.Box(-1, 1, (2,), np.float64),
                "parts": spaces.Tuple((spaces.Discrete(3, start=1), spaces.MultiBinary(4))),
                "word": spaces.Text(8),
            }
        )
        action_space = spaces.Tuple((spaces.Discrete(4), spaces.Dict({"force": spaces.Box(-1, 1, (2,), np.float32)})))

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.num_steps, self.place = 0, self.np_random.uniform(-1, 1, 2)
            return self._observe(), {}

        def step(self, action: Any) -> Any:
            index, forces = action
            self.num_steps += 1
            self.place = np.clip(self.place + forces["force"], -1, 1)
            return self._observe(), float(index), self.num_steps == 4, bool(self.place[0] > 0.99), {}

        def _observe(self) -> Any:
            flags = self.np_random.integers(0, 2, 4, dtype=np.int8)
            return {"place": self.place, "parts": (1 + self.num_steps % 3, flags), "word": f"w{self.num_steps}"}

    return Nested()


def dm_control_cartpole() -> Any:
    from dm_control import suite

    return suite.load("cartpole", "swingup", task_kwargs={"time_limit": 0.1})


def pettingzoo_spread() -> Any:
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env(max_cycles=7)


def pettingzoo_village() -> Any:
    """Return an env whose agents leave and come back, have unlike spaces and action masks."""
    from tests.workers.pettingzoo_envs import Village

    return Village()


def torchrl_cartpole() -> Any:
    from torchrl.envs import GymEnv, StepCounter, TransformedEnv

    return TransformedEnv(GymEnv("CartPole-v1"), StepCounter(6))


@dataclass(frozen=True)
class Case:
    """One env, and how many steps show several of its episodes."""

    make_env: Callable[[], Any]
    num_steps: int = 60


CASES = {
    "gymnasium_cartpole": Case(cartpole),
    "gymnasium_pendulum": Case(pendulum_of_five_steps),
    "gymnasium_taxi": Case(taxi),
    "gymnasium_nested": Case(nested_spaces),
    "dm_control": Case(dm_control_cartpole),
    "pettingzoo_spread": Case(pettingzoo_spread, num_steps=20),
    "pettingzoo_village": Case(pettingzoo_village, num_steps=30),
    "torchrl": Case(torchrl_cartpole),
    "meltingpot": Case(
        MeltingPotFactory(
            "running_with_scissors_in_the_matrix__one_shot", keys=("RGB", "INVENTORY"), max_steps=3, deterministic=True
        ),
        num_steps=8,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", CASES)
def test_every_rule_holds(case: str, batch: str) -> None:
    report = Contract(CASES[case].make_env, num_steps=CASES[case].num_steps, make_batch=BATCHES[batch]).check_all()
    assert report.num_ends > 1


class TestCartPole(PartialResetContract):
    """As users write it."""

    num_steps = 60

    def make_env(self) -> Any:
        return cartpole()
