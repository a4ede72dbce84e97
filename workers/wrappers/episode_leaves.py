"""Return, length and time of episodes as leaves of the observation.

    ParallelEnv(8, make_env, options=ExecutorOptions(episode_statistics=True))

The leaves cover the episode so far: in the row in which an episode ends (`done`) they cover all of it; after a reset
they are 0. The sum of `("reward",)` is `("episode", "return")`; the sum of a group's reward, `("agents", "reward")`, is
`("agents", "episode", "return")`, with the reward's shape. `("episode", "length")` counts
steps, and `("episode", "time")` is the number of seconds since the first step began. Rewards are added in float64.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from envherd.shm.specs import EPISODE_KEYS, Key, LeafSpec
from envherd.workers.adapters.base import Adapter, Mask, Options, StepValues
from envherd.workers.wrappers.wrapping import Wrapping

_ROOT = "episode"
#: Marks a state that also holds the statistics of the episode.
_STATE = "envherd.episode"
_FLOATS = ("float32", "float64")


def return_key(reward: Key) -> Key:
    """Return the key of the sum of a reward."""
    name = "return" if reward[-1] == "reward" else f"{reward[-1]}_return"
    return (*reward[:-1], _ROOT, name)


class EpisodeSums:
    """Return, length and time of the running episodes of one env.

    Args:
        shape: the env's batch shape.
        rewards: its reward leaves.

    Attributes:
        leaves: of the returns in the order of the rewards, then of length and time.
        roots: keys under which all of them are.
        values: arrays, aligned with `leaves` (VIEWS).
    """

    def __init__(self, shape: tuple[int, ...], rewards: Sequence[LeafSpec]) -> None:
        returns = [
            LeafSpec(
                return_key(leaf.key),
                leaf.shape,
                {"f": leaf.dtype, "c": "float64"}.get(
                    np.dtype(leaf.dtype).kind,
                    "int64",
                ),
            )
            for leaf in rewards
        ]
        self.leaves = (
            *returns,
            LeafSpec((_ROOT, "length"), (*shape, 1), "int64"),
            LeafSpec((_ROOT, "time"), (*shape, 1), "float32"),
        )
        self.roots = sorted({leaf.key[:-1] for leaf in self.leaves})
        self.values = [np.zeros(leaf.shape, leaf.dtype) for leaf in self.leaves]
        self._sums = [np.zeros(leaf.shape) for leaf in returns]
        self._began = np.zeros(shape)
        self._is_fresh = np.ones(shape, bool)
        self._has_fresh = True
        *self._returns, self._length, self._seconds = self.values
        if not shape and [(leaf.shape, leaf.dtype in _FLOATS) for leaf in rewards] == [
            ((1,), True)
        ]:
            self.add = self._single_adder()  # type: ignore[assignment,method-assign]

    def restart(self, rows: Any = ..., of_returns: Sequence[Any] | None = None) -> None:
        """Set everything to 0.

        Args:
            rows: index of the env's rows, e.g. bool `[*shape]`.
            of_returns: an index for each return, where a reset may be of some agents of a row; None for `rows`.
        """
        for total, value, index in zip(
            self._sums,
            self._returns,
            of_returns or [rows] * len(self._sums),
            strict=True,
        ):
            total[index] = value[index] = 0
        self._length[rows] = self._seconds[rows] = 0
        self._is_fresh[rows] = self._has_fresh = True

    def begin(self) -> None:
        """Note the time, before a step."""
        if self._has_fresh:
            self._began[self._is_fresh] = time.perf_counter()
            self._is_fresh[...] = self._has_fresh = False

    def add(self, rewards: list[Any]) -> None:
        """Add the rewards, after a step."""
        # The block refuses too few or too many.
        for total, value, given in zip(
            self._sums,
            self._returns,
            rewards,
            strict=False,
        ):
            try:
                np.add(total, given, out=total)
            # It is no reward of this env, which the block reports when it stores it.
            except (TypeError, ValueError):
                continue
            value[...] = total
        self._length += 1
        self._seconds[..., 0] = time.perf_counter() - self._began

    def _single_adder(self) -> Callable[[list[Any]], None]:
        """Return the same as `add` for an env with one reward, which takes a third of the time."""
        memories: list[Any] = [
            array.reshape(-1).data for array in (*self._sums, self._began, *self.values)
        ]
        total, began, value, length, seconds = memories

        def add(rewards: list[Any]) -> None:
            if len(rewards) != 1 or rewards[0].__class__ is not float:
                EpisodeSums.add(self, rewards)
                return
            total[0] += rewards[0]
            value[0] = total[0]
            length[0] += 1
            seconds[0] = time.perf_counter() - began[0]

        return add

    def state(self) -> list[Any]:
        """Return copies of the sums, the lengths, and the seconds so far."""
        seconds = np.where(self._is_fresh, 0.0, time.perf_counter() - self._began)
        return [*(total.copy() for total in self._sums), self._length.copy(), seconds]

    def checked(self, state: Any) -> list[Any]:
        """Return what `state` returned.

        Raises:
            ValueError: it is none of these sums.
        """
        forms = [(array.shape, array.dtype) for array in self.state()]
        arrays = state if isinstance(state, list) else []
        if [
            (getattr(one, "shape", None), getattr(one, "dtype", None)) for one in arrays
        ] != forms:
            raise ValueError(
                f"expected the statistics of an episode as {forms}, got {type(state).__name__}."
            )
        return arrays

    def restore(self, state: list[Any]) -> None:
        """Put back what `state` returned."""
        *sums, length, seconds = state
        for total, value, kept in zip(self._sums, self._returns, sums, strict=True):
            total[...] = value[...] = kept
        self._length[...] = length
        self._began[...] = time.perf_counter() - seconds
        self._seconds[..., 0] = seconds
        self._is_fresh[...] = length[..., 0] == 0
        self._has_fresh = bool(self._is_fresh.any())


class EpisodeLeaves(Wrapping):
    """Another adapter, with the statistics of the episode behind its observation.

    Args:
        inner: the adapter.

    Raises:
        SpecError: the env has an observation named `episode` itself.
    """

    def __init__(self, inner: Adapter) -> None:
        self._sums = sums = EpisodeSums(inner.spec.batch_shape, inner.spec.reward)
        super().__init__(inner, sums.leaves, sums.roots, "episode_statistics")
        self.spec = replace(
            self.spec,
            metadata={
                **self.spec.metadata,
                EPISODE_KEYS: [list(leaf.key) for leaf in self.leaves],
            },
        )

    def reset(
        self,
        seed: int | None,
        options: Options = None,
        mask: Mask = None,
    ) -> list[Any]:
        observation = self.inner.reset(seed, options, mask)
        self._sums.restart(... if mask is None else mask[..., 0])
        return [*observation, *self._sums.values]

    def step(self, action: list[Any]) -> StepValues:
        sums = self._sums
        sums.begin()
        observation, reward, terminated, truncated = self.inner.step(action)
        sums.add(reward)
        return [*observation, *sums.values], reward, terminated, truncated

    def state_dict(self) -> Any:
        """Return the env's state, with the statistics of its episode."""
        return {_STATE: self._sums.state(), "env": self.inner.state_dict()}

    def read_state(self, state: Any) -> Callable[[], None]:
        """Check a state, also one saved without the option: the statistics then start here; return what restores it."""
        if not (isinstance(state, Mapping) and _STATE in state and "env" in state):
            return self.inner.read_state(state)
        put = self.inner.read_state(state["env"])
        sums = self._sums.checked(state[_STATE])

        def put_all() -> None:
            put()
            self._sums.restore(sums)

        return put_all
