"""The batch that was received last: a caller that asks where its envs are, or sends them on, is answered from it."""

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
        leaves: of its `next`; None where they do not say where the envs are.
        num_writes: to these, until it was received.
        stamp: the number of the latest command and of losses: with others, `leaves` are of the past.
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
