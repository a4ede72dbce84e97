"""How a training loop drives an executor."""

from __future__ import annotations

from typing import Literal

#: "sync": a step of all envs at a time. "first-k": `send`, and `recv` of the half that is ready first.
#: "two-groups": one half of the envs steps while the policy acts on the other.
Mode = Literal["sync", "first-k", "two-groups"]
MODES: tuple[Mode, ...] = ("sync", "first-k", "two-groups")
