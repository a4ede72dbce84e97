"""Variants of `CountingEnv`: agents, a text, a batch of two, global generators, switches, children, output."""

import random
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from envherd.shm.specs import Binary, Discrete, EnvSpec, Key, LeafSpec, done_leaves
from envherd.workers.adapters.base import Mask, Options, StepValues
from envherd.workers.testing.envs import NUM_ACTIONS, CountingEnv, PlainEnv
from tests.envs.breaking_envs import start_child


class AgentsEnv(CountingEnv):
    """Three agents under the group `agents`, with their own done leaves; agent j observes `[seed, step, j]`."""

    NUM_AGENTS = 3

    def __init__(self, length: int | None = None) -> None:
        super().__init__(length)
        group: Key = ("agents",)
        shape = (self.NUM_AGENTS,)
        self.spec = EnvSpec(
            observation=(LeafSpec((*group, "observation"), (*shape, 3), "float64"),),
            action=(
                LeafSpec((*group, "action"), shape, "int64", Discrete(NUM_ACTIONS)),
            ),
            reward=(LeafSpec((*group, "reward"), (*shape, 1), "float32"),),
            done=done_leaves(groups=((group, (*shape, 1)),)),
            groups=((group, shape),),
            family="plain",
        )
        self._flags = (False, False)

    def reset(
        self, seed: int | None, options: Mapping[str, Any] | None = None
    ) -> list[Any]:
        super().reset(seed, options)
        self._flags = (False, False)
        return self._agents()

    def step(self, action: list[Any]) -> StepValues:
        """Count one step; agent j's reward is `step + its action`."""
        _, _, *flags = super().step([action[0].tolist()[0]])
        self._flags = (bool(flags[0]), bool(flags[1]))
        rewards = (self.num_steps + action[0]).astype(np.float32)[:, None]
        return self._agents(), [rewards], *self._flags

    def done_values(self) -> list[Any]:
        """Return done, terminated and truncated of the agents: those of the env."""
        terminated, truncated = self._flags
        return [
            np.full((self.NUM_AGENTS, 1), flag)
            for flag in (terminated or truncated, terminated, truncated)
        ]

    def _agents(self) -> list[Any]:
        return [
            np.array(
                [
                    [self.seed, self.num_steps, agent]
                    for agent in range(self.NUM_AGENTS)
                ],
                np.float64,
            )
        ]


class TextEnv(CountingEnv):
    """Also observes `text`, a side leaf without a fixed shape: `"seed:step"` and padding.

    Args:
        length: steps of an episode.
        padding: characters added to the text.
    """

    def __init__(self, length: int | None = None, *, padding: int = 0) -> None:
        super().__init__(length)
        self._padding = "." * padding
        text = LeafSpec(("text",), dtype="", is_side=True)
        self.spec = EnvSpec(
            observation=(*self.spec.observation, text),
            action=self.spec.action,
            family="plain",
        )

    def _observe(self, action: int) -> list[Any]:
        return [
            *super()._observe(action),
            f"{self.seed}:{self.num_steps}{self._padding}",
        ]


class PairEnv(PlainEnv):
    """Two `CountingEnv`s as one env with batch shape `[2]`: each row ends and is reset on its own."""

    def __init__(self) -> None:
        self.rows = (CountingEnv(), CountingEnv())
        self.spec = EnvSpec(
            observation=(LeafSpec(("observation",), (2, 3), "int64"),),
            action=(LeafSpec(("action",), (2,), "int64", Discrete(NUM_ACTIONS)),),
            reward=(LeafSpec(("reward",), (2, 1), "float32"),),
            done=done_leaves((2,)),
            batch_shape=(2,),
            family="plain",
        )
        self._observation = np.zeros((2, 3), np.int64)

    def reset(
        self, seed: int | None, options: Options = None, mask: Mask = None
    ) -> list[Any]:
        """Begin the next episode of the rows in `mask` (bool `[2, 1]`; None for both)."""
        chosen = [True, True] if mask is None else mask[:, 0].tolist()
        for index, row in enumerate(self.rows):
            if chosen[index]:
                self._observation[index] = row.reset(
                    None if seed is None else seed + index, options
                )[0]
        return [self._observation]

    def state(self) -> list[int]:
        """Return the rows' step counters."""
        return [row.num_steps for row in self.rows]

    def step(self, action: list[Any]) -> StepValues:
        """Count one step of both rows."""
        steps = [
            row.step([act])
            for row, act in zip(self.rows, action[0].tolist(), strict=True)
        ]
        for index, values in enumerate(steps):
            self._observation[index] = values[0][0]
        reward, terminated, truncated = (
            np.array([[values[1][0]] for values in steps], np.float32),
            np.array([[values[2]] for values in steps]),
            np.array([[values[3]] for values in steps]),
        )
        return [self._observation], [reward], terminated, truncated


class GlobalRandomEnv(CountingEnv):
    """Draws from python's and numpy's global generators, in reset and in step, as badly written envs do."""

    def __init__(self, length: int | None = None) -> None:
        super().__init__(length)
        draws = LeafSpec(("draws",), (2,), "float64")
        self.spec = EnvSpec(
            observation=(*self.spec.observation, draws),
            action=self.spec.action,
            family="plain",
        )

    def _observe(self, action: int) -> list[Any]:
        draws = np.array([random.random(), np.random.random()])
        return [*super()._observe(action), draws]


class FlagsEnv(CountingEnv):
    """Has a binary action of four switches and observes them; for actions that are arrays."""

    def __init__(self, length: int | None = None) -> None:
        super().__init__(length)
        switches = LeafSpec(("switches",), (4,), "int8", Binary())
        self.spec = EnvSpec(
            observation=(*self.spec.observation, switches),
            action=(LeafSpec(("action",), (4,), "int8", Binary()),),
            family="plain",
        )
        self._switches = np.zeros(4, np.int8)

    def reset(
        self, seed: int | None, options: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Begin the next episode, all switches off."""
        self._switches = np.zeros(4, np.int8)
        return super().reset(seed, options)

    def step(self, action: list[Any]) -> StepValues:
        """Set the switches."""
        self._switches = action[0]
        return super().step([int(action[0].sum())])

    def _observe(self, action: int) -> list[Any]:
        return [*super()._observe(action), self._switches]


class ParentEnv(CountingEnv):
    """Starts a process when it is built, as envs with simulators do, and never ends it.

    Attributes:
        child: the process id.
    """

    def __init__(self) -> None:
        super().__init__(1_000_000)
        self.child = start_child()


class ChattyEnv(CountingEnv):
    """Prints `num_bytes` at every step, in parts, with pauses of 1 ms."""

    def __init__(self, num_bytes: int, parts: int = 1) -> None:
        super().__init__(1_000_000)
        self._lines = ["x" * (num_bytes // parts - 1)] * parts

    def step(self, action: list[Any]) -> StepValues:
        """Print and count."""
        for line in self._lines:
            print(line, flush=True)  # noqa: T201  # this is what it is for
            time.sleep(0.001)
        return super().step(action)
