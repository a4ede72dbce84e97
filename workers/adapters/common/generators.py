"""Give each env its own state of the process's global random generators."""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any


class OwnGenerators:
    """An env's own state of the global generators, swapped in and out (2 us for torch's alone; 2-core x86, 2026-11).

    Args:
        read: returns the state of the generators.
        restore: sets it.

    Attributes:
        state: of the env's generators, while they are not swapped in.
    """

    def __init__(self, read: Callable[[], Any], restore: Callable[[Any], Any]) -> None:
        self._read = read
        self._restore = restore
        self.state = self._outer = read()

    def __enter__(self) -> None:
        self._outer = self._read()
        self._restore(self.state)

    def __exit__(self, *error: object) -> None:
        self.state = self._read()
        self._restore(self._outer)


@contextlib.contextmanager
def seeded_random(seed: int) -> Iterator[None]:
    """Seed python's global generator for a while, and restore the caller's state after it."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
