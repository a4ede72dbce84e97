"""Every exception that envherd raises on purpose, in one tree.

    EnvherdError
    +-- FactoryError      (TypeError)     not a factory, cannot be pickled, returned no env, or raised
    +-- SpecError         (ValueError)    specs disagree, or an env broke its own spec
    +-- ActionError       (ValueError)    the actions given do not fit the action spec; nothing was stepped
    +-- ResetNeeded       (RuntimeError)  an env that has ended was stepped; nothing was stepped
    +-- EnvError          (RuntimeError)  an env raised; only that env is lost, and can be reset
    +-- WorkerLost        (RuntimeError)  a worker process is gone, with its envs
    +-- WorkerTimeout     (TimeoutError)  a worker passed its deadline and was killed
    +-- Busy              (RuntimeError)  an env has an answer under way, or another call is in progress
    +-- Closed            (RuntimeError)  the executor was closed
    +-- InternalError     (RuntimeError)  our bug

The class tells who caused the error. Context (env ids, worker id, pid, ...) is in the message and also in
`error.context`. Remote tracebacks are text: `error.remote_traceback`, also shown as the `__cause__`, unless the message
has it. Every exception survives pickling as its own type.
"""

import difflib
from typing import Any


class RemoteTraceback(Exception):
    """The text of a traceback from a worker, shown as the cause of an error."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(text)

    def __str__(self) -> str:
        return f"\n\nin the process of the env:\n{self.text}"


class EnvherdError(Exception):
    """Base of all; never raised itself.

    Args:
        message: what happened, what was expected, what to do.
        remote_traceback: text of the worker's traceback or stack, if there is one.
        **context: `env_ids`, `worker_id`, `pid`, `phase`, ...; kept in `context`.
    """

    def __init__(
        self,
        message: str,
        *,
        remote_traceback: str | None = None,
        **context: Any,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.remote_traceback = remote_traceback
        self.context = context
        #: For EnvError and WorkerLost raised by a step: the `next` batch, in which the rows of failed envs are not
        #:     valid, or None. Not pickled.
        self.partial: Any = None
        if remote_traceback and remote_traceback not in message:  # shown once
            self.__cause__ = RemoteTraceback(remote_traceback)

    @property
    def env_ids(self) -> tuple[int, ...]:
        """The envs concerned; empty when no env in particular."""
        return tuple(self.context.get("env_ids", ()))

    def __reduce__(self) -> tuple[Any, ...]:
        return (
            _rebuild,
            (type(self), self.message, self.remote_traceback, self.context),
        )


def _rebuild(
    cls: type[EnvherdError],
    message: str,
    remote: str | None,
    context: dict[str, Any],
) -> EnvherdError:
    return cls(message, remote_traceback=remote, **context)


class FactoryError(EnvherdError, TypeError):
    """The `make_env` argument is not a factory, cannot be pickled, returned no env, or raised."""


class SpecError(EnvherdError, ValueError):
    """Envs that must have equal specs do not, or an env returned data that its own spec forbids."""


class ActionError(EnvherdError, ValueError):
    """The actions do not fit the action spec. Refused before anything was sent: no env was stepped."""


class ResetNeeded(EnvherdError, RuntimeError):
    """An env that has ended (or was never reset) was stepped. Nothing was sent: no env was stepped."""


class EnvError(EnvherdError, RuntimeError):
    """An env raised. Only that env's episode is lost; its worker and all other envs continue, and it can be reset."""


class WorkerLost(EnvherdError, RuntimeError):
    """A worker process ended; carries exit code or signal name, env ids, pid and its last output."""


class WorkerTimeout(EnvherdError, TimeoutError):
    """A worker passed its deadline; carries the Python stack it was stuck in. The worker was killed."""


class Busy(EnvherdError, RuntimeError):
    """An env was sent and not received yet, or another call of the executor is in progress. Nothing was sent."""


class Closed(EnvherdError, RuntimeError):
    """The executor was closed (or belongs to another process); make a new one."""


class InternalError(EnvherdError, RuntimeError):
    """A bug in envherd; please report it."""


def closest(name: str, known: list[str]) -> str:
    """Return ` Did you mean ...?` for a misspelt name, or an empty string."""
    matches = difflib.get_close_matches(name, known, n=3)
    return f" Did you mean {', '.join(matches)}?" if matches else ""


class Unsaveable(NotImplementedError):
    """An env that holds an object whose state cannot be read."""
