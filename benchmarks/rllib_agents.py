"""Three agents that do nothing, as an env of RLlib."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from ray.rllib.env.multi_agent_env import MultiAgentEnv


class ThreeAgents(MultiAgentEnv):
    """Three agents with four numbers each, in episodes of 20 steps."""

    def __init__(self, _context: Any = None) -> None:
        super().__init__()
        self.agents = self.possible_agents = ["a", "b", "c"]
        self.observation_spaces = {agent: Box(-1, 1, (4,), np.float32) for agent in self.agents}
        self.action_spaces = {agent: Discrete(2) for agent in self.agents}

    def _observed(self) -> dict[str, np.ndarray]:
        return {agent: np.zeros(4, np.float32) for agent in self.agents}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode."""
        del seed, options
        self.steps = 0
        return self._observed(), {}

    def step(self, _actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """Return the same observations and rewards as always."""
        self.steps += 1
        done = dict.fromkeys((*self.agents, "__all__"), self.steps >= 20)
        return self._observed(), dict.fromkeys(self.agents, 1.0), dict.fromkeys(done, False), done, {}
