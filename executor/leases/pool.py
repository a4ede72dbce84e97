"""`LeasePool`: envs of any class, each leased to one caller at a time, for programs with many independent callers.

Guarantees: those of `slots`. Every wait for an env ends: with a result, at the call's deadline, or with its worker.
Knows nothing of spaces, batches and episodes.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from envherd.executor.keywords import names_right_keyword
from envherd.executor.leases.desk import Call, Desk, Done, Rules, Seat
from envherd.executor.monitor.statistics import WorkerStatistics, read_workers
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.blueprint import EnvKwargs, MakeEnv, as_factories, checked_options, draw
from envherd.shm.finalizer import Finalizer
from envherd.shm.platforms import require
from envherd.workers.build import Factory, kwargs_error
from envherd.workers.current import worker
from envherd.workers.leased import CODECS, LeasedFactory, Results
from envherd.workers.pickling import dumps

T = TypeVar("T")
R = TypeVar("R")
_LIMIT = 1 << 28  # bytes


class LeasePool:
    """Envs in worker processes, each leased to one caller at a time.

        async with LeasePool(make_env, num_envs=64, timeout_s=30) as pool:
            async with pool.lease() as env:               # waits for a free env, first come, first served
                first = await env.reset(task)             # any method, any picklable arguments and result
                reply = await env.step("look around")

    The same with `with` and without `await` in threads. An env is any object with methods; it needs no spaces. Methods
    may be asynchronous. A pool may be used from any thread and any event loop, by any number of callers at once.

    An exception of an env is raised as itself, with the env's traceback as its cause, and the lease goes on; it is an
    `EnvError` if its class cannot be imported here. After anything else (a deadline, a crash, `sys.exit`, a result that
    cannot be sent, a call that was cancelled while it ran) the process of the env has ended. Then the lease is over,
    and the env is built anew while the others go on.

    Results and exceptions are unpickled, so workers are trusted as this process is (docs/security.md). With
    `results="plain"` nothing is unpickled.

    Args:
        make_env: factory, name of an env, `InPython`, or a list of them, as for `ParallelEnv`; called in the workers.
        num_envs: N; each env has a process, forked from one that has imported what envs need.
        timeout_s: seconds for a call, after which its process is killed; None: no limit.
        env_kwargs: keyword arguments of the factory: a dict, or one for each env.
        on_return: between two leases, "keep" the env (the next lease begins with the env's own `reset`), "rebuild" it
            in a new process, or call this function with the env in its process.
        results: "pickle", or "plain" for results of plain data only (numbers, text, arrays, lists, dicts); exceptions
            are then always `EnvError`.
        max_result_bytes: of a result, as it is sent.
        seed: of the global random generators before each factory is called; None draws one.
        options: those that concern processes are used: `start_method` (not "portable"), `preload`, `worker_threads`,
            `worker_output`, `build_timeout_s`, `close_timeout_s`, `max_restarts` and `restart_window_s` (of envs that
            cannot be built), `recycle_after` (leases), `max_worker_memory`, `affinity`, `env_vars`, `gpus`.

    Raises:
        FactoryError, WorkerLost, WorkerTimeout: an env cannot be built; nothing is left running.
        RuntimeError: this process is a worker.
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
        results: Results = "pickle",
        max_result_bytes: int = _LIMIT,
        seed: int | None = None,
        options: ExecutorOptions | None = None,
    ) -> None:
        require("LeasePool")
        if worker() is not None:
            raise RuntimeError(f"LeasePool failed: expected the program's own process, got {worker()}. Make it there.")
        options = replace(checked_options(options), infos="drop", episode_statistics=False, env_threads=False)
        options.refuse_capsules("LeasePool")
        _check(timeout_s, on_return, results, max_result_bytes, options)
        factories = as_factories(num_envs, make_env)
        made = {id(one): LeasedFactory(one) for one in factories}
        wrapped: list[Factory] = [made[id(one)] for one in factories]
        payload = on_return if isinstance(on_return, str) else dumps((on_return, (), {}), shares=True)
        rules = Rules(timeout_s, payload, results, max_result_bytes)
        self.num_envs = len(wrapped)
        self.desk = Desk(draw(wrapped, env_kwargs, len(wrapped), seed, options), options, rules)
        self._finalizer = Finalizer(self, self.desk.close)
        try:
            self.desk.start()
        except BaseException:
            self.close()
            raise

    def lease(self, name: str = "") -> Lease:
        """Return the lease of one env, for `with` or `async with`; entering it waits for a free env.

        Args:
            name: of the lessee, for `envherd top`; by default that of the asyncio task, or of the thread.

        Raises:
            Closed: the pool was closed. WorkerLost, FactoryError, ...: no env can be built any more.
        """
        return Lease(self, name)

    def map(self, function: Callable[[Any, T], R], tasks: Iterable[T], *, ordered: bool = True) -> Iterator[R]:
        """Run `function(env, task)` for each task with a leased env, in threads, at most `num_envs` at once.

        Its first exception is raised. That, or leaving the iteration, ends the leases of the other tasks. In an event
        loop, use `asyncio.gather` over coroutines that each enter a lease.

        Args:
            function: what to do with an env.
            tasks: read completely at the first result.
            ordered: yield results in the order of the tasks; False: as they come.
        """
        leases: list[Lease] = []

        def run(task: T) -> R:
            lease = self.lease()
            leases.append(lease)
            with lease as env:
                return function(env, task)

        with ThreadPoolExecutor(self.num_envs, "envherd-map") as threads:
            futures = [threads.submit(run, task) for task in tasks]
            try:
                for future in futures if ordered else as_completed(futures):
                    yield future.result()
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
                for lease in leases:
                    lease.__exit__()

    def workers(self) -> tuple[WorkerStatistics, ...]:
        """Return what each slot does: `phase` is the lessee's name, or "idle", for `phase_s` seconds."""
        return read_workers(self.desk.words, self.desk.crew.blueprint.blocks, time.monotonic_ns())

    def worker_output(self, slot_id: int) -> str:
        """Return the kept part of what the env of a slot has printed; errors quote its last lines."""
        return self.desk.crew.workers[slot_id].log()

    def close(self) -> None:
        """End all leases (a call that is running is killed), close the envs, and end the workers. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        """Return itself; closed at the end of the `with`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    async def __aenter__(self) -> Self:
        """Return itself; closed at the end of the `async with`."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close, without blocking the event loop."""
        await asyncio.to_thread(self.close)

    if not TYPE_CHECKING:  # to a type checker, unknown attributes remain unknown

        def __getattr__(self, name: str) -> Any:
            """Refuse the methods of a batch of envs."""
            raise AttributeError(f"a LeasePool has no {name}: it has no batch. Lease an env, or use ParallelEnv.")


