"""The description of an env for the contract and the matrix."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.oracles.plain_loops import Plain

#: Whether the full matrix of `docs/reports/families.md` is run.
IS_FULL = "ENVHERD_MATRIX" in os.environ


@dataclass(frozen=True)
class Family:
    """One env of a family.

    Attributes:
        title: in the table.
        make_env: a user's factory.
        plain: the same env driven by hand; None if nothing can be compared (its seeds have no effect).
        num_steps: enough for several episodes in the contract.
        extra: that it needs (see `tests.extras`).
        draws: the result of `render`: a picture, None, or a picture only with an OpenGL driver ("OpenGL").
        is_seeded: whether the same seed gives the same data.
        is_ordinary: whether an ordinary run runs its contract through every executor; others are run only through a
            block, or not at all if they are slow.
        is_slow: whether an ordinary run makes only one of the matrix's checks.
        is_only_in_full: whether an ordinary run leaves it out.
        num_rows: of an env that is itself a batch.
        is_alone: whether a process can hold only one.
        needs_worker: whether ordinary runs also use a worker, because it leaves resources in its process.
        shortening: the matrix compares and counts this many times fewer transitions, because a step takes long.
    """

    title: str
    make_env: Callable[[], Any]
    plain: Callable[[], Plain] | None = None
    num_steps: int = 40
    extra: str = "gymnasium"
    draws: bool | str = True
    is_seeded: bool = True
    is_ordinary: bool = True
    is_slow: bool = False
    is_only_in_full: bool = False
    num_rows: int = 1
    is_alone: bool = False
    needs_worker: bool = False
    shortening: int = 1
