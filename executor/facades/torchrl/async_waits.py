"""Turns of several threads at one executor, which takes one caller at a time: for an `AsyncEnvPool`.

Where several threads wait for envs, one of them leads: it holds the executor and waits for the envs of all. It lets go
of the executor as soon as another thread wants it, and wakes the threads whose envs are ready.

Guarantees: a thread that sends waits for no env. Threads have the executor in the order in which they came. A failure
of an env reaches the thread that waits for that env, or the next one that asks for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from envherd.executor.pools.worker_pool import WorkerPool
from envherd.executor.protocol.engine import Engine


class Awaited(Protocol):
    """What a thread waits for."""

    def ids(self) -> np.ndarray:
        """Return the envs that have been sent, and that the thread may have, int64 `[k]`."""
        ...

    def check(self) -> None:
        """Raise if the thread cannot have what it waits for."""
        ...

    def note(self, error: Exception) -> bool:
        """Note what envs or workers have failed with; return whether any env is concerned."""
        ...


@dataclass(eq=False)
class _Waiter:
    """A thread that waits.

    Attributes:
        wanted: how many of its envs must be ready.
        is_woken: set where it has to look again.
    """

    awaited: Awaited
    wanted: int
    is_woken: threading.Event = field(default_factory=threading.Event)


class Turns:
    """`with turns: ...` holds the executor; see the module."""

    def __init__(self, engine: Engine, pool: WorkerPool) -> None:
        self._engine, self._pool = engine, pool
        self._mutex = threading.Lock()  # of the next two
        self._holder: int | None = None  # the thread that has the executor
        self._queue: deque[tuple[threading.Lock, int]] = deque()  # threads that want it, and what lets each go on
        self._waiters: list[_Waiter] = []
        self._leader: _Waiter | None = None

    def __enter__(self) -> None:
        thread = threading.get_ident()
        with self._mutex:
            if self._holder in (None, thread):  # its own, where an interrupt has ended a call before `__exit__`
                self._holder = thread
                return
            ticket = threading.Lock()
            ticket.acquire()
            self._queue.append((ticket, thread))
        self._pool.hail()
        try:
            ticket.acquire()
        except BaseException:  # an interrupt
            with self._mutex:
                is_passed = (ticket, thread) not in self._queue
                if not is_passed:
                    self._queue.remove((ticket, thread))
            if is_passed:
                self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            if self._holder != threading.get_ident():  # an interrupt has ended the wait for it
                return
            if self._queue:
                ticket, self._holder = self._queue.popleft()
                ticket.release()
            else:
                self._holder = None

    def wait(self, awaited: Awaited, least: int, most: int, timeout_s: float | None) -> np.ndarray:
        """Wait for envs; the caller holds the executor, and others may have it meanwhile.

        Args:
            awaited: see `Awaited`.
            least: how many at least.
            most: how many at most are worth waiting for, with `timeout_s`.
            timeout_s: seconds, after which those that are ready are returned; None waits for `least`.

        Returns:
            The envs that are ready, the longest sent first, int64 `[k]`.
        """
        waiter, began = _Waiter(awaited, least if timeout_s is None else most), time.monotonic()
        self._waiters.append(waiter)
        try:
            while True:
                awaited.check()
                ids = awaited.ids()
                try:
                    with self._engine.guard:
                        ready = self._engine.flights.wait_for(ids, min(waiter.wanted, len(ids)), 0.0)
                    waited_s = time.monotonic() - began
                    left_s = None if timeout_s is None else timeout_s - waited_s
                    if len(ready) >= waiter.wanted or (left_s is not None and left_s <= 0):
                        return ready
                    self._wait_more(waiter, ids, waited_s, left_s)
                except Exception as error:
                    if not awaited.note(error):
                        raise
                    self._wake(self._waiters)
        finally:
            self._waiters.remove(waiter)
            if self._leader in (None, waiter):
                self._leader = None
                self._wake(self._waiters[:1])  # it leads

    def _wake(self, waiters: list[_Waiter]) -> None:
        for waiter in waiters:
            waiter.is_woken.set()

    def _wait_more(self, waiter: _Waiter, ids: np.ndarray, waited_s: float, left_s: float | None) -> None:
        """Wait until there may be more, or until another thread wants the executor."""
        if self._leader not in (None, waiter):
            waiter.is_woken.clear()
            self.__exit__()
            try:
                waiter.is_woken.wait(left_s)
            finally:
                self.__enter__()
            return
        self._leader = waiter
        self._pool.unhail()
        if self._queue:
            self.__exit__()
            self.__enter__()
            return
        with self._engine.guard:
            self._lead(waiter, ids, waited_s, left_s)

    def _lead(self, waiter: _Waiter, ids: np.ndarray, waited_s: float, left_s: float | None) -> None:
        options, pool = self._engine.options, self._pool
        limit_s = None if options.step_timeout_s is None else max(0.0, options.step_timeout_s - waited_s)
        others = [other for other in self._waiters if other is not waiter and not other.is_woken.is_set()]
        if not others or (left_s is None and limit_s == 0.0):
            kills = left_s is None
            limit_s = limit_s if kills else left_s
            pool.wait_some(ids, waiter.wanted, limit_s, options.reset_timeout_s, kill_late=kills)
            return
        of_all = np.unique(np.concatenate([ids, *(other.awaited.ids() for other in others)]))
        ready = pool.wait_some(of_all, 0, 0.0, kill_late=False)
        self._wake([one for one in others if np.isin(one.awaited.ids(), ready).sum() >= one.wanted])
        limits = [limit for limit in (left_s, limit_s) if limit is not None]
        pool.wait_some(of_all, len(ready) + 1, min(limits, default=None), kill_late=False)