class Lease:
    """One env for one caller, from the beginning of a `with` or `async with` to its end; see `LeasePool.lease`.

    It has the methods of the env, called in the env's process: `lease.step(action)`. In an `async with`, await them.
    """

    def __init__(self, pool: LeasePool, name: str) -> None:
        self._pool = pool  # which is closed when it is freed
        self._seat = Seat(name)
        # For an interrupt before the block, or a block that never ends. No Python code, in which Ctrl-C would be lost.
        self._seat.dropped = weakref.ref(self, self._seat.calls.put)

    def call(
        self, method: str | Callable[..., Any], /, *args: Any, timeout_s: float | None = 0.0, **kwargs: Any
    ) -> Any:
        """Call a method of the env by name, or a function that gets the env first.

        Args:
            method: name, or a function that can be pickled: `call(lambda env: env.score)`.
            *args: of the call.
            timeout_s: seconds; 0: the pool's, None: no limit.
            **kwargs: of the call.

        Raises:
            WorkerTimeout, WorkerLost, EnvError: the env is lost, and the lease over. Closed: it was over.
            Exception: any that the env raises; the lease continues.
        """
        return self._call(method, args, kwargs, timeout_s)

    def _call(self, method: str | Callable[..., Any], args: Any, kwargs: Any, timeout_s: float | None = 0.0) -> Any:
        name = method if isinstance(method, str) else getattr(method, "__qualname__", type(method).__qualname__)
        try:
            payload = dumps((method, args, kwargs), shares=True)
        except Exception as error:
            text = str(kwargs_error((args, kwargs), error))
            raise TypeError(text.replace("env_kwargs", f"call {name}", 1)) from error
        done: Done = Future()
        self._seat.send(Call(name, payload, self._pool.desk.rules.timeout_s if timeout_s == 0 else timeout_s, done))
        return self._wait(self._seat, done)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a method of the env."""
        if name.startswith("_"):  # other libraries try such names on any object, to copy or to show it
            raise AttributeError(f"{name!r} is private. If the env has that method, use call({name!r}, ...).")
        return lambda *args, **kwargs: self._call(name, args, kwargs)

    def __enter__(self) -> Self:
        """Wait for a free env."""
        self._wait = _wait
        self._seat.name = self._seat.name or threading.current_thread().name
        _wait(self._seat, self._pool.desk.enqueue(self._seat))
        return self

    def __exit__(self, *_: object) -> None:
        """Give the env back."""
        self._seat.end("its block has ended")

    async def __aenter__(self) -> Self:
        """Wait for a free env."""
        self._wait = _wait_async
        self._seat.loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        self._seat.name = self._seat.name or (task.get_name() if task is not None else "")
        await _wait_async(self._seat, self._pool.desk.enqueue(self._seat))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Give the env back. It never suspends, so a task that is dropped gives its env back as well."""
        self._seat.end("its block has ended")


def _wait(seat: Seat, done: Done) -> Any:
    """Wait for a slot; an interrupt ends the lease."""
    try:
        error, value = done.result()
    except BaseException:
        seat.end("it was interrupted")
        raise
    if error is not None:
        raise error
    return value


async def _wait_async(seat: Seat, done: Done) -> Any:
    """Wait for a slot; a cancellation ends the lease."""
    try:
        error, value = await asyncio.wrap_future(done)
    except BaseException:
        seat.end("a call was cancelled")
        raise
    if error is not None:
        raise error
    return value


def _check(timeout_s: Any, on_return: Any, results: Any, max_result_bytes: Any, options: ExecutorOptions) -> None:
    """Refuse arguments that can never work."""
    is_seconds = timeout_s is None or (isinstance(timeout_s, (int, float)) and timeout_s > 0)
    for name, is_right, expected, got in (
        ("timeout_s", is_seconds, "seconds above 0 or None", timeout_s),
        (
            "on_return",
            on_return in ("keep", "rebuild") or callable(on_return),
            "'keep', 'rebuild' or a function",
            on_return,
        ),
        ("results", results in CODECS, f"one of {tuple(CODECS)}", results),
        (
            "max_result_bytes",
            isinstance(max_result_bytes, int) and max_result_bytes > 0,
            "a positive int",
            max_result_bytes,
        ),
        ("start_method", options.start_method != "portable", "'zygote' or 'spawn'", options.start_method),
    ):
        if not is_right:
            raise ValueError(f"LeasePool failed: expected {name} to be {expected}, got {got!r}.")
