"""Release something once: on a call, when the object that holds it is freed, or at the interpreter's exit.

Guarantees: of two calls at once, from two threads or from a signal handler, the second returns immediately. If the
release raises, at any line, a later call makes it again. `weakref.finalize` alone would then never do so.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Self


class Finalizer:
    """Makes a call once; see the module.

    Args:
        owner: the object that holds what is released; the call must not keep it alive.
        call: may be repeated after it has raised.
        *args: of the call.
    """

    def __init__(
        self,
        owner: object,
        call: Callable[..., object],
        *args: object,
    ) -> None:
        self._finalizer = weakref.finalize(owner, call, *args)
        self._lock = threading.Lock()

    def __call__(self) -> None:
        """Make the call, unless it was made."""
        if self._lock.acquire(blocking=False):
            try:
                if (found := self._finalizer.peek()) is not None:
                    _, call, args, _ = found
                    call(*args)
                    self._finalizer.detach()
            finally:
                self._lock.release()


class ClosedAtEnd:
    """A context manager that is closed at the end of its `with` block."""

    def close(self) -> None:
        """Release what it holds. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Return itself; closed at the end of the `with`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()
