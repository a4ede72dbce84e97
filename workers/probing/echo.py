"""An env that looks like another and does nothing, or computes for a while: what remains is what we cost.

It gives the same arrays again and again. Its episodes have no end, or end as often as the other's.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from envherd.shm.specs import Box, EnvSpec, LeafSpec
from envherd.workers.adapters.base import Adapter, StepValues


class EchoAdapter(Adapter):
    """Gives the same values of a spec again and again.

    Args:
        spec: whose values.
        work: iterations of an empty loop in each step.
        end_share: steps that end an episode, of all; an env of several rows never does.
    """

    family: ClassVar[str] = "echo"

    def __init__(self, spec: EnvSpec, work: int = 0, end_share: float = 0.0) -> None:
        self.env = self
        self._end_share = 0.0 if spec.batch_shape else end_share
        self._random = random.Random(0).random
        self._work = range(work)
        self.spec = spec
        self._observation = [_value(leaf) for leaf in spec.observation]
        self._reward = [_value(leaf) for leaf in spec.reward]
        self._done = [_value(leaf) for leaf in spec.done[3:]]
        self._flag: Any = np.zeros((*spec.batch_shape, 1), bool) if spec.batch_shape else False

    def reset(
        self,
        seed: int | None,
        options: Mapping[str, Any] | None = None,  # noqa: ARG002
        mask: np.ndarray | None = None,  # noqa: ARG002
    ) -> list[Any]:
        """See `Adapter.reset`."""
        if self._end_share:
            self._random = random.Random(seed).random
        return list(self._observation)

    def step(self, action: list[Any]) -> StepValues:  # noqa: ARG002  # whatever it is
        """See `Adapter.step`."""
        for _ in self._work:
            pass
        ends = self._random() < self._end_share if self._end_share else self._flag
        return list(self._observation), list(self._reward), ends, self._flag

    def done_values(self) -> list[Any]:
        """See `Adapter.done_values`."""
        return list(self._done)

    def close(self) -> None:
        """Nothing to close."""


@dataclass(frozen=True)
class EchoFactory:
    """Builds an `EchoAdapter`; `spec` is an `EnvSpec` as plain data."""

    spec: Any
    work: int = 0
    end_share: float = 0.0

    def __call__(self) -> EchoAdapter:
        """Build it."""
        return EchoAdapter(EnvSpec.from_plain(self.spec), self.work, self.end_share)


def _value(leaf: LeafSpec) -> Any:
    """Return a legal value of a leaf."""
    if leaf.is_side:
        return ""
    value = np.zeros(leaf.shape, leaf.dtype)
    if isinstance(leaf.domain, Box):
        low, high = np.nan_to_num(leaf.domain.low), np.nan_to_num(leaf.domain.high)
        value = np.clip(value, low, high).astype(leaf.dtype).reshape(leaf.shape)
    return value
