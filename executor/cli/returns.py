"""Returns per agent, summed while a rollout runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from envherd.shm.specs import EnvSpec, Key, LeafSpec


@dataclass(frozen=True)
class ReturnSummary:
    """Mean returns of the agents.

    Attributes:
        num_episodes: number of episodes that ended, without those that the loss of a worker interrupted.
        per_agent: agent name -> mean return of those episodes; if none ended, of the unfinished episodes.
        is_partial: no episode ended, so the means are those of unfinished episodes.
    """

    num_episodes: int
    per_agent: Mapping[str, float]
    is_partial: bool


@dataclass
class ReturnMeter:
    """Sums rewards; one column per agent, one row per env (or per row of envs that are batches).

    Attributes:
        agents: names of the columns.
        running: float64 `[rows, agents]`, returns of the current episodes.
        total: float64 `[agents]`, sum of the returns of the episodes that ended.
        num_episodes: number of episodes that ended and count.
    """

    agents: tuple[str, ...]
    num_rows: int
    running: np.ndarray = field(init=False)
    total: np.ndarray = field(init=False)
    num_episodes: int = 0

    def __post_init__(self) -> None:
        self.running = np.zeros((self.num_rows, len(self.agents)))
        self.total = np.zeros(len(self.agents))

    @classmethod
    def for_spec(cls, spec: EnvSpec, num_envs: int) -> ReturnMeter:
        """Return a meter for `num_envs` envs that share a spec."""
        names = [name for leaf in spec.reward for name in _column_names(spec, leaf)]
        return cls(tuple(names), num_envs * int(np.prod(spec.batch_shape, dtype=int)))

    def add(self, rewards: Sequence[np.ndarray], done: np.ndarray, interrupted: np.ndarray | None = None) -> None:
        """Count one step of all envs.

        Args:
            rewards: one array per reward leaf, rows first; read, not stored.
            done: bool, one value per row: the episode ended with this step.
            interrupted: bool, likewise: the loss of a worker ended the episode, and its return does not count.
        """
        columns = [np.asarray(reward, np.float64).reshape(self.num_rows, -1) for reward in rewards]
        self.running += columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)
        ended = np.asarray(done, bool).reshape(self.num_rows)
        if not ended.any():
            return
        counted = ended if interrupted is None else ended & ~np.asarray(interrupted, bool).reshape(self.num_rows)
        self.total += self.running[counted].sum(axis=0)
        self.num_episodes += int(counted.sum())
        self.running[ended] = 0.0

    def summary(self) -> ReturnSummary:
        """Return the means so far."""
        is_partial = self.num_episodes == 0
        means = self.running.mean(axis=0) if is_partial else self.total / self.num_episodes
        return ReturnSummary(self.num_episodes, dict(zip(self.agents, means.tolist(), strict=True)), is_partial)


def _column_names(spec: EnvSpec, leaf: LeafSpec) -> list[str]:
    inner = len(spec.batch_shape)
    count = int(np.prod(leaf.shape[inner:], dtype=int))
    names = spec.metadata.get("agent_names")
    group = next((shape[inner:] for key, shape in spec.groups if key == leaf.key[:-1]), None)
    if isinstance(names, (list, tuple)) and len(names) == count and len(spec.reward) == 1:
        return [str(name) for name in names]
    label = _label(leaf.key, has_group=group is not None)
    return [label] if count == 1 else [f"{label}_{i}" for i in range(count)]


def _label(key: Key, *, has_group: bool) -> str:
    if len(key) == 1:
        return "agent" if key == ("reward",) else key[0]
    return key[-2] if has_group or key[-1] == "reward" else "/".join(key)
