"""The result of an evaluation: the return of each player in each episode, and measures computed from these.

- Per-capita return: the mean over players of their returns in an episode. Melting Pot uses that of the focal players
  as score (Agapiou et al. 2022, "Melting Pot 2.0", arXiv:2211.13746).
- Collective return: the sum over all players.
- Equality: one minus the Gini coefficient of the returns, `1 - sum_ij |R_i - R_j| / (2 P sum_i R_i)` (Perolat et al.
  2017, "A multi-agent reinforcement learning model of common-pool resource appropriation", arXiv:1707.06600).

Confidence intervals are those of the mean over episodes, from a percentile bootstrap with a fixed seed. They are too
narrow for a few episodes, and undefined for one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

SCHEMA = "envherd.evaluation/1"
_NUM_RESAMPLES = 10_000


class Interval(NamedTuple):
    """A mean over episodes with its 95 % confidence interval.

    Attributes:
        mean: NaN if it is undefined for every episode.
        low: NaN for fewer than two episodes.
        high: likewise.
        num_episodes: number of episodes for which the value is defined.
    """

    mean: float
    low: float
    high: float
    num_episodes: int

    def __str__(self) -> str:
        """Return the mean, and the interval in brackets."""
        if math.isnan(self.mean):
            return "undefined"
        return f"{self.mean:.2f}" + ("" if math.isnan(self.low) else f" [{self.low:.2f}, {self.high:.2f}]")


def interval_of(values: np.ndarray) -> Interval:
    """Return the mean of values `[E]`, one per episode, and its interval; NaNs are left out."""
    counted = values[~np.isnan(values)]
    if len(counted) < 2:
        return Interval(float(counted.mean()) if len(counted) else math.nan, math.nan, math.nan, len(counted))
    drawn = np.random.default_rng(0).integers(0, len(counted), (_NUM_RESAMPLES, len(counted)))
    low, high = np.percentile(counted[drawn].mean(1), [2.5, 97.5])
    return Interval(float(counted.mean()), float(low), float(high), len(counted))


def equality_of(returns: np.ndarray) -> np.ndarray:
    """Return the equality of returns `[E, P]` in each episode, `[E]`: 1 if all are equal, 1/P if one player has it all.

    It is NaN for an episode in which a return is negative or all are 0, for which the Gini coefficient is undefined.
    """
    total = returns.sum(1)
    differences = np.abs(returns[:, :, None] - returns[:, None, :]).sum((1, 2))
    is_defined = (returns >= 0).all(1) & (total > 0)
    gini = np.divide(differences, 2 * returns.shape[1] * total, out=np.full(len(total), np.nan), where=is_defined)
    return np.asarray(1 - gini)


@dataclass(frozen=True)
class Evaluation:
    """Returns of whole episodes.

    Attributes:
        env: its name.
        seed: the root seed of the episodes.
        players: their names.
        roles: one per player.
        is_focal: one per player; the others are background players.
        returns: float64 `[E, P]`.
        lengths: int64 `[E]`, in steps.
    """

    env: str
    seed: int
    players: tuple[str, ...]
    roles: tuple[str, ...]
    is_focal: tuple[bool, ...]
    returns: np.ndarray
    lengths: np.ndarray

    @property
    def num_episodes(self) -> int:
        """Number of episodes, E."""
        return len(self.returns)

    @cached_property
    def focal_per_capita(self) -> Interval:
        """Mean over the focal players of their returns."""
        return self._per_capita(np.array(self.is_focal))

    @cached_property
    def background_per_capita(self) -> Interval | None:
        """Mean over the background players of their returns; None without any (a scenario's bots do not count)."""
        others = ~np.array(self.is_focal)
        return self._per_capita(others) if others.any() else None

    @cached_property
    def collective(self) -> Interval:
        """Sum over all players of their returns."""
        return interval_of(self.returns.sum(1))

    @cached_property
    def equality(self) -> Interval:
        """One minus the Gini coefficient of the returns of all players; see `equality_of`."""
        return interval_of(equality_of(self.returns))

    @cached_property
    def by_role(self) -> dict[tuple[str, bool], Interval]:
        """Per-capita return by role and whether the players are focal, in the order of the players."""
        kinds = list(zip(self.roles, self.is_focal, strict=True))
        return {kind: self._per_capita(np.array([one == kind for one in kinds])) for kind in dict.fromkeys(kinds)}

    @cached_property
    def by_player(self) -> dict[str, Interval]:
        """Return of each player."""
        return {name: interval_of(self.returns[:, player]) for player, name in enumerate(self.players)}

    def _per_capita(self, chosen: np.ndarray) -> Interval:
        return interval_of(self.returns[:, chosen].mean(1))

    def to_dict(self) -> dict[str, Any]:
        """Return the measures, returns and lengths as plain data for `json.dump`; measures that are NaN become None."""
        return {
            "schema": SCHEMA,
            "env": self.env,
            "seed": self.seed,
            "episodes": self.num_episodes,
            "focal_per_capita": _plain(self.focal_per_capita),
            "background_per_capita": None if self.background_per_capita is None else _plain(self.background_per_capita),
            "collective": _plain(self.collective),
            "equality": _plain(self.equality),
            "by_role": [{"role": role, "focal": focal, **_plain(one)} for (role, focal), one in self.by_role.items()],
            "by_player": [
                {"player": name, "role": role, "focal": focal, **_plain(one)}
                for (name, one), role, focal in zip(self.by_player.items(), self.roles, self.is_focal, strict=True)
            ],
            "returns": self.returns.tolist(),
            "lengths": self.lengths.tolist(),
        }


def _plain(interval: Interval) -> dict[str, Any]:
    return {name: None if math.isnan(value) else value for name, value in interval._asdict().items()}
