"""Small envs whose observations identify env, episode and step: oracles for tests.

An observation holds the episode's seed (which identifies env and episode), the step counter and the last action, so a
test sees a stale, torn, swapped, repeated or skipped row at once. They need only numpy.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from envherd.shm.specs import Discrete, EnvSpec, LeafSpec
from envherd.workers.adapters.base import Adapter, Mask, Options, StepValues
from envherd.workers.adapters.registry import register

#: Places in `CountingEnv`'s observation.
SEED, STEP, ACTION = range(3)

NUM_ACTIONS = 5


class PlainEnv:
    """An env with the adapter's interface: flat lists aligned with `spec`. Subclass it to write a test env."""

    spec: EnvSpec

    def reset(
        self,
        seed: int | None,
        options: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Start a new episode and return the observation values."""
        raise NotImplementedError

    def step(self, action: list[Any]) -> StepValues:
        """Return `(observation values, reward values, terminated, truncated)`."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to close."""

    # Requested by tests through `call` and `get`.

    def pid(self) -> int:
        """Return the id of the process that runs this env."""
        return os.getpid()

    def loaded(self, names: list[str]) -> list[str]:
        """Return which of these modules this process has imported."""
        return [name for name in names if name in sys.modules]

    def echo(self, *values: Any, **named: Any) -> list[Any]:
        """Return the arguments."""
        return [list(values), named]


class PlainAdapter(Adapter):
    """Serves a `PlainEnv`."""

    family: ClassVar[str] = "plain"

    def __init__(self, env: PlainEnv) -> None:
        self.env = env
        self.spec = env.spec
        # What an env has in addition takes the place of what adapters have by default.
        for name in ("done_values", "render", "state_dict", "load_state_dict"):
            is_default = getattr(type(self), name) is getattr(Adapter, name)
            if is_default and hasattr(env, name):
                setattr(self, name, getattr(env, name))

    def reset(
        self,
        seed: int | None,
        options: Options = None,
        mask: Mask = None,
    ) -> list[Any]:
        """See `Adapter.reset`; a mask is passed on to envs that are a batch themselves."""
        return (
            self.env.reset(seed, options)
            if mask is None
            else self.env.reset(seed, options, mask)
        )

    def step(self, action: list[Any]) -> StepValues:
        return self.env.step(action)


register(PlainEnv, PlainAdapter)


def action_leaf(n: int = NUM_ACTIONS) -> LeafSpec:
    """Return the leaf of one discrete action."""
    return LeafSpec(("action",), (), "int64", Discrete(n))


class CountingEnv(PlainEnv):
    """Counts: `observation` is int64 `[seed, step, last action]` (-1 after a reset), the reward `step + action / 8`.

    Episodes end after `length` steps; if that is None, after 2 to 6, depending on the seed. They are terminated if the
    seed is even, else truncated.

    Args:
        length: steps of an episode.
        size: also observe `pixels`, uint8 `[size, size]`, filled with the step counter.
        reuses_buffers: return the same arrays every time, overwritten in place, as many envs do.

    Attributes:
        seen: the action of every `step`, oldest first.
        options: of the latest `reset`.
        episode: resets of this instance, less one.
    """

    def __init__(
        self,
        length: int | None = None,
        *,
        size: int = 0,
        reuses_buffers: bool = False,
    ) -> None:
        self.length = length
        self.size = size
        self.reuses_buffers = reuses_buffers
        self.seen: list[int] = []
        self.options: Mapping[str, Any] | None = None
        self.episode = -1
        self.num_steps = 0
        self.seed = 0
        self._buffers: list[np.ndarray] = [
            np.zeros(3, np.int64),
            np.zeros((size, size), np.uint8),
        ]
        pixels = (LeafSpec(("pixels",), (size, size), "uint8"),) if size else ()
        self.spec = EnvSpec(
            observation=(LeafSpec(("observation",), (3,), "int64"), *pixels),
            action=(action_leaf(),),
            family="plain",
        )

    def reset(
        self,
        seed: int | None,
        options: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Begin the next episode."""
        self.seed = self.seed if seed is None else seed
        self.options = options
        self.episode += 1
        self.num_steps = 0
        return self._observe(-1)

    def step(self, action: list[Any]) -> StepValues:
        """Count one step."""
        self.seen.append(action[0])
        self.num_steps += 1
        has_ended = self.num_steps >= self.episode_length()
        is_even = self.seed % 2 == 0
        return (
            self._observe(action[0]),
            [self.num_steps + action[0] / 8],
            has_ended and is_even,
            has_ended and not is_even,
        )

    def episode_length(self) -> int:
        """Return the steps of the episode under way."""
        return 2 + self.seed % 5 if self.length is None else self.length

    def _observe(self, action: int) -> list[Any]:
        values: list[np.ndarray] = self._buffers
        if not self.reuses_buffers:
            values = [np.zeros_like(buffer) for buffer in self._buffers]
        values[0][:] = self.seed, self.num_steps, action
        values[1].fill(self.num_steps % 256)
        return values if self.size else values[:1]

    def state_dict(self) -> dict[str, int]:
        """Return the counters."""
        return {"seed": self.seed, "num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Put the counters back."""
        self.seed = state["seed"]
        self.num_steps = state["num_steps"]

    def render(self) -> np.ndarray:
        """Draw the step counter."""
        return np.full((4, 6, 3), self.num_steps, np.uint8)
