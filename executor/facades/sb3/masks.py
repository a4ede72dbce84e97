"""Read the legal actions of every row from the slab, for sb3-contrib's `MaskablePPO`."""

from __future__ import annotations

from typing import Self

import numpy as np

from envherd.executor.facades.columns import LatestColumn
from envherd.executor.protocol.positions import Positions
from envherd.shm.specs import EnvSpec, Key

NAME = "action_mask"


class ActionMasks:
    """Reads the masks of the envs' present roots.

    Args:
        positions: of the envs.
        key: of the mask's leaf.
        given: key of the leaf that marks whether the env returned a mask; None if it always does.
        num_agents: rows per env.
    """

    def __init__(self, positions: Positions, key: Key, given: Key | None, num_agents: int) -> None:
        self._masks = _latest(positions, key, num_agents)
        self._given = None if given is None else _latest(positions, given, num_agents)

    @classmethod
    def of(cls, positions: Positions, num_agents: int) -> Self | None:
        """Return a reader of the envs' masks; None if they have none.

        Masks are the leaf `action_mask` of a group of agents (PettingZoo), or the entry `action_mask` of infos that
        `ExecutorOptions(infos=("action_mask",))` makes a leaf.
        """
        specs = [group.spec for group in positions.slab.groups]
        key, given = _mask_key(specs[0])
        if not all(key in {leaf.key for leaf in spec.observation} for spec in specs):
            return None
        return cls(positions, key, given, num_agents)

    def read(self) -> np.ndarray:
        """Return which actions are legal now, bool `[num_rows, actions]`, a copy; all if the env returned no mask."""
        masks = self._masks.read().astype(bool)
        if self._given is not None:
            masks[~self._given.read()[:, 0].astype(bool)] = True
        return masks


def _latest(positions: Positions, key: Key, num_agents: int) -> LatestColumn:
    slab = positions.slab
    width = slab.groups[0].columns["next", *key][0, 0].size // num_agents
    return LatestColumn(positions, key, slab.plan.num_envs * num_agents, (width,))


def _mask_key(spec: EnvSpec) -> tuple[Key, Key | None]:
    if spec.groups:
        return (*spec.groups[0][0], NAME), None
    return ("info", NAME), ("info", f"_{NAME}")
