"""Envs that tests of the cluster command from outside, through files."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from envherd.workers.adapters.base import StepValues
from envherd.workers.testing import CountingEnv


class GatedEnv(CountingEnv):
    """Steps only while a file is there.

    Args:
        gate: the file's path.
    """

    def __init__(self, gate: str) -> None:
        super().__init__(1_000)
        self._gate = Path(gate)

    def step(self, action: list[Any]) -> StepValues:
        """Wait for the file, after making one of the same name that ends with "-waits-" and this process's id."""
        if not self._gate.exists():
            Path(f"{self._gate}-waits-{os.getpid()}").touch()
        while not self._gate.exists():
            time.sleep(0.002)
        return super().step(action)


class OnceEnv(CountingEnv):
    """Can be built only once, which a file records. Its episodes have two steps.

    Args:
        flag: the file's path.
    """

    def __init__(self, flag: str) -> None:
        if Path(flag).exists():
            os._exit(3)
        Path(flag).touch()
        super().__init__(2)


class Counter(torch.nn.Module):
    """A policy whose action is the step counter plus its one weight, modulo 5."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(1))

    def forward(self, td: Any) -> Any:
        """Set the action."""
        return td.set("action", (td["observation"][..., 1] + self.shift.long()) % 5)


class HeldCounter(Counter):
    """The same with an attribute that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.held = (number for number in range(3))
