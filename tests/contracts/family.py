"""What the contract and the matrix are told of an env."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.contracts.plain_loops import Plain

#: Whether the matrix is made in full, as `docs/reports/families.md` has it.
IS_FULL = "ENVHERD_MATRIX" in os.environ


@dataclass(frozen=True)
class Family:
    """One env of a family.

    Attributes:
        title: in the table.
        make_env: a factory, as users give it.
        plain: the same env driven by hand; None where nothing can be compared (its seeds decide nothing).
        num_steps: that show several of its episodes to the contract.
        extra: without which it is left out (see `tests.extras`).
        draws: what `render` gives: a picture, None, or a picture only with an OpenGL driver ("OpenGL").
        is_seeded: whether the same seed gives the same data.
        is_ordinary: whether its contract is run through every executor in an ordinary run of the tests; others are
            then run through a block alone, or not at all if they are slow.
        is_slow: whether an ordinary run makes only one of the matrix's checks.
        is_only_in_full: whether an ordinary run leaves it out.
        num_rows: of an env that is itself a batch.
        is_alone: whether there can be one in a process.
        needs_worker: whether it is run in a worker in ordinary runs too, as it leaves something to its process.
    """

    title: str
    make_env: Callable[[], Any]
    plain: Callable[[], Plain] | None = None
    num_steps: int = 60
    extra: str = "gymnasium"
    draws: bool | str = True
    is_seeded: bool = True
    is_ordinary: bool = True
    is_slow: bool = False
    is_only_in_full: bool = False
    num_rows: int = 1
    is_alone: bool = False
    needs_worker: bool = False
