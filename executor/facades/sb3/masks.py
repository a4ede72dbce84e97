"""Read the legal actions of every row from the slab, for sb3-contrib's `MaskablePPO`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from envherd.executor.facades.columns import LatestColumn
from envherd.executor.protocol.positions import Positions

NAME = "action_mask"


def mask_reader(
    positions: Positions, num_agents: int
) -> Callable[[], np.ndarray] | None:
    """Return the function that reads which actions are legal now; None if the envs have no masks.

    Masks are the leaf `action_mask` of a group of agents (PettingZoo), or the entry `action_mask` of infos that
    `ExecutorOptions(infos=("action_mask",))` makes a leaf. All actions are legal if the env returned no mask.

    Args:
        positions: of the envs.
        num_agents: rows per env.

    Returns:
        A function without arguments, which returns bool `[num_rows, actions]`, a copy.
    """
    slab = positions.slab
    specs, groups = [group.spec for group in slab.groups], slab.groups[0].spec.groups
    keys = [(*groups[0][0], NAME)] if groups else [("info", NAME), ("info", f"_{NAME}")]
    if not all(keys[0] in {leaf.key for leaf in spec.observation} for spec in specs):
        return None
    widths = [
        slab.groups[0].columns["next", *key][0, 0].size // num_agents for key in keys
    ]
    masks, *given = (
        LatestColumn(positions, key, slab.plan.num_envs * num_agents, (width,))
        for key, width in zip(keys, widths, strict=True)
    )

    def read() -> np.ndarray:
        legal = masks.read().astype(bool)
        for has_mask in given:
            legal[~has_mask.read()[:, 0].astype(bool)] = True
        return legal

    return read
