"""Where workers run: on which processors, and in which session and terminal."""

import contextlib
import fcntl
import os
import termios
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from envherd.executor import ExecutorOptions, ParallelEnv
from envherd.workers import native
from envherd.workers.processes import cpu_of
from envherd.workers.testing import CountingEnv
from tests.faults.children import in_child

ALL = sorted(os.sched_getaffinity(0))


class _Pinned(CountingEnv):
    """Reports the affinity of its worker."""

    def affinity(self):
        return sorted(os.sched_getaffinity(0))


def test_the_processor_of_a_process_is_read():
    assert cpu_of(os.getpid()) in ALL
    assert cpu_of(0) is None


@pytest.mark.slow
@pytest.mark.parametrize("affinity", [None, (ALL[-1],), tuple(ALL[:2])])
def test_statistics_report_processors_that_the_affinity_allows(affinity):
    allowed = (
        [ALL] * 2
        if affinity is None
        else [[affinity[i % len(affinity)]] for i in range(2)]
    )
    with ParallelEnv(
        2, _Pinned, num_workers=2, seed=0, options=ExecutorOptions(affinity=affinity)
    ) as env:
        env.rollout(5)
        assert env.call("affinity") == allowed
        for worker, cpus in zip(env.statistics().workers, allowed, strict=True):
            assert worker.cpu in cpus


@pytest.mark.slow
def test_a_yield_of_the_caller_reaches_its_workers():
    """If sessions are scheduling groups, a yield would not reach workers in a separate session."""
    with ParallelEnv(2, CountingEnv, num_workers=2, seed=0) as env:
        pids = [worker.pid for worker in env.statistics().workers]
        assert {os.getsid(pid) for pid in pids} == {os.getsid(0)}
        assert len({os.getpgid(pid) for pid in [*pids, 0]}) == 3, (
            "but groups of their own: Ctrl-C does not reach them"
        )
        own = Path("/proc/self/autogroup")
        if own.exists():
            assert {Path(f"/proc/{pid}/autogroup").read_text() for pid in pids} == {
                own.read_text()
            }


class _Brief(_Pinned):
    """Computes for 40 us in each step: then batches take less than the kernel needs to move a process."""

    def step(self, action):
        end = time.perf_counter_ns() + 40_000
        while time.perf_counter_ns() < end:
            pass
        return super().step(action)


@pytest.mark.quiet
@pytest.mark.skipif(
    len(ALL) < 2 or native.load() is None, reason="needs two processors, and C"
)
def test_workers_leave_a_processor_that_they_share():
    """They are not bound to the other one: what an env starts may run on all processors."""
    with ParallelEnv(4, lambda: _Brief(10**6), num_workers=2) as env:
        for worker in env.statistics().workers:
            psutil.Process(worker.pid).cpu_affinity(ALL[:1])
        td = env.rand_action(env.reset())
        env.step(td)
        for worker in env.statistics().workers:
            psutil.Process(worker.pid).cpu_affinity(ALL)
        words = env.engine.pool.slab.words["cpu"]
        assert set(words.tolist()) == {ALL[0] + 1}
        share = np.mean([_are_equal(env.step(td), words) for _ in range(5000)])
        assert share < 0.1, f"{share:.0%} of the steps were made on one processor"
        assert env.call("affinity") == [ALL] * 4


def _are_equal(_: object, words: np.ndarray) -> bool:
    return words[0] == words[1]


class _Printing(CountingEnv):
    """Writes to its terminal, and reports whether that terminal could stop it."""

    def terminal(self):
        os.write(1, b"printed ")
        try:
            os.close(os.open("/dev/tty", os.O_RDWR))
        except OSError:
            return "none"
        return "opened"


def in_terminal(terminal: int) -> list[str]:
    """Run an executor in the foreground of a terminal; return what its worker says of that."""
    os.setsid()
    for fd in range(3):
        os.dup2(terminal, fd)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    with ParallelEnv(
        1, _Printing, seed=0, options=ExecutorOptions(worker_output="inherit")
    ) as env:
        env.reset()
        answers: list[str] = env.call("terminal")
        return answers


@pytest.mark.slow
@pytest.mark.usefixtures("own_helper")
def test_workers_have_no_terminal_that_could_stop_them():
    """They are in the caller's session, but not in the foreground of its terminal."""
    ours, theirs = os.openpty()
    flags = termios.tcgetattr(theirs)
    flags[3] |= termios.TOSTOP  # who writes from the background is stopped
    termios.tcsetattr(theirs, termios.TCSANOW, flags)
    assert in_child(in_terminal, theirs) == ["none"]
    os.close(theirs)
    written = b""
    with contextlib.suppress(OSError):  # EIO: the other side has closed it
        while data := os.read(ours, 4096):
            written += data
    os.close(ours)
    assert written.split() == [b"printed"], written.decode()
