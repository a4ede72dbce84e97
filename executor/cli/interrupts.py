"""Delay Ctrl-C until the bookkeeping of a step is complete, so that figures, pictures and data have the same steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


class DeferredInterrupt:
    """Context manager that delays a Ctrl-C between `hold` and `release` until `release`; a second one raises at once.

    At other times, Ctrl-C raises `KeyboardInterrupt` at once. In threads other than the main one, the context manager
    does nothing, because Python delivers signals only to the main thread. The end restores the previous handler.
    """

    def __init__(self) -> None:
        self._is_held = False
        self._is_pending = False
        self._before: Any = None
        self._is_main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        if self._is_main:
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_main:
            signal.signal(signal.SIGINT, self._before)

    def hold(self) -> None:
        """Begin a section that Ctrl-C must not interrupt."""
        self._is_held = True

    def release(self) -> None:
        """End the section; raise KeyboardInterrupt if Ctrl-C was pressed in it."""
        self._is_held = False
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  # Python passes both to handlers
        if self._is_held and not self._is_pending:
            self._is_pending = True
            return
        raise KeyboardInterrupt
