"""One env whose actions are faults, for every facade; workers import this module."""

import os
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from tests.gates import Gate

GOES_ON, RAISES, DIES, HANGS, WAITS = range(5)


class Faulty(gymnasium.Env[np.ndarray, Any]):
    """Observes its number of steps in the episode; its action says what goes wrong.

    Args:
        folder: of its gate; its resets raise while that has a file `broken`, or `wrecked`, which the next instance
            removes.
        size: of its observation.
    """

    action_space = spaces.Discrete(5)

    def __init__(self, folder: str, size: int = 1) -> None:
        self._folder, self._size, self.count = folder, size, 0
        self.observation_space = spaces.Box(0, 99, (size,), np.float32)
        Path(folder, "wrecked").unlink(missing_ok=True)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if (
            Path(self._folder, "broken").exists()
            or Path(self._folder, "wrecked").exists()
        ):
            raise ArithmeticError("no reset")
        self.count = 0
        return np.zeros(self._size, np.float32), {}

    def step(self, action: Any) -> Any:
        if action == RAISES:
            raise LookupError("no step")
        if action == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == HANGS:
            time.sleep(600)
        if action == WAITS:
            Gate(self._folder).pass_through()
        self.count += 1
        return np.full(self._size, self.count, np.float32), 1.0, False, False, {}


def raising(*_: Any) -> Any:
    raise LookupError("no such level")


def as_torchrl(*arguments: Any) -> Any:
    """Return it as a TorchRL env."""
    from torchrl.envs.libs.gym import GymWrapper

    return GymWrapper(Faulty(*arguments), categorical_action_encoding=True)


def as_pettingzoo(*arguments: Any) -> Any:
    """Return it as a PettingZoo env with one agent."""
    from pettingzoo import ParallelEnv

    class Alone(ParallelEnv):
        metadata: ClassVar[dict[str, Any]] = {"name": "alone"}
        render_mode = None
        possible_agents: ClassVar[list[str]] = ["agent"]

        def __init__(self) -> None:
            self.env = Faulty(*arguments)
            self.agents = ["agent"]

        def observation_space(self, agent: str) -> spaces.Space:
            return self.env.observation_space

        def action_space(self, agent: str) -> spaces.Space:
            return self.env.action_space

        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            return tuple(
                {"agent": value} for value in self.env.reset(seed=seed, options=options)
            )

        def step(self, actions: dict[str, Any]) -> Any:
            return tuple({"agent": value} for value in self.env.step(actions["agent"]))

    return Alone()
