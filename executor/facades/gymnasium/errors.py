"""Errors that are instances of both our class and Gymnasium's; see `facades.errors`."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator

from envherd.executor.facades.errors import as_raised, twin
from envherd.workers.errors import EnvherdError, ResetNeeded


class CallTimeout(multiprocessing.TimeoutError, TimeoutError):
    """A `..._wait(timeout=...)` ran out of time; Gymnasium raises the first of the two bases."""


def as_gymnasium(error: EnvherdError, call: str = "") -> EnvherdError:
    """Return an error that is also an instance of Gymnasium's type, or the error itself; `call` as of `as_raised`."""
    return (
        twin(error, AssertionError)
        if isinstance(error, ResetNeeded)
        else as_raised(error, call)
    )


@contextlib.contextmanager
def raising_gymnasiums(call: str = "") -> Iterator[None]:
    """Convert the errors of a block by `as_gymnasium`."""
    try:
        yield
    except EnvherdError as error:
        raise as_gymnasium(error, call) from error.__cause__
