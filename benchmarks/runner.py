"""A runner: one process per pool, like a program that uses it; it builds the pool and runs slots on request.

Guarantees: if a pool cannot be built, raises, or does not answer in time, only that pool fails. When the runner ends,
all its descendants have ended. Pools' output goes to a file, whose last lines are part of errors.
Assumes: the process that starts runners has only one thread at that time (it forks).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.accounting import busy_ns, started_by, usage_of
from benchmarks.gate import others_share
from benchmarks.pools import Contender, Job, Pool
from benchmarks.ratios import levels_of
from benchmarks.watching import kill_tree, terminate_with_parent

#: Share of a slot for a warm-up, because the pool's processes have slept for seconds.
WARM_UP = 0.2
_STOP_S = 15.0

Measure = Callable[[Pool, float], dict[str, Any]]


class PoolError(RuntimeError):
    """A pool could not be built, raised, or did not answer in time."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The figures of one slot of one pool.

    Attributes:
        steps: env steps that were made.
        wall_ns: nanoseconds that it lasted.
        run_ns, parent_run_ns: processor nanoseconds of all processes, and of the caller's.
        delay_ns: nanoseconds for which they waited for processors, also for each other.
        others: share of the machine that other processes used, 0..1.
        episodes: ended episodes; -1 if unknown.
        batch_us: microseconds of a call, at `ratios.LEVELS`.
        num_calls: number of calls.
        num_processes: of the pool, besides the caller's.
    """

    steps: int
    wall_ns: int
    run_ns: int
    parent_run_ns: int
    delay_ns: int
    others: float
    episodes: int
    batch_us: list[float]
    num_calls: int
    num_processes: int

    @property
    def steps_per_s(self) -> float:
        """Env steps per second of wall time."""
        return self.steps / self.wall_ns * 1e9

    @property
    def cpu_us(self) -> float:
        """Processor microseconds per env step."""
        return self.run_ns / 1e3 / max(1, self.steps)


def run_slot(pool: Pool, seconds: float, least_calls: int = 0) -> Slot:
    """Run a pool, and measure it after a warm-up; at least one call each, or `least_calls` that are measured."""
    clock, step = time.perf_counter_ns, pool.step
    pool.wake()
    pids = started_by(os.getpid())
    warm = clock() + int(seconds * WARM_UP * 1e9)
    step()
    while clock() < warm:
        step()
    ended = pool.episodes()
    own, theirs, busy = usage_of([os.getpid()]), usage_of(pids), busy_ns()
    steps, ticks = 0, [clock()]
    end = ticks[0] + int(seconds * 1e9)
    while ticks[-1] < end or len(ticks) <= least_calls:
        steps += step()
        ticks.append(clock())
    own, theirs, busy = (
        usage_of([os.getpid()]).since(own),
        usage_of(pids).since(theirs),
        busy_ns() - busy,
    )
    ended = pool.episodes() - ended if ended >= 0 else -1
    pool.rest()
    wall_ns, run_ns = ticks[-1] - ticks[0], own.run_ns + theirs.run_ns
    return Slot(
        steps=steps,
        wall_ns=wall_ns,
        run_ns=run_ns,
        parent_run_ns=own.run_ns,
        delay_ns=own.delay_ns + theirs.delay_ns,
        others=others_share(busy, run_ns, wall_ns, os.cpu_count() or 1),
        episodes=ended,
        batch_us=levels_of([(b - a) / 1e3 for a, b in itertools.pairwise(ticks)]),
        num_calls=len(ticks) - 1,
        num_processes=len(pids),
    )


def slot_of(pool: Pool, seconds: float, least_calls: int = 0) -> dict[str, Any]:
    """Run a slot; return it as plain data."""
    return asdict(run_slot(pool, seconds, least_calls))


class Runner:
    """One pool in a separate process. Start it, run slots, stop it.

    Args:
        contender, job: what to build.
    """

    def __init__(self, contender: Contender, job: Job) -> None:
        self.contender = contender
        self._job = job
        self._is_stopped = False
        self._log: Any = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by stop()
        context = multiprocessing.get_context("fork")
        self._pipe, self._theirs = context.Pipe()
        self._process = context.Process(
            target=_host, args=(contender, job, self._theirs, self._log.fileno())
        )

    def start(self, limit_s: float) -> None:
        """Start it, and wait until its pool is ready.

        Raises:
            PoolError: the pool was not ready within `limit_s` seconds.
        """
        self._process.start()
        self._theirs.close()
        self._hear("build", limit_s)

    def run(self, seconds: float, limit_s: float) -> Slot:
        """Run a slot.

        Raises:
            PoolError: the pool raised, or did not answer within `limit_s` seconds; it is no longer usable.
        """
        return Slot(
            **self.ask(
                functools.partial(slot_of, least_calls=self._job.episode),
                seconds,
                limit_s,
            )
        )

    def ask(self, measure: Measure, seconds: float, limit_s: float) -> dict[str, Any]:
        """Run another measurement of the pool in its process; raises as `run`.

        Args:
            measure: a function of a module, `(pool, seconds) -> plain data`.
            seconds: its second argument.
            limit_s: seconds for it to answer.
        """
        self._pipe.send((measure, seconds))
        return self._hear("step", limit_s)

    def stop(self) -> None:
        """End the pool and its process; kill processes that do not end in time. Idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._process.pid is not None:
            started = started_by(self._process.pid)
            with contextlib.suppress(OSError):
                self._pipe.send(None)
            self._process.join(_STOP_S)
            if self._process.is_alive():
                kill_tree(self._process.pid)
                self._process.join()
            _kill_left(started)
            self._process.close()
        for pipe in (self._pipe, self._theirs):
            pipe.close()
        self._log.close()

    def _hear(self, what: str, limit_s: float) -> Any:
        try:
            if not self._pipe.poll(limit_s):
                kill_tree(int(self._process.pid or 0))
                raise PoolError(f"{what}: no answer within {limit_s:.0f} s")
            answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise PoolError(
                f"{what}: its process ended. {self._last_lines()}".strip()
            ) from None
        if isinstance(answer, str):
            raise PoolError(f"{what}: {answer}")
        return answer

    def _last_lines(self) -> str:
        self._log.seek(0)
        return " / ".join(self._log.read().splitlines()[-3:])


def _kill_left(pids: list[int]) -> None:
    """Kill processes of a pool that remain after its end."""
    end = time.monotonic() + 2.0
    while time.monotonic() < end and any(
        os.path.exists(f"/proc/{pid}") for pid in pids
    ):
        time.sleep(0.02)
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, 9)


def _host(contender: Contender, job: Job, pipe: Any, log: int) -> None:
    """Run in a runner's process."""
    terminate_with_parent()
    for fd in (1, 2):
        os.dup2(log, fd)
    warnings.simplefilter("ignore")
    try:
        pool = contender.build(job)
    except Exception as error:
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {error}".splitlines()[0][:300])
        return
    try:
        pool.wake()
        for _ in range(2):
            pool.step()
        pool.rest()
        pipe.send({})
        _serve(pool, pipe)
    finally:
        pool.wake()
        with contextlib.suppress(Exception):
            pool.close()
        sys.stdout.flush()


def _serve(pool: Pool, pipe: Any) -> None:
    with contextlib.suppress(EOFError):
        while (order := pipe.recv()) is not None:
            measure, seconds = order
            try:
                pipe.send(measure(pool, seconds))
            except Exception as error:
                traceback.print_exc()
                pipe.send(f"{type(error).__name__}: {error}".splitlines()[0][:300])
                return
