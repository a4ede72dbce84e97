"""Find workers that spend too long on one env, across waits that are each too short to notice it.

A wait for all answers has its own deadline. A wait for the first answers, or one with the caller's timeout, ends
earlier and starts again, so a hanging env would never be noticed.

Guarantees: a worker is overdue once checks 10 to 30 ms apart have seen it at the same command of the same env for the
option's seconds. The time in which envs wait for their turn in a worker does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np


class Overdue:
    """Watches the workers of a pool.

    Args:
        step_s: seconds for a step; None: no limit.
        reset_s: seconds for a reset, in addition to those for a step; None: no limit.
        phase_of: returns the phase of a worker, and its env.
        command_seq: int64 `[N]`, the number of each env's latest command (VIEW of the slab).
        worker_of: int64 `[N]`, the worker of each env.
    """

    def __init__(
        self,
        step_s: float | None,
        reset_s: float | None,
        phase_of: Callable[[int], tuple[str, int | None]],
        command_seq: np.ndarray,
        worker_of: np.ndarray,
    ) -> None:
        self._step_s, self._reset_s = step_s, None if reset_s is None else reset_s + (step_s or 0.0)
        self._phase_of, self._command_seq, self._worker_of = phase_of, command_seq, worker_of
        self._seen: dict[int, tuple[tuple[str, int | None, int], float]] = {}

    def look(self, owing: Iterable[int]) -> list[tuple[int, float]]:
        """Return the overdue workers, each with its limit in seconds.

        Args:
            owing: workers that have a command to carry out; the others are forgotten.
        """
        now, seen, late = time.monotonic(), self._seen, []
        self._seen = {}
        for worker_id in owing:
            phase, env_id = self._phase_of(worker_id)
            numbers = self._command_seq[self._worker_of == worker_id if env_id is None else env_id]
            state = phase, env_id, int(numbers.max())
            before, since = seen.get(worker_id, (None, now))
            since = since if before == state else now
            self._seen[worker_id] = state, since
            limit_s = self._reset_s if phase == "reset" else self._step_s
            if limit_s is not None and now - since > limit_s:
                late.append((worker_id, limit_s))
        return late
