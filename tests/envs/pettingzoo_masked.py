"""A PettingZoo env whose agents have action masks; imported by workers."""

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv


class MaskedAgents(ParallelEnv):
    """Forbids action `(step + number of the agent) % 4`; an illegal action costs 10, a legal one gives 1."""

    metadata: ClassVar[dict[str, Any]] = {"name": "masked"}
    render_mode = None
    possible_agents: ClassVar[list[str]] = ["agent_0", "agent_1"]

    def __init__(self):
        self.agents = []

    def observation_space(self, agent):
        seen = spaces.Box(-1, 1, (2,), np.float32)
        return spaces.Dict(
            {"observation": seen, "action_mask": spaces.Box(0, 1, (4,), np.int8)}
        )

    def action_space(self, agent):
        return spaces.Discrete(4)

    def reset(self, seed=None, options=None):
        self.num_steps = 0
        self.agents = list(self.possible_agents)
        return self.see(), {agent: {"name": agent} for agent in self.agents}

    def step(self, actions):
        legal = {
            agent: bool(seen["action_mask"][actions[agent]])
            for agent, seen in self.see().items()
        }
        self.num_steps += 1
        is_over = self.num_steps == 4
        if is_over:
            self.agents = []
        return (
            self.see(),
            {agent: 1.0 if is_legal else -10.0 for agent, is_legal in legal.items()},
            dict.fromkeys(legal, is_over),
            dict.fromkeys(legal, False),
            {agent: {"was_illegal": not is_legal} for agent, is_legal in legal.items()},
        )

    def see(self):
        return {
            agent: {
                "observation": np.array([self.num_steps / 10, i], np.float32),
                "action_mask": (np.arange(4) != (self.num_steps + i) % 4).astype(
                    np.int8
                ),
            }
            for i, agent in enumerate(self.possible_agents)
        }


class Alone(MaskedAgents):
    """The same with one agent."""

    possible_agents: ClassVar[list[str]] = ["agent_0"]


class Named(MaskedAgents):
    """The same with agents of two names."""

    possible_agents: ClassVar[list[str]] = ["wolf_0", "sheep_0"]
