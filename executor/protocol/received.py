"""The batch that was received last; `current` and `send` for the same envs reuse it."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import numpy as np
import torch

from envherd.executor.batches.hand_out import Leaves

_version = operator.attrgetter("_version")  # counts writes


class Received(NamedTuple):
    """The batch that the latest `recv` returned.

    Attributes:
        ids: its `env_ids`, which the caller may have changed since.
        env_ids: the same, unchanged.
        leaves: of its `next`; None if they are not the envs' present roots.
        num_writes: torch's number of writes to these leaves when it was received.
        stamp: numbers of the latest command and of losses; if these have changed, `leaves` are outdated.
    """

    ids: torch.Tensor
    env_ids: np.ndarray
    leaves: Leaves | None
    num_writes: int
    stamp: tuple[int, int]

    def is_of(self, env_ids: Any) -> bool:
        """Return whether an object is `ids`, with the values that they had."""
        return env_ids is self.ids and self.ids.numpy().tobytes() == self.env_ids.tobytes()


def num_writes(leaves: Leaves) -> int:
    """Return how often torch has written to some tensors in place."""
    return sum(map(_version, leaves))
