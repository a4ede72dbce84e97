"""Statistics of the episodes that end, for facades that put them into infos."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from envherd.shm.layout import Name
from envherd.shm.slab import Slab
from envherd.shm.specs import EPISODE_KEYS


class EpisodeColumns:
    """Reads returns, lengths and times from the slab's rows.

    Args:
        slab: of envs with `ExecutorOptions.episode_statistics`.
        num_agents: rows of an env, each with its own return.
    """

    def __init__(self, slab: Slab, num_agents: int = 1) -> None:
        self._shape = (slab.plan.num_envs, num_agents)
        self._groups = [
            (np.array(group.plan.env_ids), [_arrays(group.columns, key) for key in group.spec.metadata[EPISODE_KEYS]])
            for group in slab.groups
        ]

    @classmethod
    def of(cls, slab: Slab, num_agents: int = 1) -> EpisodeColumns | None:
        """Return what reads the statistics, or None if the envs have none."""
        return cls(slab, num_agents) if slab.groups[0].spec.episode_keys else None

    def read(self, column: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return returns float64 `[N, agents]`, lengths int64 `[N]` and seconds float64 `[N]` of a step; own memory."""
        returns = np.zeros(self._shape)
        lengths, seconds = np.zeros(self._shape[0], np.int64), np.zeros(self._shape[0])
        for env_ids, (own_returns, *_, own_lengths, own_seconds) in self._groups:
            returns[env_ids] = own_returns[column].reshape(len(env_ids), -1)
            lengths[env_ids], seconds[env_ids] = own_lengths[column][:, 0], own_seconds[column][:, 0]
        return returns, lengths, seconds


def _arrays(columns: Mapping[Name, np.ndarray], key: list[str]) -> np.ndarray:
    return columns["next", *key]
