"""`LeasePool`: envs of any class, each leased to one caller at a time, for programs with many independent callers.

Each *slot* is one env in one worker, with a thread that serves one lease after the other. Knows nothing of spaces,
batches and episodes.

Guarantees:
- A slot serves one lease at a time, and the calls of a lease in order. Leases are served first come, first served.
- Every wait for an env ends: with a result, at the call's deadline, or with its worker.
- However a lease ends, its slot serves the next one. A lost env is built anew by its slot while the others continue.
- Only the thread of a slot sends to its process, replaces it or kills it. A caller only stores why a lease is over, and
  puts into queues, so an exception at any of its lines (Ctrl-C, a cancellation) leaves nothing half done.

State of a slot (see `Desk._serve`):

| state | leaves it by | next state |
|---|---|---|
| FREE | a lease | LEASED |
| LEASED | a call | CALLING |
| | its end | FREE, after `on_return`; LOST, for `on_return="rebuild"` or too much memory |
| CALLING | an answer | LEASED |
| | a deadline, a crash, a result that cannot be sent, the end of the lease | LOST |
| LOST | | BUILDING |
| BUILDING | its specs | FREE |
| | an error, which the next lease gets | LOST until that lease |
| any | the death of its process | LOST |
"""

import asyncio
import contextlib
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple, Self, TypeVar

from envherd.executor.guests.interpreters import in_interpreters
from envherd.executor.keywords import names_right_keyword
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.worker_pool import PLATE_LABEL, describe_slab
from envherd.executor.processes.crew import Crew
from envherd.executor.processes.error_messages import (
    env_error,
    log,
    log_notice,
    with_sentence,
    with_thread,
    worker_lost,
)
from envherd.executor.processes.mail import await_frame
from envherd.executor.sending.blueprint import (
    EnvKwargs,
    MakeEnv,
    as_factories,
    checked_options,
    draw,
)
from envherd.executor.start.zygote import without_own_frames
from envherd.shm.finalizer import ClosedAtEnd, Finalizer
from envherd.shm.platforms import require
from envherd.shm.segment import create_with_plate
from envherd.shm.slab import Slab, plan_slab
from envherd.workers.current import worker
from envherd.workers.errors import Closed, EnvError, EnvherdError, RemoteTraceback
from envherd.workers.guests.leased import LeasedFactory
from envherd.workers.messages import Ask
from envherd.workers.processes import memory_of
from envherd.workers.sending.pickling import dumps

T = TypeVar("T")
R = TypeVar("R")
#: Seconds between looks of a slot at its lease while it waits.
_LOOK_S = 0.1
#: Words of a lessee's name, of which `guests.monitor` reads 64 bytes; a longer name is cut.
_NAME_WORDS = 8
_OVER = "The lease is over, and its env is built anew."


class Answer(NamedTuple):
    """What a call has returned or raised; see `LeasedAdapter.run`.

    Attributes:
        packed: the result or the exception, pickled.
        text: traceback of an exception; empty for a result.
    """

    packed: bytes = pickle.dumps(None)
    text: str = ""


class Call(NamedTuple):
    """A call of an env's method.

    Attributes:
        name: of the method, for messages.
        payload: see `LeasedAdapter.run`; empty to wait for the slot alone.
        timeout_s: None: no limit.
        answer: takes an `Answer`, or an exception, after which the lease is over.
    """

    name: str = ""
    payload: bytes = b""
    timeout_s: float | None = None
    answer: Callable[[Any], object] = lambda _: None


