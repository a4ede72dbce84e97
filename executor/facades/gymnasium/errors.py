"""Errors that are instances of both our class and Gymnasium's; see `facades.errors`."""

from __future__ import annotations

import multiprocessing

from envherd.executor.facades.errors import as_raised, twin
from envherd.workers.errors import EnvherdError, ResetNeeded


class CallTimeout(multiprocessing.TimeoutError, TimeoutError):
    """A `..._wait(timeout=...)` ran out of time; Gymnasium raises the first of the two bases."""


def as_gymnasium(error: EnvherdError, call: str = "") -> EnvherdError:
    """Return an error that is also an instance of Gymnasium's type, or the error itself; `call` as of `as_raised`."""
    return twin(error, AssertionError) if isinstance(error, ResetNeeded) else as_raised(error, call)
