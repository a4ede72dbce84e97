"""Doorbells, by which one process wakes another, and the tally, by which workers wake it once for several answers.

A doorbell is a counting semaphore that lives in a shared segment: no name, no file, no descriptor,
and no owner (a process that dies can hold none). `ring` adds a token, `wait` takes one. Tokens are only hints: sequence
numbers in the slab decide. A process woken by a surplus token finds no new number and waits again, and an interrupt
cannot desynchronise a step.

Guarantees: `ring` never blocks. `wait` first checks for a token; then it yields the processor for a bounded time
(longer if the last wait was short, not at all while others want the processor); then it blocks until a token, the
timeout or a signal (a Python signal handler that raises, as Ctrl-C does, ends the wait). The process that takes a token
sees everything that was written before the `ring`.
Assumes: POSIX unnamed process-shared semaphores, and CPython's `_multiprocessing.SemLock`, which can
be laid over any `sem_t` and is by far the fastest binding (60 ns against 300 ns for ctypes); `create`
tests that it can. Platforms: Linux (glibc); elsewhere `create` raises, and `SocketBell` of the
portable pool replaces it.
"""

import _multiprocessing
import ctypes
import errno
import math
import platform
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from envherd.shm.platforms import libc, sched_yield

#: Bytes of one doorbell; `sizeof(sem_t)` is 32 on Linux, and a separate line avoids false sharing.
DOORBELL_BYTES = 128

#: Seconds of yielding before blocking, after a long wait (for a slow policy or a slow env).
BRIEF_SPIN_S = 8e-6
#: The same after a short wait. A wake-up through the kernel costs 15 us and leaves both sides with cold caches, more so
#: on virtual machines, which hand an idle processor back to the host. One worker of 8 CartPoles took 559 us a batch
#: with 100 us here and 285 us with 500, for no more processor time in all (2 cores, one run). Two workers took 442 and
#: 392 us, for a fifth more. Now that a yield lets the workers run (by `process.zygote`), 100, 250 and 1,000 us give
#: the same within the noise (docs/reports/performance.md).
LONG_SPIN_S = 500e-6
#: Seconds; a blocked wait below it counts as short.
SHORT_WAIT_S = 600e-6
#: If a spin overruns by more seconds than this, a yield has given the processor to another process for a scheduler's
#: slice (milliseconds). The kernel wakes a sleeping process at once, but a yielding one waits for its turn. (With 1 ms,
#: so that a worker's step during a yield is no overrun, batches take 0.98 to 1.03 times as long.)
OVERRUN_S = 100e-6
#: Number of waits that do not spin after the first overrun. It doubles with each further overrun, up to
#: `MOST_WAITS_...`, and falls by one with each spin that does not overrun. (A fixed 200 cost 10 % on a quiet machine,
#: where the hypervisor or a kernel thread causes an occasional overrun.)
FEWEST_WAITS_WITHOUT_SPIN = 8
MOST_WAITS_WITHOUT_SPIN = 512

_SEMAPHORE_KIND = 1  # Modules/_multiprocessing/semaphore.c: SEMAPHORE
_MAX_TOKENS = 2**31 - 1
#: Seconds of one blocking slice of a wait without a limit: SemLock uses the wall clock, so a clock change would distort
#: a single long wait.
_SLICE_S = 60.0

#: Waits by the monotonic clock, for waits with a limit: with the wall clock, one that is set back during a wait delays
#: its end by as much. glibc has it from 2.30 on, musl does not.
_clockwait = (
    getattr(libc, "sem_clockwait", None) if hasattr(time, "CLOCK_MONOTONIC") else None
)


