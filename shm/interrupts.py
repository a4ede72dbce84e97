"""Signal handlers that raise, put off for a few lines.

Guarantees: inside the block no handler of this program runs, in whatever thread a signal arrives; after it, those of
the signals that arrived run. Handlers are put back whatever happens.
Assumes: python runs handlers in the main thread alone, so elsewhere there is nothing to put off. Masking a signal would
not do: another thread of the process would take it, and the main thread would run its handler.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

#: Signals whose handlers programs write in python, and may raise in.
_PUT_OFF = (
    signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT
)  # fmt: skip


class uninterrupted:  # noqa: N801  # used as a function
    """Put off the signal handlers of this program until the block ends; nothing inside may wait for long.

    For a few lines that gain or give up processes and descriptors.
    """

    def __enter__(self) -> None:
        self._arrived: list[int] = []
        self._before: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in _PUT_OFF:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._before[number] = handler
                    signal.signal(number, lambda number, _: self._arrived.append(number))
        except BaseException:
            self._restore()
            raise

    def __exit__(self, *_: object) -> None:
        self._restore()
        for number in self._arrived:
            signal.raise_signal(number)

    def _restore(self) -> None:
        """Put the handlers back, that of Ctrl-C last, whatever the others raise meanwhile."""
        try:
            for number, handler in reversed(self._before.items()):
                signal.signal(number, handler)
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)
