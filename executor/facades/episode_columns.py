"""Read the statistics of ended episodes, for facades that put them into infos."""

from __future__ import annotations

import numpy as np

from envherd.executor.facades.columns import Column
from envherd.shm.slab import Slab
from envherd.shm.specs import EPISODE_KEYS


class EpisodeColumns:
    """Reads returns, lengths and times from the slab's rows.

    Args:
        slab: of envs with `ExecutorOptions.episode_statistics`.
        num_agents: rows of an env, each with its own return.
    """

    def __init__(self, slab: Slab, num_agents: int = 1) -> None:
        keys = [group.spec.metadata[EPISODE_KEYS] for group in slab.groups]
        self._returns, self._lengths, self._seconds = (
            Column(slab, "next", [own[place] for own in keys], slab.plan.num_envs, shape)
            for place, shape in ((0, (num_agents,)), (-2, ()), (-1, ()))
        )

    @classmethod
    def of(cls, slab: Slab, num_agents: int = 1) -> EpisodeColumns | None:
        """Return a reader of the statistics, or None if the envs have none."""
        return cls(slab, num_agents) if slab.groups[0].spec.episode_keys else None

    def read(self, column: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return returns float64 `[N, agents]`, lengths int64 `[N]` and seconds float64 `[N]` of a step; own memory."""
        return (
            self._returns.read(column).astype(np.float64),
            self._lengths.read(column).astype(np.int64),
            self._seconds.read(column).astype(np.float64),
        )
