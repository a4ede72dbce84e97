"""The batch that was received last; `current` and `send` for the same envs reuse it."""

from __future__ import annotations

import operator
from typing import NamedTuple

import numpy as np
import torch

from envherd.executor.batches.hand_out import Leaves

_version = operator.attrgetter("_version")  # counts writes


class Received(NamedTuple):
    """See the module.

    Attributes:
        ids: its `env_ids`, and `version`, their count of writes.
        env_ids: the same.
        leaves: of its `next`; None if they are not the envs' present roots.
        num_writes: number of writes to these leaves when it was received.
        stamp: numbers of the latest command and of losses; if these have changed, `leaves` are outdated.
    """

    ids: torch.Tensor
    version: int
    env_ids: np.ndarray
    leaves: Leaves | None
    num_writes: int
    stamp: tuple[int, int]


def num_writes(leaves: Leaves) -> int:
    """Return how often torch has written to some tensors in place."""
    return sum(map(_version, leaves))
