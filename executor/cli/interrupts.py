"""Ctrl-C that never splits a step's bookkeeping: what is reported, drawn and stored is of the same steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


class DeferredInterrupt:
    """While in use, a Ctrl-C between `hold` and `release` raises KeyboardInterrupt at `release`; a second one at once.

    Outside of the two, and in threads other than the main one (where python delivers no signals), it
    changes nothing. The handler that was there before is put back at the end.
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
        """Begin what is not to be split."""
        self._is_held = True

    def release(self) -> None:
        """End it; raises the KeyboardInterrupt that came meanwhile."""
        self._is_held = False
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  # how python calls handlers
        if self._is_held and not self._is_pending:
            self._is_pending = True
            return
        raise KeyboardInterrupt
