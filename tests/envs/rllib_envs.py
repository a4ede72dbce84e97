"""Envs of RLlib's tests: RLlib's own classes, each the same in a worker and in the caller's process."""

from __future__ import annotations

import os
import signal
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from ray.rllib.env.multi_agent_env import MultiAgentEnv

AGENTS = ("first", "second", "third")


class Corridor(gymnasium.Env):
    """Walks `config["length"]` cells; its infos identify its runner."""

    action_space = spaces.Discrete(2)

    def __init__(self, config: Any) -> None:
        self.length, self.runner = config["length"], config.get("runner", -1)
        self.observation_space = spaces.Box(-1, self.length + 1, (3,), np.float32)

    def _see(self) -> np.ndarray:
        return np.array([self.at, *self.np_random.uniform(-1, 1, 2)], np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        super().reset(seed=seed)
        self.at = self.steps = 0
        return self._see(), {"runner": self.runner}

    def step(self, action: int) -> Any:
        self.steps += 1
        self.at = max(0, self.at + (1 if action else -1))
        is_home = self.at == self.length
        return (
            self._see(),
            float(self.at),
            is_home,
            self.steps == 9 and not is_home,
            {"steps": self.steps},
        )


class _Agents(MultiAgentEnv):
    """Agents with spaces that differ."""

    def __init__(self, config: Any) -> None:
        self.possible_agents = self.agents = list(AGENTS)
        self.observation_spaces = {
            agent: spaces.Box(-9, 99, (2 + i,), np.float32)
            for i, agent in enumerate(self.possible_agents)
        }
        self.action_spaces = {
            "first": spaces.Discrete(3),
            "second": spaces.Box(-1, 1, (2,), np.float32),
            "third": spaces.Discrete(2),
        }
        super().__init__()
        self.length = config.get("length", 6)
        self.trap = config.get("trap")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        if seed is not None or not hasattr(self, "rng"):
            self.rng = np.random.default_rng(seed)
        self.t = 0
        seen = self._see(self.present())
        return seen, {agent: {"t": 0} for agent in seen}

    def present(self) -> tuple[str, ...]:
        """Return the agents with an observation now."""
        return AGENTS

    def _see(self, agents: Any) -> dict[str, np.ndarray]:
        shapes = {agent: self.observation_spaces[agent].shape for agent in agents}
        return {
            agent: self.rng.uniform(-1, 1, shape).astype(np.float32)
            for agent, shape in shapes.items()
        }

    def _tick(self, actions: dict[str, Any]) -> bool:
        self.t += 1
        if self.trap and self.t == 3 and not os.path.exists(self.trap):
            with open(self.trap, "w"):
                os.kill(os.getpid(), signal.SIGKILL)
        for agent, action in actions.items():
            assert self.action_spaces[agent].contains(action), (agent, action)
        return self.t == self.length


class Together(_Agents):
    """All agents act in every step; episodes are truncated."""

    def step(self, actions: dict[str, Any]) -> Any:
        assert set(actions) == set(AGENTS), actions
        is_over = self._tick(actions)
        rewards = {agent: self.t * (i + 1.0) for i, agent in enumerate(AGENTS)}
        infos = {agent: {"t": self.t} for agent in AGENTS} if self.t % 2 else {}
        return (
            self._see(AGENTS),
            rewards,
            {"__all__": False},
            {"__all__": is_over},
            infos,
        )


class Turns(_Agents):
    """Agents act in turn; each gets a reward whenever any has acted."""

    def present(self) -> tuple[str, ...]:
        return (AGENTS[self.t % 3],)

    def step(self, actions: dict[str, Any]) -> Any:
        assert set(actions) == set(self.present()), actions
        is_over = self._tick(actions)
        rewards = {
            agent: i + self.t / 8 for i, agent in enumerate(AGENTS[: 1 + self.t % 3])
        }
        return (
            self._see(self.present()),
            rewards,
            {"__all__": is_over},
            {"__all__": False},
            {},
        )


class Leaving(_Agents):
    """Starts with two agents; the first leaves after two steps, the third enters after three."""

    def present(self) -> tuple[str, ...]:
        return AGENTS[self.t >= 2 : 2 + (self.t >= 3)]

    def step(self, actions: dict[str, Any]) -> Any:
        before = self.present()
        assert set(actions) == set(before), actions
        is_over = self._tick(actions)
        seen = dict.fromkeys((*before, *self.present()))
        flags = {agent: agent == "first" and self.t == 2 for agent in seen}
        rewards = {agent: float(self.t) for agent in before}
        return (
            self._see(seen),
            rewards,
            {**flags, "__all__": is_over},
            {"__all__": False},
            {},
        )


class Nameless(Together):
    """Returns values of an agent that it has not named."""

    def step(self, actions: dict[str, Any]) -> Any:
        seen, rewards, *rest = super().step(actions)
        return seen, {**rewards, "fourth": 1.0}, *rest
