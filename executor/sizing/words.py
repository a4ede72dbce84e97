"""Numbers in words."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Return e.g. "1 env", "2 envs"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
