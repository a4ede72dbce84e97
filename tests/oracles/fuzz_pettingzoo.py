"""The fuzzers' PettingZoo env, and its batch with the methods of the Gymnasium facade."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from envherd.executor import ExecutorOptions
from envherd.pettingzoo import ParallelVectorEnv
from tests.oracles.fuzz_facades import GymnasiumFuzzEnv

#: The agent that plays the env, and one that is absent in every third step.
PILOT, VISITOR = "pilot", "visitor"
_T = 4  # where a row has its step


def is_visiting(t: Any) -> Any:
    """Return whether the visitor is there after step t."""
    return t % 3 != 2


class PettingZooFuzzEnv(ParallelEnv):
    """A `FuzzEnv` with two agents."""

    metadata: ClassVar[dict[str, Any]] = {"name": "fuzz"}
    render_mode = None
    possible_agents: ClassVar[list[str]] = [PILOT, VISITOR]

    def __init__(self, *arguments: Any) -> None:
        self.env = GymnasiumFuzzEnv(*arguments)
        self.agents: list[str] = []
        self.where, self.echo, self.close = (
            self.env.where,
            self.env.echo,
            self.env.close,
        )

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        """Return an agent's space."""
        return (
            self.env.observation_space
            if agent == PILOT
            else spaces.Box(0, 99, (1,), np.int64)
        )

    def action_space(self, agent: str) -> spaces.Space[Any]:
        """Return an agent's space."""
        return self.env.action_space if agent == PILOT else spaces.Discrete(3)

    def _see(self, row: np.ndarray, agents: list[str]) -> dict[str, np.ndarray]:
        return {agent: row if agent == PILOT else row[_T : _T + 1] for agent in agents}

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        """Begin an episode."""
        row, info = self.env.reset(seed=seed, options=options)
        self.agents = list(self.possible_agents)
        return self._see(row, self.agents), {PILOT: info}

    def step(self, actions: dict[str, Any]) -> Any:
        """Make a step."""
        if set(actions) != set(self.agents):
            raise AssertionError(f"{self.agents} act, got {actions}")
        row, reward, terminated, truncated, info = self.env.step(actions[PILOT])
        present = [PILOT, VISITOR] if is_visiting(row[_T]) else [PILOT]
        flags = {agent: terminated or agent not in present for agent in self.agents}
        seen = list(dict.fromkeys([*self.agents, *present]))
        self.agents = [] if terminated or truncated else present
        rewards = dict.fromkeys(seen, reward)
        return (
            self._see(row, present),
            rewards,
            flags,
            dict.fromkeys(flags, truncated),
            {PILOT: info},
        )


class PilotsEnv:
    """A `ParallelVectorEnv` of `PettingZooFuzzEnv`s as the pilots' Gymnasium vector env; holds visitors to the rows."""

    def __init__(
        self, make: list[Any], mode: str, num_workers: int, options: ExecutorOptions
    ) -> None:
        self.envs = ParallelVectorEnv(
            make, autoreset_mode=mode, num_workers=num_workers, options=options
        )
        self.executor, self.call, self.close = (
            self.envs.executor,
            self.envs.call,
            self.envs.close,
        )

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Reset; see the Gymnasium facade."""
        observations, infos = self.envs.reset(seed, options)
        return self._checked(observations), infos

    def step(self, actions: np.ndarray) -> Any:
        """Step; see the Gymnasium facade."""
        visitors = np.ones(len(actions), np.int64)
        observations, rewards, ends, cuts, infos = self.envs.step(
            {PILOT: actions, VISITOR: visitors}
        )
        infos = dict(infos)
        if "final_obs" in infos:
            infos["final_obs"] = [
                None if last is None else last[PILOT] for last in infos["final_obs"]
            ]
        return (
            self._checked(observations),
            rewards[PILOT],
            ends[PILOT],
            cuts[PILOT],
            infos,
        )

    def _checked(self, observations: Mapping[str, Any]) -> np.ndarray:
        rows, visitors = observations[PILOT], observations[VISITOR][:, 0]
        wanted = np.where(is_visiting(rows[:, _T]), rows[:, _T], 0)
        assert (visitors == wanted).all(), (
            f"visitors see {visitors.tolist()}, pilots {rows.tolist()}"
        )
        return rows