@dataclass
class Seat:
    """One lease, between its lessee and its slot.

    Attributes:
        name: of the lessee.
        owner: the lessee's object, whose end is the end of the lease.
        is_entered: the lessee has asked for a slot.
        loop: of the lessee, if it has one; its end is the end of the lease, too.
        over: why the lease is over; None until then.
        calls: of the lessee, the first without payload.
    """

    name: str
    owner: weakref.ref[object]
    is_entered: bool = False
    loop: asyncio.AbstractEventLoop | None = None
    over: Exception | None = None
    calls: SimpleQueue[Call] = field(default_factory=SimpleQueue)

    def is_over(self) -> bool:
        """Return whether nobody wants the env any more."""
        return (
            self.over is not None
            or self.owner() is None
            or (self.loop is not None and self.loop.is_closed())
        )

    def end(self, why: str) -> None:
        """Give the slot back, from any thread; a call that is running ends with its process. Idempotent."""
        self.over = self.over or Closed(
            f"the call failed: this lease is over ({why}). Enter another."
        )
        self.calls.put(Call())  # the slot looks at once

    def refuse(self) -> None:
        """Answer the calls that are left with why the lease is over; the lessee and the slot may both do so."""
        while not self.calls.empty():
            with contextlib.suppress(Empty, RuntimeError):  # a loop was closed
                self.calls.get_nowait().answer(self.over)


