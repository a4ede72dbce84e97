"""Envs of several rows driven by hand, as the reference for the executor's data; see `plain_loops`.

If rows are independent, each row is a separate env (`PlainRows`). A simulator whose rows share one generator is driven
as a whole.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from envherd.shm.specs import Key
from tests.oracles.plain_loops import MakeEnv, Result, Values

if TYPE_CHECKING:
    import torch

#: The seeds of rows in a partial reset: none, `seed` + row, or `seed` + index among the reset rows.
PartialSeeds = Literal["none", "row", "place"]


class Row(Protocol):
    """One env, driven by hand."""

    def reset(self, seed: int | None) -> Values:
        """Start an episode, from a seed or from the env's present generator."""

    def step(self, action: Mapping[Key, np.ndarray]) -> Result:
        """Make one step."""

    def close(self) -> None:
        """Close the env."""


class PlainRows:
    """A vector env according to its documentation: separate envs; row i gets `seed` + i at a reset of all.

    Args:
        make_row: makes one of them.
        num_rows: how many.
        seeds: of the rows in a partial reset.
        resets_itself: whether a row is reset in the step in which it ends, without a seed; its next reset then only
            returns the first observation.
        num_seeds: modulus of the seeds.
    """

    def __init__(
        self,
        make_row: Callable[[], Row],
        num_rows: int,
        *,
        seeds: PartialSeeds = "none",
        resets_itself: bool = False,
        num_seeds: int = 2**32,
    ) -> None:
        self.rows = [make_row() for _ in range(num_rows)]
        self._seeds, self._resets_itself, self._num_seeds = (
            seeds,
            resets_itself,
            num_seeds,
        )
        self._now: list[Values] = [{} for _ in self.rows]
        self._begun: dict[int, Values] = {}

    def reset(self, seed: int, mask: np.ndarray | None = None) -> Values:
        seed %= self._num_seeds
        has_all_begun = len(self._begun) == len(self.rows)
        if mask is None and not has_all_begun:
            self._begun.clear()
            self._now = [row.reset(seed + index) for index, row in enumerate(self.rows)]
            return _stacked(self._now)
        chosen = (
            range(len(self.rows)) if mask is None else np.flatnonzero(mask).tolist()
        )
        place = 0
        for index in chosen:
            if index in self._begun:
                self._now[index] = self._begun.pop(index)
                continue
            own = {"none": None, "row": seed + index, "place": seed + place}[
                self._seeds
            ]
            self._now[index] = self.rows[index].reset(own)
            place += 1
        return _stacked(self._now)

    def step(self, action: Mapping[Key, np.ndarray]) -> Result:
        made = []
        for index, row in enumerate(self.rows):
            made.append(row.step({key: value[index] for key, value in action.items()}))
            self._now[index] = dict(made[-1][0])
        observations, rewards, terminated, truncated = zip(*made, strict=True)
        stacked = _stacked(observations), _stacked(rewards)
        if self._resets_itself:
            ended = np.flatnonzero(
                np.array(terminated, bool) | np.array(truncated, bool)
            ).tolist()
            self._begun = {
                index: _copied(self.rows[index].reset(None)) for index in ended
            }
        return *stacked, np.array(terminated, bool), np.array(truncated, bool)

    def close(self) -> None:
        for row in self.rows:
            row.close()


class AtariRow:
    """A row of an Atari vector env: one with a single row, which is reset before it would reset itself."""

    def __init__(self, make_env: Callable[[int], Any]) -> None:
        self.env: Any = make_env(1)

    def reset(self, seed: int | None) -> Values:
        return {("observation",): self.env.reset(seed=seed)[0][0].copy()}

    def step(self, action: Mapping[Key, np.ndarray]) -> Result:
        observation, reward, terminated, truncated, _ = self.env.step(
            np.array([action["action",]])
        )
        return (
            {("observation",): observation[0].copy()},
            {("reward",): reward[0]},
            terminated[0],
            truncated[0],
        )

    def close(self) -> None:
        if self.env is not None:
            self.env.close()


