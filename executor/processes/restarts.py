"""Limit how often lost workers are replaced."""

import time

from envherd.executor.options import ExecutorOptions

#: Seconds before the second replacement within the window, and the longest delay.
_BACK_OFF_S = 0.1
_LONGEST_BACK_OFF_S = 10.0


class Restarts:
    """Records replacements after losses, so that a crash loop slows down and ends."""

    def __init__(self, options: ExecutorOptions) -> None:
        self._options = options
        self._times: dict[int, list[float]] = {}

    def next_delay_s(self, worker_id: int) -> float | None:
        """Return the seconds to wait before replacing a worker, and record that; None if it may not be replaced.

        The first replacement within `restart_window_s` is immediate, the second after `_BACK_OFF_S`; each further delay
        is twice the previous one, up to `_LONGEST_BACK_OFF_S`.
        """
        now = time.monotonic()
        recent = [
            t
            for t in self._times.get(worker_id, ())
            if now - t < self._options.restart_window_s
        ]
        if len(recent) >= self._options.max_restarts:
            return None
        self._times[worker_id] = [*recent, now]
        if not recent:
            return 0.0
        return min(_BACK_OFF_S * 2 ** (len(recent) - 1), _LONGEST_BACK_OFF_S)
