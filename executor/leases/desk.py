"""The slots of a lease pool: each is one env in one worker, with a thread that serves one lease after the other.

Guarantees:
- A slot serves one lease at a time, and the calls of a lease in order. Leases are served first come, first served.
- However a lease ends, its slot serves the next one. A lost env is built anew by its slot while the others go on.
- A call is completed once: by the slot's thread with its outcome, or by another thread (its caller, who gives up). In
  that case its process is killed, and nobody else gets the env.
- Only the slots' threads change what slots have. A caller changes a queue or a future by single calls, so an exception
  at any of its lines (Ctrl-C, a cancellation) leaves nothing half done.
Assumes: signal handlers run in the main thread, which is no slot's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

import numpy as np

from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.crew import Blueprint, Crew
from envherd.executor.pools.error_messages import env_error, log, log_notice, with_sentence
from envherd.executor.pools.process_log import without_own_frames
from envherd.executor.pools.slab_plate import LABEL, describe
from envherd.executor.pools.worker_process import WorkerProcess
from envherd.shm.nameplate import create_named
from envherd.shm.segment import Segment
from envherd.shm.slab import Slab, plan_slab
from envherd.workers.errors import Closed, EnvherdError, RemoteTraceback
from envherd.workers.leased import CODECS, Results
from envherd.workers.messages import Ask
from envherd.workers.processes import memory_of

#: Seconds between looks of an idle slot at its worker.
_LOOK_S = 0.2
#: Words of a lessee's name, of which `monitor.statistics` reads 64 bytes; a longer name is cut.
_NAME_WORDS = 8
#: What errors of the executor advise -> what a lessee can do.
_OPTION = ("ExecutorOptions.build_timeout_s", "timeout_s of the pool or call")
_ENV_ERROR = (" Its episode goes on.", "")

T = TypeVar("T")
#: Of a lessee, who waits for what was raised, and for what was returned. Never an exception: futures change some.
Done = Future[tuple[Exception | None, Any]]


class Rules(NamedTuple):
    """What holds for all leases of a pool; see `LeasePool`.

    Attributes:
        timeout_s: of a call.
        on_return: "keep", "rebuild", or the payload of a call.
        results: how results leave the workers.
        max_bytes: of a result.
    """

    timeout_s: float | None
    on_return: str | bytes
    results: Results
    max_bytes: int


class Call(NamedTuple):
    """A call of an env's method.

    Attributes:
        name: of the method, for messages.
        payload: see `LeasedAdapter.run`.
        timeout_s: None: no limit.
        done: pending until the call has ended.
    """

    name: str
    payload: bytes
    timeout_s: float | None
    done: Done


class Seat:
    """One lease, between its lessee and its slot.

    Attributes:
        name: of the lessee.
        granted: done once a slot serves it.
        calls: of the lessee; anything else ends the lease.
        over: why the lease is over; empty until then.
        loop: of the lessee, if it has one.
        latest: returns what the latest call that was sent waits for, unless that is freed; so no result is kept.
        dropped: ends the lease when the lessee's object is freed.
    """

    loop: asyncio.AbstractEventLoop | None = None
    latest: Callable[[], Done | None] = staticmethod(lambda: None)
    dropped: Any = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.over = ""
        self.granted: Done = Future()
        self.calls: SimpleQueue[Any] = SimpleQueue()

    def send(self, call: Call) -> None:
        """Pass a call to the slot."""
        self.latest = weakref.ref(call.done)
        self.calls.put(call)
        if self.over:  # the slot may have looked before
            self.refuse()

    def next_call(self) -> Any:
        """Wait for a call; return something else once the lease is over, or the lessee's loop is closed."""
        while self.loop is None or not self.loop.is_closed():
            with contextlib.suppress(Empty):
                return self.calls.get(timeout=_LOOK_S)
        return None

    def refuse(self) -> None:
        """Answer the calls that are left; the lessee and the slot may both do so."""
        for call in _taken(self.calls):
            if isinstance(call, Call):
                complete(call.done, Closed(f"{call.name} failed: this lease is over ({self.over}). Enter another."))

    def end(self, why: str) -> None:
        """Give the slot back, from any thread; a call that is running ends with its process. Idempotent."""
        self.over = self.over or why
        self.granted.cancel()
        if (done := self.latest()) is not None:
            complete(done, Closed(f"the call failed: its lease is over ({self.over})."))
        self.calls.put(None)


def complete(done: Done, error: Exception | None, value: Any = None) -> bool:
    """Complete a wait of a lessee; return False if another thread has done so before."""
    try:
        done.set_result((error, value))
    except InvalidStateError:
        return False
    return True


