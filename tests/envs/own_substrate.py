"""A user's handwritten factory: a function in a light module that imports and builds a substrate."""

from typing import Any


def build_substrate() -> Any:
    """Return a substrate for two players."""
    from meltingpot import substrate

    return substrate.build("collaborative_cooking__cramped", roles=["default"] * 2)