class PoolRow(AtariRow):
    """A row of an EnvPool: a pool of one env, of the gymnasium API, built with the row's first seed and no other."""

    def __init__(self, make_env: Callable[..., Any]) -> None:
        self._make_env = make_env
        self.env = None

    def reset(self, seed: int | None) -> Values:
        if self.env is None:
            self.env = self._make_env(num_envs=1, seed=seed)
        return {("observation",): self.env.reset()[0][0].copy()}


class PlainPool(PlainRows):
    """An EnvPool: its seeds are set once, and resets do not change them."""

    def __init__(self, make_env: Callable[..., Any], num_rows: int) -> None:
        super().__init__(
            lambda: PoolRow(make_env), num_rows, num_seeds=2**31 - num_rows
        )


class PlainSimulator:
    """A torch simulator driven as by its users, with the last observations that it publishes.

    Args:
        make_env: one that resets rows in the step in which they end publishes `extras["final_obs"]`
            or `extras["final_observation"]`.
        reset_rows: simulator, ids (int64 `[k]`) -> observations of all rows, after a reset of these.
        resets_itself: whether it does.
    """

    def __init__(
        self,
        make_env: MakeEnv,
        reset_rows: "Callable[[Any, torch.Tensor], Any]",
        *,
        resets_itself: bool,
    ) -> None:
        import torch

        self.env = make_env()
        self._reset_rows, self._resets_itself = reset_rows, resets_itself
        self._random_state = torch.get_rng_state()
        self._now: Values = {}
        self._first: Values = {}
        # Bool `[B]`: rows that only the simulator has reset.
        self._has_begun: Any = False

    def reset(self, seed: int, mask: np.ndarray | None = None) -> Values:
        import torch

        with self._alone():
            if mask is None:
                self._has_begun = False
                self._now = _of_tensors(self.env.reset(seed=seed)[0])
                return self._now
            rows = mask.reshape(-1)
            begun = rows & self._has_begun
            left = rows & ~begun
            self._now = _chosen(begun, self._first, self._now)
            if left.any():
                ids = torch.from_numpy(np.flatnonzero(left))
                self._now = _chosen(
                    left, _of_tensors(self._reset_rows(self.env, ids)), self._now
                )
            self._has_begun = self._has_begun & ~rows
        return self._now

    def step(self, action: Mapping[Key, np.ndarray]) -> Result:
        import torch

        with self._alone():
            observations, reward, *flags, extras = self.env.step(
                torch.from_numpy(action["action",].copy())
            )
        terminated, truncated = (flag.numpy().copy() for flag in flags)
        self._now = _of_tensors(observations)
        ended = terminated | truncated
        if self._resets_itself and ended.any():
            self._first, self._has_begun = self._now, ended
            final = next(
                extras[name]
                for name in ("final_obs", "final_observation")
                if name in extras
            )
            self._now = _chosen(ended, _of_tensors(final), self._now)
        return self._now, {("reward",): reward.numpy().copy()}, terminated, truncated

    def close(self) -> None:
        self.env.close()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        import torch

        before = torch.get_rng_state()
        torch.set_rng_state(self._random_state)
        yield
        self._random_state = torch.get_rng_state()
        torch.set_rng_state(before)


def _stacked(rows: Sequence[Values]) -> Values:
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def _copied(values: Values) -> Values:
    return {key: np.array(value) for key, value in values.items()}


def _of_tensors(observations: Any, key: Key = ()) -> Values:
    if not isinstance(observations, Mapping):
        return {key or ("observation",): observations.numpy().copy()}
    return {
        k: v
        for name, item in observations.items()
        for k, v in _of_tensors(item, (*key, str(name))).items()
    }


def _chosen(rows: np.ndarray, values: Values, others: Values) -> Values:
    """Return `values` in some rows and `others` in the rest."""
    if not rows.any():
        return others
    return {
        key: np.where(rows.reshape(-1, *(1,) * (other.ndim - 1)), values[key], other)
        for key, other in others.items()
    }
