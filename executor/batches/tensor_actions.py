"""Actions for envs in this process that take tensors: the caller's tensors are checked and passed on.

Guarantees: a whole batch is checked before the first env gets its action, as in `batches.actions`. An env gets one row
of the caller's memory, on any device; the executor only reads it. `current` returns the latest inputs, even if the
caller has changed the tensor since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from envherd.executor.batches.actions import GroupIntake, Present, to_numpy
from envherd.executor.options import ActionCheck
from envherd.shm.slab import GroupSlab
from envherd.shm.specs import Box, Discrete, LeafSpec, MultiDiscrete

#: `(env id, one tensor per input leaf) -> None`: sets the inputs of the env's next step.
Lend = Callable[[int, list[torch.Tensor]], None]


class LendingIntake(GroupIntake):
    """Checks the inputs of one group of equal envs and lends them to the envs.

    Args:
        slab: the group's arrays; they keep the latest inputs that were on the CPU.
        level: see `ExecutorOptions.check_actions`.
        lend: passes inputs to an env.
        present: see `GroupIntake`.
    """

    def __init__(self, slab: GroupSlab, level: ActionCheck, lend: Lend, present: Present | None = None) -> None:
        super().__init__(slab, level, present)
        self._lend = lend
        self._level = level
        self._kept: dict[int, list[torch.Tensor]] = {}

    def _compile(self) -> None:
        """Leave every batch to `read` and `write`."""

    def read(self, td: TensorDictBase, rows: np.ndarray | None) -> list[Any]:
        """Return the checked inputs, one tensor `[k, ...]` per leaf: the caller's own (VIEW) where they fit.

        Raises:
            ActionError: as of `GroupIntake.read`.
        """
        num_rows = len(self._env_ids) if rows is None else len(rows)
        values = []
        for index, leaf in enumerate(self.leaves):
            value = self._get(td, leaf, rows)
            if isinstance(value, torch.Tensor) and self._fits(index, value, num_rows):
                values.append(value.detach())
            else:
                values.append(torch.from_numpy(np.ascontiguousarray(self._read_leaf(index, value, rows))))
        return values

    def write(self, values: Sequence[Any], rows: np.ndarray | None) -> None:
        """Lend what `read` returned."""
        if all(value.is_cpu for value in values):
            super().write([value.numpy() for value in values], rows)
            self._kept.clear()
        for position, row in enumerate(range(len(self._env_ids)) if rows is None else rows.tolist()):
            own = [value[position] for value in values]
            if not all(value.is_cpu for value in own):
                self._kept[row] = [value.clone() for value in own]
            self._lend(self._env_ids[row], own)

    def current(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return the latest inputs of some rows, as fresh arrays."""
        arrays = super().current(rows)
        for position, row in enumerate(rows.tolist()):
            for array, kept in zip(arrays, self._kept.get(row, ()), strict=False):
                array[position] = to_numpy(kept)
        return arrays

    def _fits(self, index: int, value: torch.Tensor, num_rows: int) -> bool:
        leaf = self.leaves[index]
        is_alike = value.shape == (num_rows, *leaf.shape) and str(value.dtype).removeprefix("torch.") == leaf.dtype
        return is_alike and (self._checks[index] is None or is_legal(leaf, value, self._level))


#: Integers that torch cannot compare.
_NOT_COMPARED = frozenset({torch.uint16, torch.uint32, torch.uint64})


def is_legal(leaf: LeafSpec, value: torch.Tensor, level: ActionCheck) -> bool:
    """Return whether all values are known to be legal, checked on their device; `GroupIntake` decides the rest."""
    if level == "off":
        return True
    domain = leaf.domain
    if value.dtype in _NOT_COMPARED:
        return False
    if isinstance(domain, Discrete):
        return bool(((value >= 0) & (value <= domain.n - 1)).all())  # n itself may be too large for the dtype
    if isinstance(domain, MultiDiscrete):
        return bool(((value >= 0) & (value < torch.as_tensor(domain.nvec, device=value.device))).all())
    if not value.dtype.is_floating_point:
        return False
    if isinstance(domain, Box) and level == "strict":
        bounds = (np.asarray(domain.low), np.asarray(domain.high))
        # With a dimension: torch would round a bound without one to the dtype of the values.
        low, high = (torch.as_tensor(bound, device=value.device).reshape(bound.shape or (1,)) for bound in bounds)
        return bool(((value >= low) & (value <= high)).all())
    return bool(torch.isfinite(value).all())
