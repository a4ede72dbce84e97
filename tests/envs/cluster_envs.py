"""Policies for tests of the cluster."""

from typing import Any

import torch


class Counter(torch.nn.Module):
    """A policy whose action is the step counter plus its one weight, modulo 5."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, td: Any) -> Any:
        """Set the action."""
        return td.set("action", (td["observation"][..., 1] + self.shift.long()) % 5)


class HeldCounter(Counter):
    """The same with an attribute that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.held = (number for number in range(3))


class Sampler(Counter):
    """Draws its actions; its own state, `count`, grows by 1 with each step."""

    def forward(self, td: Any) -> Any:
        """Set the action, and the state."""
        count = td.get("count", torch.zeros(td.batch_size, dtype=torch.int64))
        td["next"] = {"count": count + 1}
        return td.set("action", torch.randint(0, 5, td.batch_size)).set("count", count)
