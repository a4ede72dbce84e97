"""The results of an evaluation: records of episodes (returns, lengths, success), and measures computed from these.

- Per-capita return: the mean over agents of their returns in an episode. Melting Pot uses that of the focal agents
  as score (Agapiou et al. 2022, "Melting Pot 2.0", arXiv:2211.13746).
- Collective return: the sum over all agents.
- Equality: one minus the Gini coefficient of the returns, `1 - sum_ij |R_i - R_j| / (2 P sum_i R_i)` (Perolat et al.
  2017, "A multi-agent reinforcement learning model of common-pool resource appropriation", arXiv:1707.06600).
- Success: the share of episodes, with the score interval of Wilson (1927, "Probable inference, the law of succession,
  and statistical inference"), which Brown, Cai and DasGupta (2001, "Interval estimation for a binomial proportion")
  recommend for few episodes.

Confidence intervals of means are from a percentile bootstrap over episodes (Efron 1979) with a fixed seed. They are too
narrow for a few episodes, and undefined for one. Over several tasks, episodes are drawn anew within each task (the
stratified bootstrap of Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice",
arXiv:2108.13264).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

SCHEMA = "envherd.evaluation/2"
SUITE_SCHEMA = "envherd.evaluations/2"
_NUM_RESAMPLES = 10_000
#: The 97.5 % quantile of the standard normal distribution.
_Z = 1.959963984540054


@dataclass(frozen=True, kw_only=True)
class EpisodeRecord:
    """One episode of an evaluation.

    Attributes:
        episode: its number in its task, from 0.
        seed: of its reset.
        length: in steps.
        returns: of each agent; of a failed episode, until the failure.
        success: what the env reported in its last step, or what `success=` returned; None without either.
        success_once: whether the env reported success in any step; None if it reports none.
        error: of an episode that failed: what the env or its worker raised. None for an episode that has ended.
    """

    episode: int
    seed: int
    length: int = 0
    returns: tuple[float, ...] = ()
    success: bool | None = None
    success_once: bool | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Cast:
    """Who plays in a task.

    Attributes:
        env: name of the env.
        players: their names; "agent" in an env of one agent.
        roles: one per agent.
        is_focal: one per agent.
    """

    env: str
    players: tuple[str, ...] = ("agent",)
    roles: tuple[str, ...] = ("default",)
    is_focal: tuple[bool, ...] = (True,)


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
        return f"{self.mean:.2f}" + (
            "" if math.isnan(self.low) else f" [{self.low:.2f}, {self.high:.2f}]"
        )


class Rate(NamedTuple):
    """A share of episodes with its 95 % confidence interval (Wilson's score interval).

    Attributes:
        rate: NaN without episodes.
        low: likewise.
        high: likewise.
        num_successes: number of episodes that succeeded.
        num_episodes: of these episodes.
    """

    rate: float
    low: float
    high: float
    num_successes: int
    num_episodes: int

    def __str__(self) -> str:
        """Return the rate, the interval in brackets, and the two numbers."""
        if not self.num_episodes:
            return "undefined"
        numbers = f"({self.num_successes}/{self.num_episodes})"
        return f"{self.rate:.2f} [{self.low:.2f}, {self.high:.2f}] {numbers}"


def rate_of(num_successes: int, num_episodes: int) -> Rate:
    """Return a success rate and its interval."""
    if not num_episodes:
        return Rate(math.nan, math.nan, math.nan, 0, 0)
    rate = num_successes / num_episodes
    spread = _Z**2 / num_episodes
    middle = (rate + spread / 2) / (1 + spread)
    half = math.sqrt(rate * (1 - rate) * spread + spread**2 / 4) / (1 + spread)
    return Rate(
        rate,
        max(0.0, middle - half),
        min(1.0, middle + half),
        num_successes,
        num_episodes,
    )


def interval_of(*tasks: np.ndarray) -> Interval:
    """Return the mean of values `[E]`, one per episode, and its interval; NaNs are left out.

    Args:
        *tasks: the values of each task. The mean over tasks is that of the tasks' means.
    """
    counted = [values[~np.isnan(values)] for values in tasks]
    counted = [values for values in counted if len(values)]
    number = sum(map(len, counted))
    mean = (
        float(np.mean([values.mean() for values in counted])) if counted else math.nan
    )
    if number < 2 or number == len(counted):
        return Interval(mean, math.nan, math.nan, number)
    rng = np.random.default_rng(0)
    drawn = [
        values[rng.integers(0, len(values), (_NUM_RESAMPLES, len(values)))].mean(1)
        for values in counted
    ]
    low, high = np.percentile(np.mean(drawn, axis=0), [2.5, 97.5])
    return Interval(mean, float(low), float(high), number)


def equality_of(returns: np.ndarray) -> np.ndarray:
    """Return the equality of returns `[E, P]` in each episode, `[E]`: 1 if all are equal, 1/P if one agent has it all.

    It is NaN for an episode in which a return is negative or all are 0, for which the Gini coefficient is undefined.
    """
    total = returns.sum(1)
    differences = np.abs(returns[:, :, None] - returns[:, None, :]).sum((1, 2))
    is_defined = (returns >= 0).all(1) & (total > 0)
    gini = np.divide(
        differences,
        2 * returns.shape[1] * total,
        out=np.full(len(total), np.nan),
        where=is_defined,
    )
    return np.asarray(1 - gini)


class RoleKind(NamedTuple):
    """A kind of agents of an env.

    Attributes:
        role: of the agents.
        is_focal: whether they are focal.
    """

    role: str
    is_focal: bool


@dataclass(frozen=True, kw_only=True, repr=False)
class Evaluation(Cast):
    """Episodes of one task. Those that failed are in `failures`, and are not counted elsewhere, unless stated.

    Attributes:
        env: its name.
        players: their names; "agent" in an env of one agent.
        roles: one per agent.
        is_focal: one per agent; the others are background agents.
        seed: the root seed of the episodes.
        episodes: records of all E episodes that ended, in order.
        failures: records of the episodes that failed: their env raised or broke its spec, or its worker was lost.
    """

    seed: int
    episodes: tuple[EpisodeRecord, ...] = ()
    failures: tuple[EpisodeRecord, ...] = ()

    @classmethod
    def of(
        cls, cast: Cast, seed: int, records: Sequence[EpisodeRecord]
    ) -> "Evaluation":
        """Return the results of a task."""
        ended = tuple(one for one in records if one.error is None)
        failures = tuple(one for one in records if one.error is not None)
        return cls(**vars(cast), seed=seed, episodes=ended, failures=failures)

    def __repr__(self) -> str:
        """Return the env's name, the numbers of episodes, and their measures."""
        measures = {
            "mean_return": self.mean_return,
            "length": self.length,
            "success": self.success,
        }
        shown = "".join(
            f", {name}={one}" for name, one in measures.items() if one is not None
        )
        return f"Evaluation({self.env!r}, {self.num_episodes} episodes, {self.num_failed} failed{shown})"

    @cached_property
    def returns(self) -> np.ndarray:
        """Returns of the episodes that ended, float64 `[E, P]`."""
        returns = np.array([one.returns for one in self.episodes], np.float64)
        return returns.reshape(-1, len(self.players))

    @cached_property
    def lengths(self) -> np.ndarray:
        """Lengths of these in steps, int64 `[E]`."""
        return np.array([one.length for one in self.episodes], np.int64)

    @property
    def num_episodes(self) -> int:
        """Number of episodes that ended, E."""
        return len(self.episodes)

    @property
    def num_failed(self) -> int:
        """Number of episodes that failed."""
        return len(self.failures)

    @property
    def success(self) -> Rate | None:
        """Share of the episodes that ended which were successful in their last step; None if no env reports it.

        Some envs report success only where there is one. So an episode without the entry counts as not successful if
        another episode of the task has it.
        """
        return self._rate(lambda one: one.success)

    @property
    def success_once(self) -> Rate | None:
        """Likewise, of the episodes that were successful in any step."""
        return self._rate(lambda one: one.success_once)

    def _rate(self, success_of: Callable[[EpisodeRecord], bool | None]) -> Rate | None:
        found = [success_of(one) for one in self.episodes]
        return (
            None
            if all(one is None for one in found)
            else rate_of(sum(map(bool, found)), len(found))
        )

    @cached_property
    def length(self) -> Interval:
        """Mean length of the episodes, in steps."""
        return interval_of(self.lengths.astype(float))

    @cached_property
    def mean_return(self) -> Interval:
        """Mean return; of several agents, the mean over all of them."""
        return interval_of(self.returns.mean(1))

    @cached_property
    def focal_per_capita(self) -> Interval:
        """Mean over the focal agents of their returns."""
        return self._per_capita(np.array(self.is_focal))

    @cached_property
    def background_per_capita(self) -> Interval | None:
        """Mean over the background agents of their returns; None without any (a scenario's bots do not count)."""
        others = ~np.array(self.is_focal)
        return self._per_capita(others) if others.any() else None

    @cached_property
    def collective(self) -> Interval:
        """Sum over all agents of their returns."""
        return interval_of(self.returns.sum(1))

    @cached_property
    def equality(self) -> Interval:
        """One minus the Gini coefficient of the returns of all agents; see `equality_of`."""
        return interval_of(equality_of(self.returns))

    @cached_property
    def by_role(self) -> dict[RoleKind, Interval]:
        """Per-capita return by role and whether the agents are focal, in the order of the agents."""
        kinds = list(map(RoleKind, self.roles, self.is_focal))
        return {
            kind: self._per_capita(np.array([one == kind for one in kinds]))
            for kind in dict.fromkeys(kinds)
        }

    @cached_property
    def by_player(self) -> dict[str, Interval]:
        """Return of each agent."""
        return {
            name: interval_of(self.returns[:, player])
            for player, name in enumerate(self.players)
        }

    def _per_capita(self, chosen: np.ndarray) -> Interval:
        return interval_of(self.returns[:, chosen].mean(1))

    def to_dict(self) -> dict[str, Any]:
        """Return the measures, returns and lengths as plain data for `json.dump`; measures that are NaN become None."""
        return {
            "schema": SCHEMA,
            "env": self.env,
            "seed": self.seed,
            "episodes": self.num_episodes,
            "failed": self.num_failed,
            "success": _plain(self.success),
            "success_once": _plain(self.success_once),
            "length": _plain(self.length),
            "focal_per_capita": _plain(self.focal_per_capita),
            "background_per_capita": _plain(self.background_per_capita),
            "collective": _plain(self.collective),
            "equality": _plain(self.equality),
            "by_role": [
                {"role": kind.role, "focal": kind.is_focal, **_plain(one)}
                for kind, one in self.by_role.items()
            ],
            "by_player": [
                {"player": name, "role": role, "focal": focal, **_plain(one)}
                for (name, one), role, focal in zip(
                    self.by_player.items(),
                    self.roles,
                    self.is_focal,
                    strict=True,
                )
            ],
            "returns": self.returns.tolist(),
            "lengths": self.lengths.tolist(),
            "failures": [asdict(one) for one in self.failures],
        }


@dataclass(frozen=True, repr=False)
class Evaluations:
    """The results of several tasks.

    Attributes:
        tasks: name -> results.
    """

    tasks: dict[str, Evaluation]

    def __repr__(self) -> str:
        """Return a line for each task."""
        lines = (f"  {name!r}: {one!r}," for name, one in self.tasks.items())
        return "\n".join(["Evaluations(", *lines, ")"])

    def __getitem__(self, name: str) -> Evaluation:
        """Return the results of a task."""
        return self.tasks[name]

    @property
    def num_failed(self) -> int:
        """Number of episodes that failed."""
        return sum(one.num_failed for one in self.tasks.values())

    @property
    def success(self) -> Rate | None:
        """Share of the episodes of all tasks that report success, each episode counted once; see `Evaluation`."""
        known = [
            rate for one in self.tasks.values() if (rate := one.success) is not None
        ]
        num_successes = sum(rate.num_successes for rate in known)
        num_episodes = sum(rate.num_episodes for rate in known)
        return rate_of(num_successes, num_episodes) if known else None

    @cached_property
    def mean_return(self) -> Interval:
        """Mean over tasks of `Evaluation.mean_return`."""
        return interval_of(*(one.returns.mean(1) for one in self.tasks.values()))

    @cached_property
    def focal_per_capita(self) -> Interval:
        """Mean over tasks of the return per capita of the focal agents (of the return, with one agent)."""
        return interval_of(
            *(one.returns[:, list(one.is_focal)].mean(1) for one in self.tasks.values())
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the measures over all tasks, and those of each task, as plain data for `json.dump`."""
        return {
            "schema": SUITE_SCHEMA,
            "failed": self.num_failed,
            "success": _plain(self.success),
            "focal_per_capita": _plain(self.focal_per_capita),
            "tasks": {name: one.to_dict() for name, one in self.tasks.items()},
        }


def _plain(measure: Interval | Rate | None) -> Any:
    """Return the numbers by name, None for NaN; None without a measure."""
    if measure is None:
        return None
    return {
        name: None if math.isnan(value) else value
        for name, value in measure._asdict().items()
    }
