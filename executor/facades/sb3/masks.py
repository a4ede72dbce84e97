"""The legal actions of every row, for sb3-contrib's `MaskablePPO`, read from rows that the envs have written."""

from __future__ import annotations

from typing import Self

import numpy as np

from envherd.executor.facades.sb3.rows import Column
from envherd.executor.protocol.positions import Positions
from envherd.shm.specs import EnvSpec, Key

NAME = "action_mask"


class ActionMasks:
    """Reads masks where the envs are now.

    Args:
        positions: of the envs.
        key: of the mask's leaf.
        given: of the leaf that says whether the env gave a mask; None where it always does.
        num_agents: rows per env.
    """

    def __init__(self, positions: Positions, key: Key, given: Key | None, num_agents: int) -> None:
        self._positions = positions
        self._num_agents = num_agents
        self._masks = self._columns(key)
        self._given = None if given is None else self._columns(given)

    @classmethod
    def of(cls, positions: Positions, num_agents: int) -> Self | None:
        """Return what reads the masks of some envs; None where they have none.

        Masks are the leaf `action_mask` of a group of agents (PettingZoo), or the entry `action_mask` of infos that
        `ExecutorOptions(info_keys=("action_mask",))` makes a leaf.
        """
        specs = [group.spec for group in positions.slab.groups]
        key, given = _mask_key(specs[0])
        if not all(key in {leaf.key for leaf in spec.observation} for spec in specs):
            return None
        return cls(positions, key, given, num_agents)

    def read(self) -> np.ndarray:
        """Return which actions are legal now, bool `[num_rows, actions]`, a copy; all where the env gave no mask."""
        masks = self._now(self._masks).astype(bool)
        if self._given is not None:
            masks[~self._now(self._given)[:, 0].astype(bool)] = True
        return masks

    def _now(self, columns: tuple[Column, Column]) -> np.ndarray:
        after, fresh = columns
        positions = self._positions
        rows = after.read_each(positions.columns)
        if positions.in_root.any():
            is_fresh = np.repeat(positions.in_root, self._num_agents)
            rows[is_fresh] = fresh.read_each(positions.columns)[is_fresh]
        return rows

    def _columns(self, key: Key) -> tuple[Column, Column]:
        groups = self._positions.slab.groups
        env_ids = [np.array(group.plan.env_ids) for group in groups]
        num_rows = self._positions.slab.plan.num_envs * self._num_agents
        arrays = {section: [group.columns[section, *key] for group in groups] for section in ("next", "root")}
        width = arrays["next"][0][0, 0].size // self._num_agents
        after, fresh = (Column(arrays[section], env_ids, num_rows, (width,)) for section in ("next", "root"))
        return after, fresh


def _mask_key(spec: EnvSpec) -> tuple[Key, Key | None]:
    if spec.groups:
        return (*spec.groups[0][0], NAME), None
    return ("info", NAME), ("info", f"_{NAME}")
