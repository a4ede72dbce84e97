"""Actions for a simulator that accepts tensors: the caller's tensors are checked on their device and passed on.

Guarantees: a whole batch is checked before the simulator gets it, as in `batches.actions`. The simulator gets the
caller's memory, on any device; the executor only reads it.
"""

import numpy as np
import torch
from tensordict import TensorDictBase

from envherd.executor.batches.actions import GroupIntake
from envherd.executor.batches.memory import Leaves
from envherd.executor.batches.transfer import as_array
from envherd.executor.options import ActionCheck
from envherd.shm.slab import GroupSlab
from envherd.shm.specs import Box, Discrete, LeafSpec, MultiDiscrete


class TensorIntake(GroupIntake):
    """Checks the inputs of one simulator.

    Args:
        slab: the arrays of its group, to which nothing is written.
        level: see `ExecutorOptions.check_actions`.
    """

    def __init__(self, slab: GroupSlab, level: ActionCheck) -> None:
        super().__init__(slab, level)
        self._level = level
        self._torch_dtypes = [getattr(torch, leaf.dtype) for leaf in self.leaves]

    def tensors(self, td: TensorDictBase) -> Leaves:
        """Return the checked inputs, one tensor `[1, ...]` per leaf: the caller's own (VIEW) where they fit.

        Raises:
            ActionError: as of `GroupIntake.read`.
        """
        tensors = []
        for index, leaf in enumerate(self.leaves):
            value = self._get(td, leaf, None)
            if isinstance(value, torch.Tensor) and self._fits(index, value):
                tensors.append(value.detach())
            else:
                tensors.append(
                    torch.from_numpy(
                        np.ascontiguousarray(self._read_leaf(index, value, None))
                    )
                )
        return tensors

    def _fits(self, index: int, value: torch.Tensor) -> bool:
        leaf = self.leaves[index]
        check = self._checks[index]
        if (
            value.is_meta
            or value.shape != (1, *leaf.shape)
            or value.dtype is not self._torch_dtypes[index]
        ):
            return False
        if check is None:
            return True
        return (
            check(as_array(value)) is None
            if value.is_cpu
            else is_legal(leaf, value, self._level)
        )


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
        # N itself may be too large for the dtype.
        return bool(((value >= 0) & (value <= domain.n - 1)).all())
    if isinstance(domain, MultiDiscrete):
        return bool(
            (
                (value >= 0)
                & (value < torch.as_tensor(domain.nvec, device=value.device))
            ).all()
        )
    if not value.dtype.is_floating_point:
        return False
    if isinstance(domain, Box) and level == "strict":
        # Torch rounds a bound without dimensions to the dtype of the values, so it gets one.
        low = torch.as_tensor(np.atleast_1d(domain.low), device=value.device)
        high = torch.as_tensor(np.atleast_1d(domain.high), device=value.device)
        return bool(((value >= low) & (value <= high)).all())
    return bool(torch.isfinite(value).all())
