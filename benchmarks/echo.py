"""A no-op env of any spec: the time of its step is the executor's cost. Its episodes do not end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from envherd.shm.specs import Box, EnvSpec, LeafSpec
from envherd.workers.adapters.base import Adapter, StepValues


class EchoAdapter(Adapter):
    """Returns the same values of a spec in every reset and step."""

    family: ClassVar[str] = "echo"

    def __init__(self, spec: EnvSpec) -> None:
        self.env = self
        self.spec = spec
        self._observation = [_value(leaf) for leaf in spec.observation]
        self._reward = [_value(leaf) for leaf in spec.reward]
        self._done = [_value(leaf) for leaf in spec.done[3:]]
        self._flag: Any = np.zeros((*spec.batch_shape, 1), bool) if spec.batch_shape else False

    def reset(
        self,
        seed: int | None,  # noqa: ARG002
        options: Mapping[str, Any] | None = None,  # noqa: ARG002
        mask: np.ndarray | None = None,  # noqa: ARG002
    ) -> list[Any]:
        """See `Adapter.reset`."""
        return list(self._observation)

    def step(self, action: list[Any]) -> StepValues:  # noqa: ARG002  # any action
        """See `Adapter.step`."""
        return list(self._observation), list(self._reward), self._flag, self._flag

    def done_values(self) -> list[Any]:
        """See `Adapter.done_values`."""
        return list(self._done)

    def close(self) -> None:
        """Nothing to close."""


@dataclass(frozen=True)
class EchoFactory:
    """Builds an `EchoAdapter`; `spec` is an `EnvSpec` as plain data."""

    spec: Any

    def __call__(self) -> EchoAdapter:
        """Build it."""
        return EchoAdapter(EnvSpec.from_plain(self.spec))


def _value(leaf: LeafSpec) -> Any:
    """Return a legal value of a leaf."""
    if leaf.is_side:
        return ""
    value = np.zeros(leaf.shape, leaf.dtype)
    if isinstance(leaf.domain, Box):
        low, high = np.nan_to_num(leaf.domain.low), np.nan_to_num(leaf.domain.high)
        value = np.clip(value, low, high).astype(leaf.dtype).reshape(leaf.shape)
    return value
