"""Envs that disturb their process. They need only numpy: a worker that imported a test would import torch."""

import functools
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from envherd.workers.testing import CountingEnv
from tests.envs.breaking_envs import FaultyEnv
from tests.gates import Gate


class MeddlingEnv(CountingEnv):
    """Does something to its process in the first call of a method."""

    def __init__(self, meddle: Callable[[], Any], where: str = "step") -> None:
        super().__init__(1_000_000)
        self._meddle = meddle
        vars(self)[where] = functools.partial(self._first, getattr(self, where))

    def _first(self, call: Callable[..., Any], *values: Any, **named: Any) -> Any:
        del vars(self)[call.__name__]
        self.kept = self._meddle()
        return call(*values, **named)


class ForkingEnv(CountingEnv):
    """Forks in its second reset. The other process returns late, or raises while this one waits."""

    def __init__(self, *, is_late: bool) -> None:
        super().__init__(3)
        self.is_late = is_late

    def reset(self, seed: int | None, *args: Any) -> Any:
        """Fork and begin an episode."""
        if self.episode == 0:
            is_here = os.fork() != 0
            if is_here != self.is_late:
                time.sleep(0.2)
            if not (is_here or self.is_late):
                raise RuntimeError("the program was not found")
        return super().reset(seed, *args)


class GrowingEnv(CountingEnv):
    """Allocates more address space in its second step than its limit."""

    def step(self, action: list[Any]) -> Any:
        """Grow, or count."""
        if self.num_steps == 1 and self.episode == 0:
            resource.setrlimit(resource.RLIMIT_AS, (2**28, -1))
            self.held = np.ones(2**30, np.uint8)
        return super().step(action)


class HaltingEnv(CountingEnv):
    """Waits at a gate in one of its steps."""

    def __init__(self, gate: Gate, step: int) -> None:
        super().__init__(1_000_000)
        self._gate = gate
        self._step = step

    def step(self, action: list[Any]) -> Any:
        """Wait, or count."""
        if self.num_steps + 1 == self._step:
            self._gate.pass_through()
        return super().step(action)


class HungryEnv(CountingEnv):
    """Allocates memory without end in its second step, but only once, which a file records."""

    def __init__(self, flag: str) -> None:
        super().__init__(1_000_000)
        self._flag = flag

    def step(self, action: list[Any]) -> Any:
        """Take all there is, or count."""
        if self.num_steps == 1 and not os.path.exists(self._flag):
            open(self._flag, "wb").close()
            self.held = [np.ones(2**20) for _ in range(2**13)]
        return super().step(action)


class DeafEnv(FaultyEnv):
    """Hangs, after making its process ignore the signal that requests stacks."""

    def __init__(self) -> None:
        super().__init__("sleep", step=1)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)


class NestedEnv(CountingEnv):
    """Holds its own executor."""

    def __init__(self) -> None:
        from envherd.executor import ParallelEnv

        super().__init__(1_000_000)
        self.inner = ParallelEnv(2, CountingEnv, num_workers=2, seed=0)

    def inner_steps(self) -> int:
        """Return the number of steps of its own envs after a request for five."""
        return int(
            self.inner.rollout(5, break_when_any_done=False)[
                "next", "observation"
            ].shape[1]
        )


class LeakyEnv(CountingEnv):
    """Leaks `num_bytes` bytes at every reset, with every page touched.

    Args:
        num_bytes: how many.
        length: steps of an episode.
    """

    def __init__(self, num_bytes: int, length: int = 3) -> None:
        super().__init__(length)
        self._num_bytes = num_bytes
        self._lost: list[np.ndarray] = []

    def reset(
        self, seed: int | None, options: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Leak, and begin the next episode."""
        self._lost.append(np.ones(self._num_bytes, np.uint8))
        return super().reset(seed, options)


def _install_handlers() -> None:
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGCHLD,
        signal.SIGPIPE,
        signal.SIGIO,
    ):
        signal.signal(number, lambda *_: None)


def _start_threads() -> None:
    for _ in range(8):
        threading.Thread(target=time.sleep, args=(600,), daemon=False).start()


def _start_processes() -> list[Any]:
    program = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    return [subprocess.Popen(program, start_new_session=new) for new in (False, True)]


def _fork() -> None:
    if os.fork() == 0:
        signal.pause()


def _use_pool() -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, range(-3, 0)) == [3, 2, 1]


def _change_folder() -> None:
    os.chdir("/")
    os.environ.clear()
    sys.path.clear()


MEDDLING: dict[str, Callable[[], Any]] = {
    "closes descriptors 0 to 2": lambda: os.closerange(0, 3),
    "closes descriptors 0 to 255": lambda: os.closerange(0, 256),
    "changes folder, variables and sys.path": _change_folder,
    "installs signal handlers": _install_handlers,
    "starts threads that keep running": _start_threads,
    "starts processes": _start_processes,
    "forks": _fork,
    "forks a process that raises": lambda: os.fork() or sys.exit("no simulator"),
    "uses a pool of forked processes": _use_pool,
    "lowers its limit on files": lambda: resource.setrlimit(
        resource.RLIMIT_NOFILE, (16, 16)
    ),
}
