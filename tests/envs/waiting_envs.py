"""Envs that wait for one another in a process, or look at their thread; workers import this module."""

import threading
from pathlib import Path

from envherd.workers.testing import CountingEnv

#: Barriers of the envs of a process, by number of parties.
_barriers: dict[int, threading.Barrier] = {}
_lock = threading.Lock()


class MeetingEnv(CountingEnv):
    """A step returns once all `parties` envs of the process are in a step, and a close once all are in a close."""

    def __init__(self, parties: int) -> None:
        super().__init__(None)
        with _lock:
            self._barrier = _barriers.setdefault(parties, threading.Barrier(parties))

    def step(self, action):
        self._barrier.wait(30.0)
        return super().step(action)

    def close(self):
        self._barrier.wait(2.0)


class OneThreadEnv(CountingEnv):
    """Raises if it is called on another thread than it was built on; records in a file how it was closed."""

    def __init__(self, length: int, closed: str) -> None:
        super().__init__(length)
        self.home = threading.get_ident()
        self._closed = Path(closed)

    def _check(self) -> None:
        if threading.get_ident() != self.home:
            raise RuntimeError("called on another thread")

    def reset(self, seed, options=None):
        self._check()
        return super().reset(seed, options)

    def step(self, action):
        self._check()
        return super().step(action)

    def thread(self):
        self._check()
        return self.home

    def close(self):
        with self._closed.open("a") as file:
            file.write(f"{threading.get_ident() == self.home}\n")


class StuckEnv(CountingEnv):
    """Its third step never returns, or ends the episode before a reset that never returns; waits without the GIL."""

    def __init__(
        self, *, is_stuck: bool = False, is_stuck_in_reset: bool = False
    ) -> None:
        super().__init__(3 if is_stuck_in_reset else None)
        self.is_stuck, self.is_stuck_in_reset, self.num_calls = (
            is_stuck,
            is_stuck_in_reset,
            0,
        )

    def reset(self, *args):
        if self.is_stuck_in_reset and self.num_calls:
            threading.Event().wait()
        return super().reset(*args)

    def step(self, action):
        self.num_calls += 1
        if self.is_stuck and self.num_calls == 3:
            threading.Event().wait()
        return super().step(action)
