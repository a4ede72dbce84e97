"""The size of sweeps: `make test` runs a part, `make test-full` (ENVHERD_FULL=1) all of them.

The seed of a run (pytest's `--randomly-seed`) decides the part, so that different runs check different cases.
"""

import os
import random
from typing import TypeVar

T = TypeVar("T")

IS_FULL = os.environ.get("ENVHERD_FULL") == "1"
#: Where `tests/conftest.py` keeps the seed of a run for `seed`.
SEED = "ENVHERD_TESTS_SEED"


def scaled(part: T, full: T) -> T:
    """Return the value for an ordinary run, or for a full one."""
    return full if IS_FULL else part


def seed() -> int:
    """Return the seed of this run."""
    return int(os.environ.get(SEED, "0"))


def offset(stride: int) -> int:
    """Return where a sweep of each `stride`-th case begins in this run: 0 to `stride` - 1."""
    return random.Random(seed()).randrange(stride)
