"""Errors that are both ours and what Gymnasium would have raised; see `facades.errors`."""

from __future__ import annotations

import multiprocessing

from envherd.executor.facades.errors import find_type, twin
from envherd.workers.errors import EnvError, EnvherdError, FactoryError, RemoteTraceback, ResetNeeded


class CallTimeout(multiprocessing.TimeoutError, TimeoutError):
    """A `..._wait(timeout=...)` ran out of time; Gymnasium raises the first of the two bases."""


def as_gymnasium(error: EnvherdError) -> EnvherdError:
    """Return an error that is also of the type that Gymnasium would have raised, or the error itself."""
    if isinstance(error, ResetNeeded):
        return twin(error, AssertionError)
    if not isinstance(error, (EnvError, FactoryError)):
        return error
    cause = error.__cause__
    if isinstance(cause, Exception) and not isinstance(cause, RemoteTraceback):  # raised in this process
        native: type[Exception] | None = type(cause)
    else:
        native = find_type(error.context.get("type_module", ""), error.context.get("type_name", ""))
    return error if native is None or isinstance(error, native) else twin(error, native)
