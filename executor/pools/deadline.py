"""The time limit of a wait for workers, and the times at which a long wait is logged."""

from __future__ import annotations

import time


class DeadlinePassed(TimeoutError):
    """A wait lasted as long as its caller allows.

    Public calls raise it where they promise a `TimeoutError`. Callers inside this package catch this class alone: any
    other `TimeoutError` is the program's, for example from its handler of SIGALRM.
    """


class Deadline:
    """The limits of one wait, which begins now.

    Args:
        timeout_s: seconds; None: no limit.
        more_for_resets_s: additional seconds for workers that have begun a reset since; None: no limit.
        kills: whether to kill late workers; False only ends the wait.
        stall_log_s: interval in seconds at which a wait without a limit is logged.

    Attributes:
        kills: see Args.
        reset_limit_s: seconds for a reset that the pool itself has begun; None: no limit.
    """

    def __init__(
        self, timeout_s: float | None, more_for_resets_s: float | None, stall_log_s: float, *, kills: bool = True
    ) -> None:
        self._began = time.monotonic()
        self.kills = kills
        self.reset_limit_s = more_for_resets_s if kills and more_for_resets_s else None
        self._end = None if timeout_s is None else self._began + timeout_s
        self._more_s = more_for_resets_s
        self._stall_log_s = stall_log_s
        self._stall_at = self._began + stall_log_s

    def left_s(self, at_most_s: float) -> float:
        """Return the seconds that are left, but at most `at_most_s`."""
        return at_most_s if self._end is None else min(at_most_s, self._end - time.monotonic())

    def has_passed(self, now: float) -> bool:
        """Return whether the wait is over."""
        return self._end is not None and now >= self._end

    @property
    def limit_s(self) -> float:
        """Seconds that the wait may last, including those for resets once they are granted; 0.0 if it has no limit."""
        return 0.0 if self._end is None else self._end - self._began

    @property
    def excuses_resets(self) -> bool:
        """Whether workers that reset can still get more time."""
        return self.kills and self._more_s != 0

    def extend_for_resets(self) -> None:
        """Grant the additional time for workers that reset; once."""
        assert self._end is not None
        self._end = None if self._more_s is None else self._end + self._more_s
        self._more_s = 0.0

    def stalled_s(self, now: float) -> float | None:
        """Return the seconds waited so far, if it is time to log them; else None."""
        if self._end is not None or now < self._stall_at:
            return None
        self._stall_at = now + self._stall_log_s
        return now - self._began