class Desk:
    """The slots of a pool, and the queue of leases that wait for one.

    Args:
        crew: the workers; a slot has the id of its worker, and of its env.
        on_return: "keep", "rebuild", or a call to make between two leases.
        max_bytes: of a result.
    """

    # Closes the segment that `envherd top` reads; a start that fails before has none.
    _release: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, crew: Crew, on_return: str | Call, max_bytes: int) -> None:
        self.crew = crew
        self._on_return = on_return
        self._max_bytes = max_bytes
        self._wanted: SimpleQueue[Seat] = SimpleQueue()
        self._owner = os.getpid()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Build the envs, and begin to serve."""
        specs = self.crew.start()
        plan = plan_slab(specs, len(specs), self.crew.options.num_frames)
        plate = describe_slab(
            plan,
            self.crew.blueprint.blocks,
            "lease",
            [worker.gpu for worker in self.crew.workers],
        )
        plate["words"]["lessees"] = [plan.nbytes, len(specs) * _NAME_WORDS]
        # The words have 8 bytes each.
        plate["nbytes"] = plan.nbytes + len(specs) * _NAME_WORDS * 8
        # By its descriptor, `top` finds it.
        segment = create_with_plate(plate["nbytes"], PLATE_LABEL, plate)
        self._release = segment.close
        self._words = Slab(plan, segment.array()).words
        self._names = segment.array()[plan.nbytes : plate["nbytes"]].view("S64")
        for slot_id in range(len(specs)):
            thread = threading.Thread(
                target=self._serve,
                args=(slot_id,),
                name=f"envherd-slot-{slot_id}",
                daemon=True,
            )
            self._threads.append(thread)
            with_thread("LeasePool", thread.start)

    def send(self, seat: Seat, call: Call) -> None:
        """Pass a call of a lease to its slot. The first one waits for a slot."""
        seat.calls.put(call)
        if not call.payload:
            self._wanted.put(seat)
        if self.crew.is_closing or os.getpid() != self._owner:  # a fork has no threads
            seat.end("its pool is closed, or of another process")
        if seat.over is not None:  # the slot may have looked before
            seat.refuse()

    def close(self) -> None:
        """End all leases and workers; may be repeated after an interrupt. Ends no workers in a fork of this process."""
        self.crew.is_closing = True
        for thread in self._threads:
            # The garbage collector may have interrupted a slot, and Ctrl-C the start of one.
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join()
        self.crew.close(self.crew.options.close_timeout_s)
        self._release()

    # ---- in the thread of a slot -------------------------------------------------------------

    def _serve(self, slot_id: int) -> None:
        """Serve leases until the pool is closed, and then refuse those that wait."""
        failed: Exception | None = None
        self._note(slot_id, "")
        while not (self.crew.is_closing and self._wanted.empty()):
            failed = failed or self._build(slot_id)
            with contextlib.suppress(Empty):
                failed = self._serve_one(slot_id, self._wanted.get(timeout=_LOOK_S))

    def _serve_one(self, slot_id: int, seat: Seat) -> Exception | None:
        """Make the calls of a lease until it is over; return the error that prevents its env."""
        failed = self._build(slot_id)  # perhaps it can be built for this one
        seat.over = seat.over or failed
        is_served = not seat.is_over()
        self._note(slot_id, seat.name)
        while not (self.crew.is_closing or seat.is_over()):
            if self.crew.workers[slot_id].has_exited():
                seat.over = with_sentence(
                    worker_lost(self.crew.workers[slot_id], "lease"),
                    _OVER,
                )
            with contextlib.suppress(Empty, RuntimeError):  # a loop was closed
                call = seat.calls.get(timeout=_LOOK_S)
                # A call whose lease has ended meanwhile never reaches its env.
                answer = seat.over or self._make(slot_id, call, seat.is_over)
                if isinstance(answer, Exception):
                    seat.over = seat.over or answer
                call.answer(answer)
        seat.end("its pool is closed")
        seat.refuse()
        self._note(slot_id, "")
        if is_served:
            self._return(slot_id)
        return failed

    def _build(self, slot_id: int) -> Exception | None:
        """Build the env of a slot in a new process, if it has none; return the error that prevents it."""
        if self.crew.is_closing or not self.crew.workers[slot_id].has_exited():
            return None
        try:
            self.crew.replace(slot_id)
            self.crew.collect_specs(slot_id, lambda: self.crew.is_closing)
        except Exception as error:
            self._end(slot_id)
            return error
        self._note(slot_id, "")
        return None

    def _end(self, slot_id: int) -> None:
        self.crew.workers[slot_id].kill()
        self.crew.workers[slot_id].wait_exit(1.0)

    def _note(self, slot_id: int, name: str) -> None:
        """Show `envherd top` who has a slot from now on; an empty name for nobody."""
        self._names[slot_id] = name.encode(errors="replace")
        self._words["pid"][slot_id] = self.crew.workers[slot_id].pid
        self._words["starts"][slot_id] = self.crew.workers[slot_id].generation + 1
        self._words["since_ns"][slot_id] = time.monotonic_ns()

    def _return(self, slot_id: int) -> None:
        """Do with an env what is done between two leases."""
        worker = self.crew.workers[slot_id]
        limit = self.crew.options.max_worker_memory
        is_kept = self._on_return != "rebuild"
        if isinstance(self._on_return, Call) and not worker.has_exited():
            answer = self._make(slot_id, self._on_return, lambda: False)
            why = answer if isinstance(answer, Exception) else answer.text
            is_kept = not why
            if not (is_kept or self.crew.is_closing):
                log.warning(
                    "slot %d is built anew, because on_return has failed: %s",
                    slot_id,
                    why,
                )
        if not is_kept or (limit is not None and memory_of(worker.pid)["uss"] > limit):
            self.crew.dismiss([worker], self.crew.options.close_timeout_s)
            self._end(slot_id)

    def _make(self, slot_id: int, call: Call, is_over: Callable[[], bool]) -> Any:
        """Make a call; return its answer. If that is an exception, the process has ended."""
        if not call.payload:
            return Answer()
        worker = self.crew.workers[slot_id]
        phase = f"call {call.name}"
        try:
            worker.channel.queue_message(
                Ask(
                    what="call",
                    env_ids=(slot_id,),
                    name="run",
                    args=(call.payload, self._max_bytes),
                )
            )
            frame = await_frame(
                worker,
                phase,
                call.timeout_s,
                0,
                is_over=lambda: self.crew.is_closing or is_over(),
            )
            if frame["kind"] == "values":
                return Answer(*frame["values"][0]["plain"])
            raise env_error(  # noqa: TRY301  # as the crew's
                [{**frame, "phase": phase}],
                slot_id,
                worker.pid,
                worker.gpu,
            )
        except Exception as error:
            self._end(slot_id)
            # Their advice is for callers of a batch.
            if isinstance(error, EnvherdError):
                error.message = error.message.replace(
                    "ExecutorOptions.build_timeout_s",
                    "timeout_s of the pool or call",
                ).replace(" Its episode goes on.", "")
                return with_sentence(error, _OVER)
            return error  # such as a MemoryError


class LeasePool(
    ClosedAtEnd,
    contextlib.AbstractAsyncContextManager["LeasePool"],
):
    """Envs in worker processes, each leased to one caller at a time.

        async with LeasePool(make_env, num_envs=64, timeout_s=30) as pool:
            async with pool.lease() as env:               # waits for a free env, first come, first served
                first = await env.reset(task)             # any method, any picklable arguments and result
                reply = await env.step("look around")

    The same with `with` and without `await` in threads. An env is any object with methods; it needs no spaces. A pool
    may be used from any thread and any event loop, by any number of callers at once.

    An exception of an env is raised as itself, with the env's traceback as its cause, and the lease continues; it is an
    `EnvError` if its class cannot be imported here. After anything else (a deadline, a crash, `sys.exit`, a result that
    cannot be sent, a call that was cancelled while it ran) the process of the env has ended. Then the lease is over,
    and the env is built anew while the others continue.

    Results and exceptions are unpickled by the caller, so workers are trusted as this process is (docs/security.md).

    Args:
        make_env: factory, name of an env, `InPython`, or a list of them, as for `ParallelEnv`; called in the workers.
        num_envs: N; each env has a process, forked from one that has imported what envs need.
        timeout_s: seconds for a call, after which its process is killed; None: no limit.
        env_kwargs: keyword arguments of the factory: a dict, or one for each env.
        on_return: between two leases, "keep" the env (the next lease begins with the env's own `reset`), "rebuild" it
            in a new process, or call this function with the env in its process.
        max_result_bytes: of a result, as it is sent.
        options: those that concern processes are used: `start_method` (not "portable"), `preload`, `worker_threads`,
            `worker_output`, `build_timeout_s`, `close_timeout_s`, `max_worker_memory`, `affinity`, `env_vars`, `gpus`.

    Raises:
        FactoryError, WorkerLost, WorkerTimeout: an env cannot be built, or the system refuses a thread; nothing is left
            running.
        ValueError: an argument or option is refused, or this process is a worker.
    Blocks: until all envs are built. In an event loop: `await asyncio.to_thread(LeasePool, ...)`.
    """

    @names_right_keyword
    def __init__(  # noqa: PLR0913  # one for each thing that a pool decides
        self,
        make_env: MakeEnv,
        num_envs: int,
        timeout_s: float | None = 60.0,
        *,
        env_kwargs: EnvKwargs = None,
        on_return: Literal["keep", "rebuild"] | Callable[[Any], object] = "keep",
        max_result_bytes: int = 1 << 28,
        options: ExecutorOptions | None = None,
    ) -> None:
        require("LeasePool")
        options = replace(
            checked_options(options),
            infos="drop",
            episode_statistics=False,
            env_threads=False,
        )
        for name, is_right, expected, got in (
            ("the process", worker() is None, "the program's own", worker()),
            (
                "timeout_s",
                timeout_s is None or timeout_s > 0,
                "seconds above 0 or None",
                timeout_s,
            ),
            (
                "on_return",
                on_return in ("keep", "rebuild") or callable(on_return),
                "'keep', 'rebuild' or a function",
                on_return,
            ),
            (
                "max_result_bytes",
                max_result_bytes > 0,
                "a positive int",
                max_result_bytes,
            ),
            (
                "start_method",
                options.start_method != "portable",
                "'zygote' or 'spawn'",
                options.start_method,
            ),
        ):
            if not is_right:
                raise ValueError(
                    f"LeasePool failed: expected {name} to be {expected}, got {got!r}."
                )
        blueprint = in_interpreters(
            draw(as_factories(num_envs, make_env), env_kwargs, num_envs, None, options)
        )
        # Equal ones remain the same object.
        leased = {
            call.sent.factory: dumps(LeasedFactory(call.sent.factory))
            for call in blueprint.calls.values()
        }
        blueprint = replace(
            blueprint,
            calls={
                env_id: call._replace(
                    sent=call.sent._replace(factory=leased[call.sent.factory])
                )
                for env_id, call in blueprint.calls.items()
            },
        )
        between = (
            _packed(on_return, (), {}, timeout_s) if callable(on_return) else on_return
        )
        self.num_envs = num_envs
        self.timeout_s = timeout_s
        self.desk = Desk(
            Crew(blueprint, options, log_notice),
            between,
            max_result_bytes,
        )
        self._finalizer = Finalizer(self, self.desk.close)
        try:
            self.desk.start()
        except BaseException:
            self.close()
            raise

    def lease(self, name: str = "") -> "Lease":
        """Return the lease of one env, for one `with` or `async with`; entering it waits for a free env.

        Args:
            name: of the lessee, for `envherd top`; by default that of the thread.

        Raises:
            Closed: the pool was closed.
            (WorkerLost, FactoryError): no env can be built any more.
        """
        return Lease(self, str(name or threading.current_thread().name))

    def map(
        self,
        function: Callable[[Any, T], R],
        tasks: Iterable[T],
        *,
        ordered: bool = True,
    ) -> Iterator[R]:
        """Run `function(env, task)` for each task with a leased env, in threads, at most `num_envs` at once.

        Its first exception is raised (a `StopIteration` as the cause of a `RuntimeError`), or `WorkerLost` if the
        system refuses a thread. That, or leaving the iteration, ends the leases of the other tasks. In an event loop,
        use `asyncio.gather` over coroutines that each enter a lease.

        Args:
            function: what to do with an env.
            tasks: read completely at the first result.
            ordered: yield results in the order of the tasks; False: as they come.
        """

        def run(lease: Lease, task: T) -> R:
            with lease as env:
                return function(env, task)

        task_of = {
            self.lease(f"task {number}"): task for number, task in enumerate(tasks)
        }
        with (
            ThreadPoolExecutor(self.num_envs, "envherd-map") as threads,
            contextlib.ExitStack() as ends,
        ):
            for lease in task_of:
                ends.push(lease)
            # It is called first: then no thread begins another task.
            ends.callback(threads.shutdown, wait=False, cancel_futures=True)
            futures = [
                with_thread("map", threads.submit, run, *pair)
                for pair in task_of.items()
            ]
            # Not `map`, which a StopIteration of the function would end.
            yield from (
                future.result()
                for future in (futures if ordered else as_completed(futures))
            )

    def worker_output(self, slot_id: int) -> str:
        """Return the kept part of what the env of a slot has printed; errors quote its last lines."""
        return self.desk.crew.workers[slot_id].log()

    def close(self) -> None:
        """End all leases (a call that is running is killed), close the envs, and end the workers. Idempotent."""
        self._finalizer()

    async def __aexit__(self, *_: object) -> None:
        """Close, without blocking the event loop."""
        await asyncio.to_thread(self.close)


class Lease:
    """One env for one caller, from the beginning of a `with` or `async with` to its end; see `LeasePool.lease`.

    It has the methods of the env, called in the env's process: `lease.step(action)`. In an `async with`, await them.
    """

    def __init__(self, pool: LeasePool, name: str) -> None:
        self._pool = pool  # which is closed when it is freed
        self._seat = Seat(name, weakref.ref(self))

    def call(
        self,
        method: str | Callable[..., Any],
        /,
        *args: Any,
        timeout_s: float | None = 0.0,
        **kwargs: Any,
    ) -> Any:
        """Call a method of the env by name, or a function that gets the env first.

        Args:
            method: name, or a function that can be pickled: `call(lambda env: env.score)`.
            *args: of the call.
            timeout_s: seconds; 0: the pool's, None: no limit.
            **kwargs: of the call.

        Raises:
            WorkerTimeout, WorkerLost, EnvError: the env is lost, and the lease over; the next call raises it again.
            Closed: the lease was ended.
            Exception: any that the env raises; the lease continues. Or what pickling an argument raises; nothing was
                sent then.
        """
        if timeout_s is not None and not timeout_s >= 0:
            raise ValueError(
                f"call failed: expected timeout_s of 0 seconds or more, or None, got {timeout_s!r}."
            )
        return self._send(
            _packed(
                method,
                args,
                kwargs,
                self._pool.timeout_s if timeout_s == 0 else timeout_s,
            )
        )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a method of the env."""
        # Other libraries try such names on any object, to copy or to show it.
        if name.startswith("_"):
            raise AttributeError(
                f"{name!r} is private. If the env has that method, use call({name!r}, ...)."
            )
        return lambda *args, **kwargs: self._send(
            _packed(name, args, kwargs, self._pool.timeout_s)
        )

    def _send(self, call: Call) -> Any:
        if not self._seat.is_entered:
            raise Closed(
                "call failed: expected a lease that was entered. Write `with pool.lease() as env`."
            )
        return self._wait(call) if self._seat.loop is None else self._wait_async(call)

    def _wait(self, call: Call) -> Any:
        """Make a call; an interrupt ends the lease."""
        # In C: an interrupt of a `Future` may leave its lock held.
        answers: SimpleQueue[Any] = SimpleQueue()
        try:
            self._pool.desk.send(self._seat, call._replace(answer=answers.put))
            answer = answers.get()
        except BaseException:
            self._seat.end("it was interrupted")
            raise
        return _opened(answer)

    async def _wait_async(self, call: Call) -> Any:
        """Make a call once it is awaited; a cancellation ends the lease, also if the slot has answered meanwhile."""
        loop = asyncio.get_running_loop()
        # Not an `asyncio.Queue`, whose `get` raises in a task that is dropped after its loop was closed.
        future: asyncio.Future[Any] = loop.create_future()
        put = lambda answer: loop.call_soon_threadsafe(_complete, future, answer)  # noqa: E731
        try:
            self._pool.desk.send(self._seat, call._replace(answer=put))
            answer = await future
        except BaseException:
            self._seat.end("a call was cancelled")
            raise
        return _opened(answer)

    def _enter(self, loop: asyncio.AbstractEventLoop | None) -> Any:
        if self._seat.is_entered:
            raise Closed(
                "lease failed: expected a new lease, got one that was entered before. Call lease() again."
            )
        self._seat.loop = loop
        self._seat.is_entered = True
        return self._send(Call())

    def __enter__(self) -> Self:
        """Wait for a free env."""
        self._enter(None)
        return self

    def __exit__(self, *_: object) -> None:
        """Give the env back."""
        self._seat.end("its block has ended")

    async def __aenter__(self) -> Self:
        """Wait for a free env."""
        await self._enter(asyncio.get_running_loop())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Give the env back. It never suspends, so a task that is dropped gives its env back as well."""
        self.__exit__()


def _complete(future: asyncio.Future[Any], answer: Any) -> None:
    """Complete the wait of a task, unless it was cancelled."""
    if not future.done():
        future.set_result(answer)


def _packed(
    method: str | Callable[..., Any],
    args: Any,
    kwargs: Any,
    timeout_s: float | None,
) -> Call:
    """Return a call that can be sent."""
    name = (
        method
        if isinstance(method, str)
        else getattr(method, "__qualname__", type(method).__qualname__)
    )
    return Call(name, dumps((method, args, kwargs), shares=True), timeout_s)


def _opened(answer: Any) -> Any:
    """Return the result that an answer has, or raise its exception; see `Call`."""
    if isinstance(answer, Exception):
        raise answer
    text = without_own_frames(answer.text)
    try:
        value = pickle.loads(answer.packed)
        if text:  # also checks that it is an exception
            value.with_traceback(None).__cause__ = RemoteTraceback(text)
    except Exception as error:
        what = (
            f"the env raised {text.strip().splitlines()[-1]}"
            if text
            else "got a result that cannot be read here"
        )
        cause = RemoteTraceback(text) if text else error
        raise EnvError(
            f"the call failed: {what} ({error}). The lease continues.",
            remote_traceback=text,
        ) from cause
    if text:
        raise value
    return value