class _Timespec(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


#: Whether the processor keeps the order of loads, and of stores. (x86 lets a later load pass a store, so `shm.sync`
#: needs a fence.)
KEEPS_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")


def keep_order() -> None:
    """Complete loads and stores of shared memory before this call, before those after it.

    Python has no barrier, but releasing a lock and taking one again is a full one in C11, on which CPython's
    locks are built. The lock is new, so an interrupt cannot leave it locked for others.
    """
    if not KEEPS_ORDER:
        lock = threading.Lock()
        lock.acquire()
        lock.release()
        lock.acquire()


class Bell(Protocol):
    """The doorbell of a loop. `memory` is that of a doorbell in shared memory alone."""

    @property
    def ring(self) -> Callable[[], None]:
        """Add a token; wakes one waiter."""

    @property
    def memory(self) -> Any:
        """The memory of a doorbell; None for one that is not in shared memory."""

    def try_wait(self) -> bool:
        """Take a token if there is one; never blocks."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Take a token, waiting for one up to `timeout_s` seconds (None: without a limit); False on timeout."""


class Bells(NamedTuple):
    """The doorbell `go`, which wakes a worker, and `done`, which wakes the caller."""

    go: Bell
    done: Bell


class Doorbell:
    """One counting semaphore in shared memory, at an offset of a buffer. `create` initialises it, once."""

    __slots__ = (
        "_acquire",
        "_address",
        "_back_off",
        "_keep",
        "_spin_s",
        "_waits_without_spin",
        "memory",
        "ring",
    )

    def __init__(self, buffer: np.ndarray, offset: int) -> None:
        address = buffer.ctypes.data + offset
        lock = _multiprocessing.SemLock._rebuild(
            address,
            _SEMAPHORE_KIND,
            _MAX_TOKENS,
            None,
        )
        self._keep: tuple[Any, ...] = (buffer, lock)
        #: uint8 `[DOORBELL_BYTES]` (VIEW): its memory.
        self.memory = buffer[offset : offset + DOORBELL_BYTES]
        self._acquire = lock.acquire
        self._address = ctypes.c_void_p(address)
        self._spin_s = BRIEF_SPIN_S
        self._waits_without_spin = 0
        self._back_off = FEWEST_WAITS_WITHOUT_SPIN
        #: Add a token; wakes one waiter. About 60 ns without a waiter.
        self.ring = lock.release

    @classmethod
    def create(cls, buffer: np.ndarray, offset: int) -> "Doorbell":
        """Initialise a doorbell in `buffer` (uint8 view of a segment) and return it.

        Raises:
            OSError: this platform has no process-shared semaphores.
        """
        if libc.sem_init(ctypes.c_void_p(buffer.ctypes.data + offset), 1, 0) != 0:
            raise OSError(ctypes.get_errno(), "sem_init failed")
        bell = cls(buffer, offset)
        bell.ring()
        if not bell.try_wait() or bell.try_wait():
            raise OSError(
                "SemLock does not work over an unnamed semaphore on this platform"
            )
        return bell

    def try_wait(self) -> bool:
        """Take a token if there is one; never blocks."""
        return bool(self._acquire(False))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Take a token, waiting for one up to `timeout_s` seconds (None: without a limit); False on timeout."""
        if self._acquire(False) or (not self._waits_without_spin and self._spin()):
            return True
        began = time.perf_counter()
        is_taken = self._wait_in_slices(timeout_s)
        # The length of a wait tells that of the next one: a loop waits for the same envs each time.
        self._spin_s = (
            LONG_SPIN_S if time.perf_counter() - began < SHORT_WAIT_S else BRIEF_SPIN_S
        )
        if self._waits_without_spin:
            self._waits_without_spin -= 1
        return is_taken

    def _block(self, timeout_s: float) -> bool:
        """Block until a token comes or the time has passed."""
        if _clockwait is None:
            return bool(self._acquire(True, timeout_s))
        end = _Timespec(
            *divmod(time.monotonic_ns() + max(0, int(timeout_s * 1e9)), 1_000_000_000)
        )
        while _clockwait(self._address, time.CLOCK_MONOTONIC, ctypes.byref(end)) != 0:
            # A signal: its handler has run by now.
            if ctypes.get_errno() != errno.EINTR:
                return False
        return True

    def _spin(self) -> bool:
        """Yield the processor for a bounded time, looking for a token in between; return whether one came."""
        acquire = self._acquire
        clock = time.perf_counter
        limit = clock() + self._spin_s
        is_taken = False
        now = 0.0
        while not is_taken and now < limit:
            sched_yield()
            is_taken = acquire(False)
            now = clock()
        if now > limit + OVERRUN_S:
            self._waits_without_spin = self._back_off
            self._back_off = min(2 * self._back_off, MOST_WAITS_WITHOUT_SPIN)
        elif self._back_off > FEWEST_WAITS_WITHOUT_SPIN:
            self._back_off -= 1
        return is_taken

    def _wait_in_slices(self, timeout_s: float | None) -> bool:
        end = math.inf
        if timeout_s is not None:
            end = time.monotonic() + timeout_s
        while (left_s := min(_SLICE_S, end - time.monotonic())) > 0:
            if self._block(left_s):
                return True
        return self.try_wait()


class LocalBell:
    """A doorbell within one thread, for a loop that never waits."""

    memory: Any = None

    def __init__(self) -> None:
        self._tokens: list[None] = []

    def ring(self) -> None:
        """Add a token."""
        self._tokens.append(None)

    def try_wait(self) -> bool:
        """Take a token if there is one."""
        return bool(self._tokens) and self._tokens.pop() is None

    def wait(self, timeout_s: float | None = None) -> bool:  # noqa: ARG002  # as of `Bell`
        """Take a token if there is one: nobody else could add one."""
        return self.try_wait()


# ---- tally -------------------------------------------------------------------------------------
# Wake the parent once for several answers instead of once for each.
#
# A parent that waits for the first K envs has nothing to do before the K-th answer. If it shares processors with its
# workers, each earlier wake-up takes time from them. So the parent writes at how many answers it wants to be woken.
# Each worker counts its own answers and compares the sum over all workers with that number.
#
# Guarantees: once the wanted number of answers has been counted, either the worker that counted last notices, or the
# parent does in `expect`. Both write first and then read, with a full fence in between on x86-64. On other processors
# both may miss it; the parent only sleeps in short slices and then finds the answers one slice late.


class Tally:
    """The parent's side.

    Args:
        words: of the slab: `answered` and `ring_at`, int64 `[workers]` each.
    """

    def __init__(self, words: Mapping[str, np.ndarray]) -> None:
        self._answered = words["answered"]
        self._ring_at = words["ring_at"]
        # A lock that is taken and released is a full fence.
        self._fence = threading.Lock()

    def total(self) -> int:
        """Return how many answers all workers have counted, ever."""
        # For a few workers, a tenth of numpy's time.
        return sum(self._answered.tolist())

    def expect(self, total: int) -> bool:
        """Ask for a ring once `total` answers have been counted; return False if they have been already."""
        # Before the sum: a worker that counts after it compares with this number.
        self._ring_at.fill(total)
        with self._fence:
            return self.total() < total


class Counter:
    """A worker's side.

    Args:
        words: of the slab: `answered` and `ring_at`, int64 `[workers]` each.
        worker_id: of this worker.
    """

    def __init__(self, words: Mapping[str, memoryview], worker_id: int) -> None:
        self._answered = words["answered"]
        self._ring_at = words["ring_at"]
        self._worker_id = worker_id
        self._fence = threading.Lock()

    def add(self) -> bool:
        """Count an answer; return whether the parent must be woken."""
        self._answered[self._worker_id] += 1
        # Between the store and the loads, as in `Tally.expect`: one side sees the other's store.
        with self._fence:
            return sum(self._answered) >= self._ring_at[self._worker_id]
