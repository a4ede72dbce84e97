"""The size of sweeps: `make test` runs a part, `make test-full` (ENVHERD_FULL=1) all of them."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

IS_FULL = os.environ.get("ENVHERD_FULL") == "1"


def scaled(part: T, full: T) -> T:
    """Return what an ordinary run uses, or what a full one does."""
    return full if IS_FULL else part
