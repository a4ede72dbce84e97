"""Errors that are instances of both our class and the class that the facade's host library would raise.

Guarantees: `except ValueError` catches a ValueError that an env raised, as with the host's own classes, and so does
`except EnvError`. Message, context and remote traceback are those of our error. The type is looked up by name in the
imported modules; nothing is unpickled.
"""

import contextlib
import functools
import multiprocessing
import sys
from collections.abc import Iterator
from typing import Any

from envherd.executor.sending.blueprint import as_factory
from envherd.workers.errors import (
    EnvError,
    EnvherdError,
    FactoryError,
    RemoteTraceback,
    ResetNeeded,
)


def listed(operation: str, env_fns: Any) -> tuple[Any, ...]:
    """Return the factories of a vector env; some may be passed as names of envs.

    Raises:
        TypeError: one function or name instead of a list.
        ValueError: an empty list.
        FactoryError: an entry is no factory.
    """
    if callable(env_fns) or isinstance(env_fns, str):
        got = "one function. Write [make_env] * 8."
        if isinstance(env_fns, str):
            got = f"one name. Write [{env_fns!r}] * 8."
        raise TypeError(
            f"{operation} failed: expected a list of functions, one per env, got {got}"
        )
    if not (found := tuple(map(as_factory, env_fns))):
        raise ValueError(
            f"{operation} failed: expected at least one function, got an empty list."
        )
    return found


def as_raised(error: EnvherdError, call: str = "") -> EnvherdError:
    """Return an error that is also an instance of the exception type of the env or factory, or the error itself.

    Args:
        error: of the executor.
        call: the host's name of what failed, for an EnvError's message; "" for the executor's.
    """
    if not isinstance(error, (EnvError, FactoryError)):
        return error
    if call:
        # Messages begin with the name of the call; users know the host's.
        error.message = call + error.message.removeprefix(
            error.context.get("phase", "")
        )
        error.args = (error.message,)
    cause = error.__cause__
    # Raised in this process.
    if isinstance(cause, Exception) and not isinstance(cause, RemoteTraceback):
        native: type[Exception] | None = type(cause)
    else:
        native = _find_type(
            error.context.get("type_module", ""),
            error.context.get("type_name", ""),
        )
    return error if native is None or isinstance(error, native) else twin(error, native)


def _find_type(module: str, name: str) -> type[Exception] | None:
    """Return the exception class of that name, if this process has imported it."""
    found: Any = sys.modules.get(module)
    # A class may be defined in another one.
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def twin(error: EnvherdError, native: type[Exception]) -> EnvherdError:
    """Return an error that is also of a native type; the error itself if Python cannot create such a class."""
    kind = _joined(type(error), native)  # type: ignore[arg-type]  # mypy looks at the `__hash__` of their instances
    twin = None if kind is None else _blank(kind, native, error.message)
    if twin is None:
        return error
    BaseException.__init__(twin, error.message)
    # No constructor of ours has set the attributes.
    vars(twin).update(vars(error))
    twin.__cause__ = error.__cause__
    return twin


def _blank(
    kind: type[EnvherdError],
    native: type[Exception],
    message: str,
) -> EnvherdError | None:
    """Return an instance without calling constructors, as a native one may require other arguments."""
    for base in (Exception, native):  # `native` if its instances have their own fields
        try:
            return base.__new__(kind, message)
        except TypeError:
            continue
    return None


@functools.cache
def _joined(
    ours: type[EnvherdError],
    native: type[Exception],
) -> type[EnvherdError] | None:
    """Return a class derived from both; None if Python cannot create it."""
    namespace = {
        "__str__": lambda error: error.message,
        "__reduce__": _reduce,
        "__module__": ours.__module__,
        "__doc__": ours.__doc__,
    }
    try:
        # Refused, for example, if instances of the two are laid out differently in memory.
        return type(f"{ours.__name__}[{native.__name__}]", (ours, native), namespace)
    except TypeError:
        return None


def _reduce(error: EnvherdError) -> tuple[Any, ...]:
    # The joined class has no name to import it by: `twin` makes it again where it is unpickled.
    ours, native = type(error).__bases__
    return twin, (
        ours(error.message, remote_traceback=error.remote_traceback, **error.context),
        native,
    )


class CallTimeout(multiprocessing.TimeoutError, TimeoutError):
    """A `..._wait(timeout=...)` ran out of time; Gymnasium raises the first of the two bases."""


def as_gymnasium(error: EnvherdError, call: str = "") -> EnvherdError:
    """Return an error that is also an instance of Gymnasium's type, or the error itself; `call` as of `as_raised`."""
    # Without autoreset, Gymnasium's `SyncVectorEnv` asserts that no env has ended.
    if isinstance(error, ResetNeeded):
        return twin(error, AssertionError)
    return as_raised(error, call)


@contextlib.contextmanager
def raising_gymnasiums(call: str = "") -> Iterator[None]:
    """Convert the errors of a block by `as_gymnasium`."""
    try:
        yield
    except EnvherdError as error:
        raise as_gymnasium(error, call) from error.__cause__
