"""What share of our processors others use meanwhile: processes that are not ours, and the host of a virtual machine."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import psutil


class OthersShare:
    """What share of the processors that this process may use others use in a span.

    Processor time is counted in hundredths of a second: a span of a few tenths is the least that says something.

    Args:
        pids: of our processes beside this one; all of them live on.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._own = [psutil.Process(), *map(psutil.Process, pids)]
        self._cpus = os.sched_getaffinity(0)
        self.begin()

    def begin(self) -> None:
        """Begin the span."""
        self._began, self._before_s = time.monotonic(), self._others_s()

    def end(self) -> float:
        """Return the share, 0..1."""
        spent_s = time.monotonic() - self._began
        return min(1.0, max(0.0, self._others_s() - self._before_s) / (spent_s * len(self._cpus)))

    def _others_s(self) -> float:
        """Return seconds that these processors were not idle for, nor at our work."""
        busy_s = 0.0
        for cpu, times in enumerate(psutil.cpu_times(percpu=True)):
            if cpu in self._cpus:
                busy_s += sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
        own = [one.cpu_times() for one in self._own]
        return float(busy_s - sum(one.user + one.system for one in own))
