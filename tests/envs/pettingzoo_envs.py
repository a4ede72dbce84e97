"""The tests' PettingZoo envs: agents that leave and return, different spaces, action masks, various ends."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

#: Steps of an episode of `Village`, and the agents who act in each, from the step after the reset on.
LENGTH = 6
PRESENT = (
    ("wolf_0", "sheep_0", "sheep_1", "dog"),
    ("wolf_0", "sheep_0", "sheep_1", "dog"),
    ("wolf_0", "sheep_1", "dog"),  # sheep_0 has terminated
    ("wolf_0", "dog"),  # sheep_1 was truncated
    ("wolf_0", "sheep_0", "dog"),  # sheep_0 is back
    ("wolf_0", "sheep_0", "sheep_2", "dog"),  # sheep_2 comes late
)


class Village(ParallelEnv):
    """Follows a timetable; observations hold the seed's number, the step and the action.

    After six steps the remaining agents all terminate, are all truncated, or some of each, depending on the seed's
    number. The wolf's action mask is in its observation, the sheep's are in their infos, the dog has none. `dog` sees a
    Dict.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "village", "render_modes": []}
    render_mode = None
    possible_agents: ClassVar[list[str]] = [
        "wolf_0",
        "sheep_0",
        "sheep_1",
        "sheep_2",
        "dog",
    ]

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []
        self.agents: list[str] = []
        self.options: Any = None
        self.rng = np.random.default_rng()

    def observation_space(self, agent: str) -> spaces.Space:
        if agent.startswith("wolf"):
            seen = spaces.Box(-np.inf, np.inf, (3,), np.float32)
            return spaces.Dict(
                {"observation": seen, "action_mask": spaces.Box(0, 1, (4,), np.int8)}
            )
        if agent.startswith("sheep"):
            return spaces.Box(0, 100, (2,), np.float64)
        return spaces.Dict(
            {"place": spaces.Box(-10, 10, (), np.float32), "flock": spaces.Discrete(4)}
        )

    def action_space(self, agent: str) -> spaces.Space:
        if agent.startswith("wolf"):
            return spaces.Discrete(4)
        if agent.startswith("sheep"):
            return spaces.Discrete(3, start=1)
        return spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.options = options
        self.number = int(self.rng.integers(100))
        self.num_steps, self.place = 0, 0.0
        self.agents = list(PRESENT[0])
        return {agent: self._see(agent) for agent in self.agents}, {
            agent: self._tell(agent) for agent in self.agents
        }

    def step(self, actions: Mapping[str, Any]) -> Any:
        assert set(actions) == set(self.agents), (
            "the agents that are here act, and no other"
        )
        assert all(
            self.action_space(agent).contains(action)
            for agent, action in actions.items()
        )
        self.given.append(dict(actions))
        self.num_steps += 1
        self.place += float(actions["dog"][0])
        was_here, self.agents = self.agents, []
        if self.num_steps < LENGTH:
            self.agents = list(PRESENT[self.num_steps])
        here = [*was_here, *(agent for agent in self.agents if agent not in was_here)]
        left = {
            agent: self._how_it_left(agent)
            if agent not in self.agents
            else (False, False)
            for agent in here
        }
        return (
            {agent: self._see(agent) for agent in here},
            {
                agent: float(self.num_steps + np.sum(actions.get(agent, 0)))
                for agent in here
            },
            {agent: left[agent][0] for agent in here},
            {agent: left[agent][1] for agent in here},
            {agent: self._tell(agent) for agent in here},
        )

    def state(self) -> np.ndarray:
        return np.array([self.number, self.num_steps], np.float32)

    def _how_it_left(self, agent: str) -> tuple[bool, bool]:
        if self.num_steps < LENGTH:
            return agent == "sheep_0", agent == "sheep_1"
        is_terminated = (True, False, agent == "dog")[self.number % 3]
        return is_terminated, not is_terminated

    def _see(self, agent: str) -> Any:
        if agent.startswith("wolf"):
            mask = np.roll(np.array([1, 1, 0, 1], np.int8), self.num_steps)
            return {
                "observation": np.array([self.number, self.num_steps, 1], np.float32),
                "action_mask": mask,
            }
        if agent.startswith("sheep"):
            return np.array([self.number, self.num_steps], np.float64)
        return {
            "place": np.float32(self.place),
            "flock": np.int64(sum(name.startswith("sheep") for name in self.agents)),
        }

    def _tell(self, agent: str) -> dict[str, Any]:
        info: dict[str, Any] = {"energy": 10.0 - self.num_steps, "name": agent}
        if agent.startswith("sheep") and self.num_steps != 4:
            info["action_mask"] = np.array([self.num_steps % 2, 1, 1], np.int8)
        return info


class Scripted(ParallelEnv):
    """Returns scripted results from `reset` and `step`; agents see two floats and have two actions.

    Args:
        agents: all of them; they are there from the start.
        spaces_: agent -> (observation space, action space), of those that differ.
        answers: what the steps return; before each its agents, `(env.agents after it, the five values)`.
        first: what `reset` returns; None for observations of all.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "scripted"}
    render_mode = None

    def __init__(
        self,
        agents: Any = ("a_0", "a_1"),
        spaces_: Any = None,
        answers: Any = (),
        first: Any = None,
    ) -> None:
        self.possible_agents = list(agents)
        self.agents: list[Any] = []
        self.spaces = spaces_ or {}
        self.answers = list(answers)
        self.first = first
        self.given: list[dict[Any, Any]] = []
        self.resets: list[dict[str, Any]] = []

    def observation_space(self, agent: Any) -> spaces.Space:
        return self.spaces.get(agent, (spaces.Box(-9, 9, (2,), np.float32), None))[0]

    def action_space(self, agent: Any) -> spaces.Space:
        return self.spaces.get(agent, (None, spaces.Discrete(2)))[1]

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.resets.append({"seed": seed, "options": options})
        self.agents = list(self.possible_agents)
        if self.first is not None:
            return self.first
        return {agent: self.zero(agent) for agent in self.agents}, {
            agent: {} for agent in self.agents
        }

    def zero(self, agent: Any) -> Any:
        """Return an observation of an agent."""
        space = self.observation_space(agent)
        space.seed(0)
        return space.sample()

    def step(self, actions: Mapping[Any, Any]) -> Any:
        self.given.append(dict(actions))
        self.agents, answer = self.answers.pop(0)
        return answer


def outcome(ends: Mapping[Any, tuple[bool, bool] | None], *, seen: Any = None) -> Any:
    """Return the five values of a step: agents with `(terminated, truncated)`, or None for no flags.

    Args:
        ends: agent -> how it ended.
        seen: who has an observation; None for all of them.
    """
    given_ends = {agent: end for agent, end in ends.items() if end is not None}
    return (
        {agent: np.ones(2, np.float32) for agent in (ends if seen is None else seen)},
        dict.fromkeys(given_ends, 1.0),
        {agent: end[0] for agent, end in given_ends.items()},
        {agent: end[1] for agent, end in given_ends.items()},
        {agent: {} for agent in given_ends},
    )
