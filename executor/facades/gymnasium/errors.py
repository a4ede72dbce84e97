"""Errors that are both ours and what Gymnasium would have raised; see `facades.errors`."""

from __future__ import annotations

import multiprocessing

from envherd.executor.facades.errors import as_raised, twin
from envherd.workers.errors import EnvherdError, ResetNeeded


class CallTimeout(multiprocessing.TimeoutError, TimeoutError):
    """A `..._wait(timeout=...)` ran out of time; Gymnasium raises the first of the two bases."""


def as_gymnasium(error: EnvherdError) -> EnvherdError:
    """Return an error that is also of the type that Gymnasium would have raised, or the error itself."""
    return twin(error, AssertionError) if isinstance(error, ResetNeeded) else as_raised(error)
