"""Read the statistics of ended episodes, for facades that put them into infos."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from envherd.executor.facades.columns import Column
from envherd.shm.slab import Slab
from envherd.shm.specs import EPISODE_KEYS

#: Column of a step -> returns float64 `[N, agents]`, lengths int64 `[N]` and seconds float64 `[N]`; own memory.
ReadEpisodes = Callable[[int], tuple[np.ndarray, ...]]


def episode_reader(slab: Slab, num_agents: int = 1) -> ReadEpisodes | None:
    """Return the function that reads returns, lengths and times of a step; None if the envs have no statistics.

    Args:
        slab: of envs, perhaps with `ExecutorOptions.episode_statistics`.
        num_agents: rows of an env, each with its own return.
    """
    keys: list[Any] = [group.spec.metadata.get(EPISODE_KEYS) for group in slab.groups]
    if not keys[0]:
        return None
    kinds = ((0, (num_agents,), np.float64), (-2, (), np.int64), (-1, (), np.float64))
    columns = [
        (
            Column(
                slab, "next", [own[place] for own in keys], slab.plan.num_envs, shape
            ),
            dtype,
        )
        for place, shape, dtype in kinds
    ]
    return lambda column: tuple(
        leaf.read(column).astype(dtype) for leaf, dtype in columns
    )
