"""The limits of waits for workers: of one wait, and of a worker's call across waits.

A wait for all answers has its own deadline. A wait for the first answers, or one with the caller's timeout, ends
earlier and starts again, so a hanging env would never be noticed: `Overdue` finds it.
"""

import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from envherd.workers.protocol import Phase


class DeadlinePassed(TimeoutError):
    """A wait lasted as long as its caller allows.

    Public calls raise it where they promise a `TimeoutError`. Callers inside this package catch this class alone: any
    other `TimeoutError` is the program's, for example from its handler of SIGALRM.
    """


class Clock:
    """Counts the seconds in which the caller looks at its workers.

    Of the time between two readings, at most `MOST_S` counts. Waits read it every few milliseconds, so a longer time is
    one in which the caller did something else, or in which the machine stopped all processes (a suspended job, a
    virtual machine that is moved). No worker is late because of that.
    """

    MOST_S = 1.0

    def __init__(self) -> None:
        self._read_at = time.monotonic()
        self._counted_s = 0.0

    def now(self) -> float:
        """Return the seconds that have counted so far."""
        now = time.monotonic()
        self._counted_s += min(now - self._read_at, self.MOST_S)
        self._read_at = now
        return self._counted_s


def seconds(limit_s: float | None) -> float:
    """Return the seconds of a limit: infinity where None stands for no limit."""
    return math.inf if limit_s is None else limit_s


class Deadline:
    """The limits of one wait, which begins now.

    Args:
        clock: counts the seconds.
        timeout_s: seconds; None: no limit.
        more_for_resets_s: additional seconds for workers that have begun a reset since; None: no limit.
        kills: whether to kill late workers; False only ends the wait.
        stall_log_s: interval in seconds at which a wait without a limit is logged.

    Attributes:
        kills: as given.
    """

    def __init__(
        self,
        clock: Clock,
        timeout_s: float | None,
        more_for_resets_s: float | None,
        stall_log_s: float,
        *,
        kills: bool = True,
    ) -> None:
        self._now = clock.now
        self._began = clock.now()
        self.kills = kills
        self._end = self._began + seconds(timeout_s)
        self._more_s = seconds(more_for_resets_s)
        self._stall_log_s = stall_log_s
        self._stall_at = self._began + stall_log_s

    def left_s(self, at_most_s: float) -> float:
        """Return the seconds that are left, but at most `at_most_s`; not above 0 if the wait is over."""
        return min(at_most_s, self._end - self._now())

    @property
    def limit_s(self) -> float:
        """Seconds that the wait may last, including those for resets once they are granted."""
        return self._end - self._began

    @property
    def excuses_resets(self) -> bool:
        """Whether workers that reset can still get more time."""
        return self.kills and self._more_s != 0

    def extend_for_resets(self) -> None:
        """Grant the additional time for workers that reset; once."""
        self._end += self._more_s
        self._more_s = 0.0

    def stalled_s(self) -> float | None:
        """Return the seconds waited so far, if it is time to log them; else None."""
        # A wait with a limit ends by itself, and its error has the stack.
        if self._end < math.inf or (now := self._now()) < self._stall_at:
            return None
        self._stall_at = now + self._stall_log_s
        return now - self._began


class _Doing(NamedTuple):
    """A command that a worker is carrying out: its phase, and the number of the command."""

    worker_id: int
    phase: Phase
    number: int


class Overdue:
    """Finds workers that spend too long on one env, across waits that are each too short to notice it.

    A worker is overdue once checks 10 to 30 ms apart have seen it at the same command of the same env for the option's
    seconds. The time in which envs wait for their turn in a worker does not count.

    Args:
        clock: counts the seconds.
        step_s: seconds for a step; None: no limit.
        reset_s: seconds for a reset, in addition to those for a step; None: no limit.
        phase_of: returns the phase of a worker.
        command_seq: int64 `[N]`, the number of each env's latest command (VIEW of the slab).
        worker_of: int64 `[N]`, the worker of each env.
    """

    def __init__(
        self,
        clock: Clock,
        step_s: float | None,
        reset_s: float | None,
        phase_of: Callable[[int], Phase],
        command_seq: np.ndarray,
        worker_of: np.ndarray,
    ) -> None:
        self._clock = clock
        self._limit_s = seconds(step_s)
        # A reset may follow a step in the same command.
        self._limits_s = {"reset": seconds(reset_s) + (step_s or 0.0)}
        self._phase_of = phase_of
        self._command_seq = command_seq
        self._worker_of = worker_of
        #: When each was seen first.
        self._seen: dict[_Doing, float] = {}

    def look(self, owing: Iterable[int]) -> dict[int, float]:
        """Return the overdue workers, with the limit of each in seconds.

        Args:
            owing: workers that have a command to carry out; the others are forgotten.
        """
        if math.isinf(self._limit_s) and math.isinf(self._limits_s["reset"]):
            return {}
        now = self._clock.now()
        seen: dict[_Doing, float] = {}
        late = {}
        for worker_id in owing:
            phase = self._phase_of(worker_id)
            of = self._worker_of == worker_id if phase.env_id is None else phase.env_id
            doing = _Doing(worker_id, phase, int(self._command_seq[of].max()))
            seen[doing] = self._seen.get(doing, now)
            limit_s = self._limits_s.get(phase.name, self._limit_s)
            if now - seen[doing] > limit_s:
                late[worker_id] = limit_s
        self._seen = seen
        return late
