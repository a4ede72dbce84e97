"""The size of sweeps: `make test` runs a part, `make test-full` (ENVHERD_FULL=1) all of them."""

import os
from typing import TypeVar

T = TypeVar("T")

IS_FULL = os.environ.get("ENVHERD_FULL") == "1"


def scaled(part: T, full: T) -> T:
    """Return the value for an ordinary run, or for a full one."""
    return full if IS_FULL else part
