"""Whose turn it is: one caller at a time, in the process that made the executor, for as long as it is open."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType
from typing import TYPE_CHECKING

from envherd.workers.errors import Busy, Closed, EnvherdError

if TYPE_CHECKING:
    from envherd.executor.engine import Engine

_turns: weakref.WeakSet[Turn] = weakref.WeakSet()


def _disown_in_fork() -> None:
    for turn in list(_turns):
        turn.is_foreign = True


os.register_at_fork(after_in_child=_disown_in_fork)


class Turn:
    """Holds the engine for one call: refuses a second thread, a closed executor, a forked copy."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.RLock()
        self.is_closed = False
        self.is_foreign = False
        _turns.add(self)

    def check(self) -> None:
        """Raise `Closed` unless the executor can be used from here."""
        if self.is_closed:
            raise Closed("the call failed: this executor is closed. Make a new one.")
        if self.is_foreign:
            raise Closed("the call failed: this executor belongs to the process that made it. Make one here.")

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise Busy("the call failed: another thread is using this executor. One caller at a time.")
        if self.is_closed or self.is_foreign or self._engine.is_dirty:
            try:
                self.check()
                self._engine.recover()
            except BaseException:
                self._lock.release()
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
        if error is not None and not isinstance(error, EnvherdError):
            self._engine.is_dirty = True
        if self.is_closed and isinstance(error, Exception) and not isinstance(error, Closed):
            raise Closed("the call failed: this executor was closed while it waited. Make a new one.") from error
