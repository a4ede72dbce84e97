"""Share an executor, which allows one caller at a time, among the threads that use an `AsyncEnvPool`.

Among the threads that wait for envs, the first one is the leader: it holds the executor and waits for all threads'
envs. It releases the executor as soon as another thread requests it, and wakes the threads whose envs are ready.

Guarantees: a sending thread waits for no env. A failure of an env is raised in the thread that waits for that env, or
in the next one that receives it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from tensordict import TensorDictBase

from envherd.executor.pools.waiting import DeadlinePassed
from envherd.executor.pools.worker_pool import WorkerPool
from envherd.executor.protocol.engine import Engine
from envherd.executor.protocol.flight import Flight
from envherd.workers.errors import EnvherdError

Kind = Literal["step", "step_and_maybe_reset", "reset"]
#: The queue of a sent env: the kind of command, and the env's index if it was sent by its index.
Queue = tuple[Kind, int | None]
#: Seconds between the leader's checks, in case an interrupt kept another thread from handing the executor back.
_PASS_S = 0.05


@dataclass(eq=False)
class _Waiter:
    """A thread that waits for `wanted` envs of a queue, and checks them when it is woken."""

    queue: Queue
    wanted: int
    woken: threading.Event = field(default_factory=threading.Event)


class SentEnvs:
    """`with sent: ...` holds the executor; see the module. Only the holding thread may call the methods."""

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine.pool, WorkerPool)
        self._engine, self._pool = engine, engine.pool
        self._places: dict[int, tuple[Queue, Flight | None]] = {}
        self._failures: dict[int, tuple[Queue, Exception]] = {}
        self._lock = threading.RLock()
        self._handed_back = threading.Condition(self._lock)
        self._wanting: deque[None] = deque()  # an entry for each thread that waits for the lock
        self._waiters: list[_Waiter] = []  # the first one leads

    def __enter__(self) -> None:
        try:
            if not self._lock.acquire(blocking=False):
                self._queue_up()
        except BaseException:  # an interrupt, perhaps after the lock was acquired
            self.__exit__()
            raise

    def _queue_up(self) -> None:
        self._wanting.append(None)  # before the wait of the leader is stopped, which then reads it
        try:
            self._pool.stop_waits()
            self._lock.acquire()
        finally:
            self._wanting.pop()

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):  # raised when the lock is fully released, also after interrupts
            if not self._wanting:
                self._handed_back.notify()
            while True:
                self._lock.release()

    def refuse_sent(self, ids: list[int]) -> None:
        """Raise if any of the envs has been sent and not received."""
        self._drop_broken_off()
        busy = [i for i in ids if i in self._places]
        if busy:
            raise RuntimeError(f"Some envs are still processing a step: envs that are busy: {busy}, queried: {ids}.")

    def start(self, ids: list[int], queue: Queue, send: Callable[[], list[Flight]]) -> None:
        """Send envs, for a queue; `send` returns the flights of resets, in the order of `ids`."""
        for i in ids:
            self._failures.pop(i, None)
            self._places[i] = queue, None  # first: after an interrupt no sent env may be unknown
        try:
            flights = send()
        except Exception:
            self._forget(ids)
            raise
        self._places.update((i, (queue, flight)) for i, flight in zip(ids, flights, strict=False))

    def land(self, ids: list[int]) -> None:
        """Land the resets of ready envs, and mark these as received."""
        flights = [self._places[i][1] for i in ids]
        with self._engine.guard:
            for flight in flights:
                assert flight is not None
                flight.land()
        self._forget(ids)

    def receive(self, ids: list[int], recv: Callable[[], TensorDictBase]) -> TensorDictBase:
        """Receive the steps of ready envs; `recv` may first raise failures of other envs."""
        while True:
            try:
                received = recv()
            except EnvherdError as error:
                self._note_failure(error)
                continue
            self._forget(ids)
            return received

    def _forget(self, ids: list[int]) -> None:
        for i in ids:
            self._places.pop(i, None)

    def wait(self, queue: Queue, least: int, most: int | None, timeout_s: float | None) -> list[int]:
        """Wait for envs of a queue; other threads may hold the executor meanwhile.

        Args:
            queue: see `Queue`.
            least: least number of envs.
            most: largest number of envs; None for all that have been sent.
            timeout_s: seconds to wait for `most`; 0 waits for none; None waits for `least`.

        Returns:
            The envs that are ready, in the order in which they were sent.

        Raises:
            TimeoutError: fewer than `least` in time.
            RuntimeError: fewer were sent.
            EnvError, WorkerLost, WorkerTimeout: an env of the queue has failed; it is no longer under way.
        """
        self._drop_broken_off()
        most = len(self._ids(queue)) if most is None else min(most, len(self._ids(queue)))
        waiter = _Waiter(queue, least if timeout_s is None else most)
        self._waiters.append(waiter)
        began = time.monotonic()
        try:
            while True:
                self._check(queue, least)
                try:
                    waited_s = time.monotonic() - began
                    ready = self._wait_once(waiter, waited_s, None if timeout_s is None else timeout_s - waited_s)
                except EnvherdError as error:
                    self._note_failure(error)
                    continue
                if ready is None:
                    continue
                if len(ready) < least:
                    raise DeadlinePassed(
                        f"async_{queue[0]}_recv timed out: expected {least} envs within {timeout_s:g} s, got "
                        f"{len(ready)}. Nothing is lost: receive again."
                    )
                return ready[:most]
        finally:
            self._waiters.remove(waiter)
            if self._waiters:
                self._waiters[0].woken.set()  # the leader

    def _drop_broken_off(self) -> None:
        """Forget envs that an interrupt has broken off."""
        with self._engine.guard:
            under_way = self._engine.states.under_way
            self._forget([i for i in self._places if not under_way[i]])

    def _ids(self, queue: Queue) -> np.ndarray:
        """Return the envs of a queue, int64 `[k]`."""
        return np.array([i for i, place in self._places.items() if place[0] == queue], np.int64)

    def _check(self, queue: Queue, least: int) -> None:
        for env_id, (of_env, error) in list(self._failures.items()):
            if of_env == queue:
                del self._failures[env_id]
                raise error
        num_sent = len(self._ids(queue))
        if num_sent < least:
            raise RuntimeError(f"Cannot await {least} {queue[0]} when only {num_sent} were sent.")

    def _note_failure(self, error: EnvherdError) -> None:
        """Record an error for its envs, and wake the threads that wait for them; raise it if it names no env."""
        under_way = self._engine.states.under_way
        failed = [i for i in self._places if not under_way[i]]
        if not failed:
            raise error
        for env_id in failed:
            self._failures[env_id] = self._places.pop(env_id)[0], error
        for waiter in self._waiters:
            waiter.woken.set()

    def _wait_once(self, waiter: _Waiter, waited_s: float, left_s: float | None) -> list[int] | None:
        """Return the ready envs if there are enough or the time is over; else wait once and return None."""
        ids = self._ids(waiter.queue)
        with self._engine.guard:
            ready = self._engine.flights.wait_for(ids, min(waiter.wanted, len(ids)), 0.0)
        if len(ready) >= waiter.wanted or (left_s is not None and left_s <= 0):
            return list(map(int, ready))
        if self._waiters[0] is not waiter:
            waiter.woken.clear()
            self.__exit__()
            try:
                waiter.woken.wait(left_s)
            finally:
                self.__enter__()
            return None
        self._pool.allow_waits()
        if self._wanting:
            self._handed_back.wait(_PASS_S)
            return None
        with self._engine.guard:
            self._lead(waiter, ids, waited_s, left_s)
        return None

    def _lead(self, waiter: _Waiter, ids: np.ndarray, waited_s: float, left_s: float | None) -> None:
        """Wait for the envs of all threads, and wake those that have enough."""
        options, pool, others = self._engine.options, self._pool, self._waiters[1:]
        deadline_s = None if options.step_timeout_s is None else max(0.0, options.step_timeout_s - waited_s)
        if not others or (left_s is None and deadline_s == 0.0):
            kills = left_s is None
            limit_s = deadline_s if kills else left_s
            pool.wait_some(ids, waiter.wanted, limit_s, options.reset_timeout_s, kill_late=kills)
            return
        sent = np.array([*self._places], np.int64)
        ready = pool.wait_some(sent, 0, 0.0, kill_late=False)
        for other in others:
            if np.isin(self._ids(other.queue), ready).sum() >= other.wanted:
                other.woken.set()
        limits = [limit for limit in (left_s, deadline_s) if limit is not None]
        pool.wait_some(sent, len(ready) + 1, min(limits, default=None), kill_late=False)
