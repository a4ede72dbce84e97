"""Keep what the program's signal handlers raise from being taken for something else.

Guarantees of `uninterrupted`: inside the block no Python signal handler of this program runs, whichever thread receives
a signal. After the block, the handlers of the signals that arrived run. The handlers are always restored.
Assumes: Python runs handlers in the main thread only, so in other threads the block does nothing. Masking a signal is
not enough: another thread of the process would receive it, and the main thread would run its handler.
"""

import os
import signal
import threading
from typing import Any

from envherd.shm.platforms import HANDLED_SIGNALS


def close_descriptors(holder: object, *names: str) -> None:
    """Close descriptors in attributes of an object, and delete the attributes. Idempotent."""
    for name in names:
        if name in vars(holder):
            # One line: an interrupt must not have it closed twice or never.
            os.close(vars(holder).pop(name))


class uninterrupted:  # noqa: N801  # used as a function
    """Defer the signal handlers of this program until the block ends; the block must not wait for long.

    For a few lines that acquire or release processes and descriptors.
    """

    def __enter__(self) -> None:
        self._arrived: list[int] = []
        self._before: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in HANDLED_SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._before[number] = handler
                    signal.signal(
                        number, lambda number, _: self._arrived.append(number)
                    )
        except BaseException:
            self._restore()
            raise

    def __exit__(self, *_: object) -> None:
        self._restore()
        for number in self._arrived:
            signal.raise_signal(number)

    def _restore(self) -> None:
        """Restore the handlers, that of Ctrl-C last, even if one of them raises meanwhile."""
        try:
            for number, handler in reversed(self._before.items()):
                signal.signal(number, handler)
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)


class ignoring_refusals:  # noqa: N801  # used as a function
    """Ignore an `OSError` of the operating system. One that a signal handler raises, such as `TimeoutError`, passes."""

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self,
        _kind: object,
        error: BaseException | None,
        _trace: object,
    ) -> bool:
        """Return True for an error of the operating system: it has a number."""
        return isinstance(error, OSError) and error.errno is not None
