"""Return, length and time of episodes as leaves of the observation.

    ParallelEnv(8, make_env, options=ExecutorOptions(episode_statistics=True))

The leaves cover the episode so far: in the row in which an episode ends (`done`) they cover all of it; after a reset
they are 0. The sum of `("reward",)` is `("episode", "return")`; the sum of a group's reward, `("agents", "reward")`, is
`("agents", "episode", "return")`, with the reward's shape. `("episode", "length")` counts
steps, and `("episode", "time")` is the number of seconds since the first step began. Rewards are added in float64.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from envherd.shm.specs import EPISODE_KEYS, Key, LeafSpec
from envherd.workers.adapters.base import Adapter, StepValues
from envherd.workers.block.wrapping import Wrapping

_ROOT = "episode"
#: Marks a state that also holds the statistics of the episode.
_STATE = "envherd.episode"
_FLOATS = ("float32", "float64")


def return_key(reward: Key) -> Key:
    """Return the key of the sum of a reward."""
    name = "return" if reward[-1] == "reward" else f"{reward[-1]}_return"
    return (*reward[:-1], _ROOT, name)


class EpisodeLeaves(Wrapping):
    """Another adapter, with the statistics of the episode behind its observation.

    Args:
        inner: the adapter.

    Raises:
        SpecError: the env has an observation named `episode` itself.
    """

    def __init__(self, inner: Adapter) -> None:
        shape, rewards = inner.spec.batch_shape, inner.spec.reward
        returns = [LeafSpec(return_key(leaf.key), leaf.shape, _sum_dtype(leaf.dtype)) for leaf in rewards]
        length = LeafSpec((_ROOT, "length"), (*shape, 1), "int64")
        seconds = LeafSpec((_ROOT, "time"), (*shape, 1), "float32")
        roots = {(_ROOT,), *(leaf.key[:-1] for leaf in returns)}
        super().__init__(inner, [*returns, length, seconds], sorted(roots), "episode_statistics")
        keys = [list(leaf.key) for leaf in self.leaves]
        self.spec = replace(self.spec, metadata={**self.spec.metadata, EPISODE_KEYS: keys})
        self._sums = [np.zeros(leaf.shape) for leaf in returns]
        self._began = np.zeros(shape)
        self._is_fresh = np.ones(shape, bool)
        self._has_fresh = True
        self._values = [np.zeros(leaf.shape, leaf.dtype) for leaf in self.leaves]
        self._pairs = list(zip(self._sums, self._values[:-2], strict=True))
        self._length, self._seconds = self._values[-2:]
        if not shape and [(leaf.shape, leaf.dtype in _FLOATS) for leaf in rewards] == [((1,), True)]:
            self._single: list[Any] = [array.reshape(-1).data for array in (*self._sums, self._began, *self._values)]
            self.step = self._step_single  # type: ignore[method-assign]

    def reset(
        self, seed: int | None, options: Mapping[str, Any] | None = None, mask: np.ndarray | None = None
    ) -> list[Any]:
        """Start a new episode; see `Adapter.reset`."""
        observation = self.inner.reset(seed, options, mask)
        rows: Any = ... if mask is None else mask[..., 0]
        for values in (*self._sums, *self._values):
            values[rows] = 0
        self._is_fresh[rows] = self._has_fresh = True
        return [*observation, *self._values]

    def step(self, action: list[Any]) -> StepValues:
        """Make one transition; see `Adapter.step`."""
        if self._has_fresh:
            self._began[self._is_fresh] = time.perf_counter()
            self._is_fresh[...] = self._has_fresh = False
        observation, reward, terminated, truncated = self.inner.step(action)
        self._add(reward)
        self._length += 1
        self._seconds[..., 0] = time.perf_counter() - self._began
        return [*observation, *self._values], reward, terminated, truncated

    def _step_single(self, action: list[Any]) -> StepValues:
        """The same as `step`, for an env with one reward, in a third of the time."""
        total, began, value, length, seconds = self._single
        if self._has_fresh:
            began[0] = time.perf_counter()
            self._is_fresh[...] = self._has_fresh = False
        observation, reward, terminated, truncated = self.inner.step(action)
        if len(reward) == 1 and reward[0].__class__ is float:
            total[0] += reward[0]
            value[0] = total[0]
        else:
            self._add(reward)
        length[0] += 1
        seconds[0] = time.perf_counter() - began[0]
        return [*observation, *self._values], reward, terminated, truncated

    def _add(self, reward: list[Any]) -> None:
        for (total, value), given in zip(self._pairs, reward, strict=False):  # the block refuses too few or too many
            try:
                np.add(total, given, out=total)
            except (TypeError, ValueError):  # not a reward of this env: the block says so when it stores it
                continue
            value[...] = total

    def state_dict(self) -> Any:
        """Return the env's state, with the statistics of its episode; see `Adapter.state_dict`."""
        seconds = np.where(self._is_fresh, 0.0, time.perf_counter() - self._began)
        episode = [*(total.copy() for total in self._sums), self._length.copy(), seconds]
        return {_STATE: episode, "env": self.inner.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        """Restore a state, also one saved without the option: the statistics then start here."""
        if not (isinstance(state, Mapping) and _STATE in state):
            self.inner.load_state_dict(state)
            return
        self.inner.load_state_dict(state["env"])
        *sums, length, seconds = state[_STATE]
        for (total, value), kept in zip(self._pairs, sums, strict=True):
            total[...] = value[...] = kept
        self._length[...], self._began[...] = length, time.perf_counter() - seconds
        self._seconds[..., 0] = seconds
        self._is_fresh[...] = length[..., 0] == 0
        self._has_fresh = bool(self._is_fresh.any())


def _sum_dtype(dtype: str) -> str:
    return dtype if np.dtype(dtype).kind == "f" else "float64" if np.dtype(dtype).kind == "c" else "int64"
