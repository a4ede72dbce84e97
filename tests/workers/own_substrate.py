"""A factory as users write it by hand: a function that imports and builds a substrate, in a light module."""

from __future__ import annotations

from typing import Any


def build_substrate() -> Any:
    """Return a substrate for two players."""
    from meltingpot import substrate

    return substrate.build("collaborative_cooking__cramped", roles=["default"] * 2)
