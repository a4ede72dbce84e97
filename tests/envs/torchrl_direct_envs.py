"""Envs and transforms for the tests of direct ways that are unusual in what they return or keep."""

from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import Transform


class Nested(gymnasium.Env):
    """Returns nested dicts and dtypes that are not its spaces'; checks the type of its action.

    Args:
        reward: kind of the reward that it returns.
    """

    observation_space = spaces.Dict(
        {
            "state": spaces.Box(-1, 1, (3,), np.float32),
            "inner": spaces.Dict(
                {
                    "picture": spaces.Box(0, 255, (4, 4, 3), np.uint8),
                    "pair": spaces.Box(-9, 9, (2,), np.float64),
                }
            ),
            "kind": spaces.Discrete(3),
            "number": spaces.Box(-100, 100, (), np.int64),
        }
    )
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, reward: str = "float") -> None:
        self.kind = reward
        self.steps = 0

    def _observation(self) -> dict[str, Any]:
        draw = self.np_random
        picture = draw.integers(0, 255, (4, 4, 3)).astype(np.uint8)
        return {
            "state": draw.uniform(-1, 1, 3),
            "inner": {"picture": picture[::-1], "pair": draw.normal(size=2)},
            "kind": int(draw.integers(3)),
            "number": np.int64(draw.integers(50)),
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        assert type(action) is np.ndarray
        assert action.dtype == np.float32
        self.steps += 1
        reward = self.np_random.normal() + float(action.sum())
        given = {
            "float": reward,
            "float32": np.float32(reward),
            "int": int(reward * 10),
            "zero": 0,
            "array": np.array([reward]),
            "None": None,
        }[self.kind]
        return (
            self._observation(),
            given,
            np.bool_(self.steps > 4 and reward > 1),
            self.steps >= 20,
            {},
        )


class Buffered(gymnasium.Env):
    """Returns the same array at each step, written anew, and at times no reward; its action is an int."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self) -> None:
        self.array = np.zeros(2, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.array[...] = 0
        return self.array, {}

    def step(self, action: Any) -> Any:
        assert type(action) is int
        self.array += (1, action)
        return (
            self.array,
            None if action == 2 else float(action),
            False,
            bool(self.array[0] >= 9),
            {},
        )


def herd(  # noqa: C901  # a class inside
    *,
    dies: bool = True,
    masks: str = "",
    has_infos: bool = True,
    is_nested: bool = False,
) -> Any:
    """Return a PettingZoo env of two kinds of agents, which may die.

    Args:
        dies: agents end one by one.
        masks: where the walkers have an action mask: "obs", "info" or nowhere.
        has_infos: infos have numbers.
        is_nested: observations are nested dicts.
    """
    from pettingzoo import ParallelEnv

    class Herd(ParallelEnv):
        metadata: ClassVar[Any] = {"name": "herd"}
        possible_agents: ClassVar[Any] = ["walker_0", "walker_1", "walker_2", "bird_0"]
        state_space = spaces.Box(-1e3, 1e3, (3,), np.float64)
        render_mode = None
        draw = np.random.default_rng(0)

        def observation_space(self, agent: str) -> Any:
            is_walker = agent.startswith("walker")
            box = (
                spaces.Box(-5, 5, (2,), np.float32)
                if is_walker
                else spaces.Box(0, 255, (3, 3), np.uint8)
            )
            return self._packed(
                agent, box, spaces.Box(0, 1, (4,), np.int8), spaces.Dict
            )

        def action_space(self, agent: str) -> Any:
            return (
                spaces.Discrete(4)
                if agent.startswith("walker")
                else spaces.Box(-1, 1, (2,), np.float32)
            )

        def _packed(self, agent: str, value: Any, mask: Any, pack: Any) -> Any:
            entries = {"x": pack({"y": value})} if is_nested else {"view": value}
            if masks == "obs" and agent.startswith("walker"):
                return pack({**entries, "action_mask": mask})
            return pack(entries) if is_nested else value

        def _mask(self) -> np.ndarray:
            return np.maximum(self.draw.integers(0, 2, 4), [1, 0, 0, 0]).astype(np.int8)

        def _seen(self, agent: str) -> Any:
            is_walker = agent.startswith("walker")
            value = (
                self.draw.normal(size=2)
                if is_walker
                else self.draw.integers(0, 255, (3, 3))
            )
            return self._packed(
                agent,
                value.astype(np.float32 if is_walker else np.uint8),
                self._mask(),
                dict,
            )

        def _info(self, agent: str) -> dict[str, Any]:
            info = (
                {"score": self.draw.normal(), "pair": np.array([self.steps, 2.0])}
                if has_infos
                else {}
            )
            has_mask = masks == "info" and agent.startswith("walker")
            return {**info, "action_mask": self._mask()} if has_mask else info

        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            if seed is not None:
                self.draw = np.random.default_rng(seed)
            self.agents, self.steps = list(self.possible_agents), 0
            return {one: self._seen(one) for one in self.agents}, {
                one: self._info(one) for one in self.agents
            }

        def state(self) -> np.ndarray:
            return np.full(3, self.steps, np.float64)

        def step(self, actions: dict[str, Any]) -> Any:
            assert set(actions) == set(self.possible_agents)
            self.steps += 1
            acting = self.agents
            seen = {one: self._seen(one) for one in acting}
            rewards = {one: self.draw.normal() + np.sum(actions[one]) for one in acting}
            terminations = {
                one: bool(dies and self.draw.random() < 0.15) for one in acting
            }
            truncations = dict.fromkeys(acting, self.steps >= 12)
            infos = {one: self._info(one) for one in acting}
            self.agents = [
                one for one in acting if not (terminations[one] or truncations[one])
            ]
            return seen, rewards, terminations, truncations, infos

    return Herd()


class Keeper(Transform):
    """Keeps what it was given, and adds it up: shared memory or tensordicts would show."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[TensorDictBase] = []

    def _step(
        self, tensordict: TensorDictBase, next_tensordict: TensorDictBase
    ) -> TensorDictBase:
        self.kept = [*self.kept[-3:], tensordict, next_tensordict]
        total = sum(td.get("observation") for td in self.kept)
        next_tensordict.get("done").logical_or_(total.sum() > 1e9)
        return next_tensordict.set(
            "observation", total.to(next_tensordict.get("observation").dtype)
        )

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return tensordict_reset


class Twice(Transform):
    """Changes the action before the step, and adds keys that are in no spec."""

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("action", tensordict.get("action") * 0.5)

    def _step(
        self, tensordict: TensorDictBase, next_tensordict: TensorDictBase
    ) -> TensorDictBase:
        tensordict.set("stray", torch.zeros(3))
        next_tensordict.set("other", TensorDict({"deep": torch.ones(2)}, []))
        return next_tensordict.set(
            "reward", next_tensordict.get("reward") + tensordict.get("action").sum()
        )

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return tensordict_reset.set("other", TensorDict({"deep": torch.zeros(2)}, []))