def _end(worker: WorkerProcess) -> None:
    worker.kill()
    worker.wait_exit(1.0)


def _taken(queue: SimpleQueue[T | None]) -> Iterator[T]:
    """Take what is in a queue, also while other threads do."""
    with contextlib.suppress(Empty):
        while True:
            if (one := queue.get_nowait()) is not None:
                yield one


class Desk:
    """The slots of a pool, and the queue of leases that wait for one.

    Attributes:
        crew: the workers; a slot has the id of its worker, and of its env.
        rules: of the leases.
        wanted: leases that wait, in order.
        words: of the slots, as `envherd top` reads them.
    """

    def __init__(self, blueprint: Blueprint, options: ExecutorOptions, rules: Rules) -> None:
        self.rules = rules
        self.crew = Crew(blueprint, options, log_notice)
        self.wanted: SimpleQueue[Seat | None] = SimpleQueue()
        self._options = options
        self._owner = os.getpid()
        self._lock = threading.RLock()  # held while a worker is replaced or killed; again if that collects garbage
        self._seats: dict[int, Seat] = {}
        self._waits: dict[int, Done] = {}  # of slots for their workers, until they are completed
        self._threads: list[threading.Thread] = []
        self._segment: Segment | None = None

    def start(self) -> None:
        """Build the envs, and begin to serve."""
        specs = self.crew.start()
        plan = plan_slab(specs, len(specs), self._options.num_frames)
        plate = describe(plan, self.crew.blueprint.blocks, "lease", [worker.gpu for worker in self.crew.workers])
        plate["words"]["lessees"] = [plan.nbytes, len(specs) * _NAME_WORDS]
        plate["nbytes"] = plan.nbytes + len(specs) * _NAME_WORDS * 8
        self._segment = create_named(plate["nbytes"], LABEL, plate)  # by its descriptor, `top` finds it
        memory = self._segment.array()
        self.words = Slab(plan, memory).words
        self.words["lessees"] = memory[plan.nbytes : plate["nbytes"]].view(np.int64)
        for slot_id in range(len(specs)):
            thread = threading.Thread(target=self._serve, args=(slot_id,), name=f"envherd-slot-{slot_id}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def enqueue(self, seat: Seat) -> Done:
        """Let a lease wait for a slot; return what is done then."""
        self.wanted.put(seat)
        if self.crew.is_closing or os.getpid() != self._owner:
            self._refuse()
        return seat.granted

    def _refuse(self) -> None:
        """Answer the leases that wait, of a closed pool or in a fork of its process."""
        for seat in _taken(self.wanted):
            complete(seat.granted, Closed("lease failed: this pool is closed, or of another process."))

    def close(self) -> None:
        """End all leases and workers; may be repeated after an interrupt. Does nothing in a fork of this process."""
        if os.getpid() != self._owner:
            return
        self.crew.is_closing = True
        for seat in list(self._seats.values()):
            seat.end("the pool was closed")
        for done in list(self._waits.values()):
            complete(done, Closed("the pool was closed."))
        for _ in self._threads:
            self.wanted.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # which the garbage collector may have interrupted
                thread.join()
        self._refuse()
        self.crew.close(self._options.close_timeout_s)
        if self._segment is not None:
            self._segment.close()

    # ---- in the thread of a slot -------------------------------------------------------------

    def _serve(self, slot_id: int) -> None:
        """Serve leases until the pool is closed. If the env cannot be built, the next lease gets the error."""
        seat = error = None
        self._note(slot_id, "")
        while not self.crew.is_closing:
            if self.crew.workers[slot_id].has_exited() and (error is None or seat is not None):
                error = self._build(slot_id)
            if seat is None:
                with contextlib.suppress(Empty):
                    seat = self.wanted.get(timeout=_LOOK_S)
                continue
            if complete(seat.granted, error) and error is None:
                self._serve_one(slot_id, seat)
                self._return(slot_id)
            seat = None
        if seat is not None:
            self.wanted.put(seat)  # `close` refuses it

    def _build(self, slot_id: int) -> Exception | None:
        """Build the env of a slot in a new process; return the error that prevents it."""
        try:
            with self._lock:
                self.crew.replace(slot_id)
            self._wait(slot_id, Future(), lambda: self.crew.collect_specs(slot_id))
        except Exception as error:
            _end(self.crew.workers[slot_id])
            if not self.crew.is_closing:
                log.warning("slot %d has no env until the next lease: %s", slot_id, error)
            return error
        self._note(slot_id, "")
        return None

    def _note(self, slot_id: int, name: str) -> None:
        """Show `envherd top` who has a slot from now on; an empty name for nobody."""
        worker = self.crew.workers[slot_id]
        self.words["lessees"].view("S64")[slot_id] = name.encode()
        self.words["pid"][slot_id] = worker.pid
        self.words["starts"][slot_id] = worker.generation + 1
        self.words["since_ns"][slot_id] = time.monotonic_ns()

    def _serve_one(self, slot_id: int, seat: Seat) -> None:
        """Make the calls of a lease until it ends."""
        self._seats[slot_id] = seat
        if self.crew.is_closing:  # `close` may have looked before
            seat.end("the pool was closed")
        self._note(slot_id, seat.name)
        while isinstance(call := seat.next_call(), Call):
            if call.done.done():  # its caller has given up
                continue
            if not complete(call.done, *self._make(slot_id, call)):  # given up meanwhile: nobody else gets this env
                _end(self.crew.workers[slot_id])
            self.words["env_steps"][slot_id] += 1
            if seat.over:
                break
            del call  # and its result
        seat.over = seat.over or "its block has ended"
        seat.refuse()
        del self._seats[slot_id]
        self._note(slot_id, "")

    def _return(self, slot_id: int) -> None:
        """Do with an env what is done between two leases."""
        rules, worker = self.rules, self.crew.workers[slot_id]
        if isinstance(rules.on_return, bytes) and not worker.has_exited():
            error, _ = self._make(slot_id, Call("on_return", rules.on_return, rules.timeout_s, Future()))
            if error is not None:
                log.warning("slot %d is built anew, because on_return has failed: %s", slot_id, error)
                _end(worker)
        limit = self._options.max_worker_memory
        if rules.on_return == "rebuild" or (limit is not None and memory_of(worker.pid)["uss"] > limit):
            self.crew.dismiss(slot_id, self._options.close_timeout_s)
            _end(worker)

    def _wait(self, slot_id: int, done: Done, wait: Callable[[], T]) -> T:
        """Wait for a worker, which is killed if another thread completes `done` meanwhile."""
        thread, worker = threading.current_thread(), self.crew.workers[slot_id]
        self._waits[slot_id] = done
        done.add_done_callback(lambda _: None if threading.current_thread() is thread else self._kill(worker))
        if self.crew.is_closing or done.done():  # before this thread could be heard of
            worker.kill()
        try:
            return wait()
        finally:
            del self._waits[slot_id]

    def _kill(self, worker: WorkerProcess) -> None:
        if os.getpid() != self._owner:
            return
        with self._lock:
            if worker is self.crew.workers[worker.worker_id]:  # its descriptors are open
                worker.kill()

    def _make(self, slot_id: int, call: Call) -> tuple[Exception | None, Any]:
        """Make a call; return what it has raised and what it has returned. If the env is lost, its process ends."""
        crew, worker = self.crew, self.crew.workers[slot_id]
        phase = f"call {call.name}"
        ask = Ask(what="call", env_ids=(slot_id,), name="run", args=(call.payload, *self.rules[2:]))
        try:
            worker.channel.queue_message(ask)
            frame = self._wait(slot_id, call.done, lambda: crew.await_frame(slot_id, phase, call.timeout_s, ask.number))
            return self._read(frame, worker, phase)
        except Exception as error:
            _end(worker)
            if (seat := self._seats.get(slot_id)) is not None:
                seat.over = seat.over or f"its env was lost in {call.name}"
            if not isinstance(error, EnvherdError):  # the result cannot be read, or there is no memory for it
                return error, None
            error.message = error.message.replace(*_OPTION).replace(*_ENV_ERROR)
            return with_sentence(error, "The lease is over, and its env is built anew."), None

    def _read(self, frame: dict[str, Any], worker: WorkerProcess, phase: str) -> tuple[Exception | None, Any]:
        """Return what a call has raised and what it has returned.

        Raises:
            EnvError: the env has called `sys.exit`, or its result cannot be sent.
            Exception: the result cannot be read.
        """
        _, decode = CODECS[self.rules.results]
        reply = frame["values"][0]["plain"] if frame["kind"] == "values" else {"raised": frame}
        if "value" in reply:
            return None, decode(reply["value"])
        fault = {**reply["raised"], "env_id": worker.worker_id, "phase": phase}
        failed = env_error([fault], worker.worker_id, worker.pid, worker.gpu)
        if "error" not in reply:
            raise failed
        with contextlib.suppress(Exception):  # its class is unknown here, or cannot be made
            error = decode(reply["error"])
            error.__cause__ = RemoteTraceback(without_own_frames(fault["traceback"]))
            return error, None
        return failed, None
