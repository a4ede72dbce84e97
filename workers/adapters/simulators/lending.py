"""Actions as tensors for simulators that step many rows at once.

Guarantees
- An action reaches the simulator as a tensor without a round trip through numpy: in a worker it is a tensor over
  the slab itself (`torch.from_numpy` of a VIEW), in `SerialEnv(1, ...)` it is the caller's own tensor. For a
  simulator on a GPU, the actions are transferred once and nothing else is moved.
- A simulator that keeps a reference to its actions is detected and gets copies from then on, because the next step
  overwrites the slab.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from envherd.workers.errors import SpecError

Leaves = list[torch.Tensor]

#: Number of first steps whose actions are copied, to detect whether the simulator keeps them (some also keep the
#: previous ones).
_NUM_PROBED = 2


class Lender:
    """Passes actions as tensors, without a copy as long as the simulator does not keep them."""

    def __init__(self, device: torch.device, *, keeps_actions: bool | None) -> None:
        self._device = device
        self._is_on_cpu = device.type == "cpu"
        self._is_copying = bool(keeps_actions)
        self._num_left = _NUM_PROBED if keeps_actions is None else 0
        self._is_known = keeps_actions is not None
        self._lent: list[np.ndarray] = []

    def lend(self, values: Sequence[Any]) -> Leaves:
        """Return tensors on the simulator's device, over the same memory if that is the CPU."""
        tensors = []
        for value in values:
            if isinstance(value, torch.Tensor):  # the caller's own
                tensors.append(value.to(self._device))
                continue
            array = np.asarray(value)
            if self._is_on_cpu:
                # `array[...]` is a new object over the same memory, to which nothing else refers yet.
                array = (
                    array.copy() if self._is_copying or self._num_left else array[...]
                )
                self._lent.append(array)
            tensors.append(torch.from_numpy(array).to(self._device))
        return tensors

    def check(self, origin: str) -> None:
        """After a step, check by reference counts whether the simulator has kept the tensors that it was lent.

        Raises:
            SpecError: it has kept them for the first time now, after it was lent the slab itself.
        """
        lent = self._lent
        self._lent = []
        if self._is_known:
            return
        # Two references are expected: that of the list, and that of the call itself.
        is_kept = any(sys.getrefcount(lent[index]) > 2 for index in range(len(lent)))
        is_probe = self._num_left > 0
        self._num_left = max(0, self._num_left - bool(lent))
        if not is_kept:
            return
        self._is_known = self._is_copying = True
        if not is_probe:
            raise SpecError(
                f"step failed: expected an env that either always or never keeps its actions, got one that began to "
                f"(built by {origin}); the next action would overwrite them. Return the adapter from the factory, "
                f"with keeps_actions=True, or clone() the actions in the env."
            )
