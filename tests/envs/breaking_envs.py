"""Envs that break on purpose, in every way that envs break: real crashes and hangs, no mocks.

    ParallelEnv(2, FaultyEnv, env_kwargs=[{}, {"fault": "segfault", "at": "step", "step": 3}])

Run these only in a worker process: most of them end or hang the process that calls them.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from envherd.workers.adapters.base import StepValues
from envherd.workers.testing.envs import CountingEnv

BROKEN = "the env broke on purpose"


class UnpicklableError(Exception):
    """Cannot be pickled: it holds a local function."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.held = lambda: message


class UnloadableError(Exception):
    """Can be pickled, but not loaded again: its constructor takes another number of arguments."""

    def __init__(self, message: str, detail: int) -> None:
        super().__init__(message)
        self.detail = detail


class UnprintableError(Exception):
    """Raises when it is printed."""

    def __str__(self) -> NoReturn:
        raise RuntimeError("this message cannot be printed")


def _raise(error: BaseException) -> NoReturn:
    raise error


def _recurse() -> None:
    _recurse()


def _signal(number: int) -> None:
    signal.raise_signal(number)
    time.sleep(60)  # until it arrives


def _sleep() -> None:
    while True:
        time.sleep(3600)


def _spin() -> None:
    while True:
        pass


def _hold_the_gil() -> None:
    """Lock a mutex twice in C without releasing the GIL: no Python thread runs again."""
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.PyDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)


def start_child(*, new_session: bool = False) -> int:
    """Start a process that sleeps for ten minutes; return its id."""
    return subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(600)"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=new_session,
    ).pid


#: Exceptions, which end only the env's episode.
EXCEPTIONS: dict[str, Callable[[], Any]] = {
    "value_error": lambda: _raise(ValueError(BROKEN)),
    "key_error": lambda: _raise(KeyError(BROKEN)),
    "system_exit": lambda: _raise(SystemExit(BROKEN)),
    "keyboard_interrupt": lambda: _raise(KeyboardInterrupt(BROKEN)),
    "memory_error": lambda: _raise(MemoryError(BROKEN)),
    "recursion_error": _recurse,
    "unpicklable": lambda: _raise(UnpicklableError(BROKEN)),
    "unloadable": lambda: _raise(UnloadableError(BROKEN, 1)),
    "unprintable": lambda: _raise(UnprintableError(BROKEN)),
}


class Death(NamedTuple):
    """A way to end the process, and its name in `WorkerLost`."""

    act: Callable[[], Any]
    outcome: str


#: Ways to end the process.
DEATHS = {
    "exit": Death(lambda: os._exit(3), "exit code 3"),
    "exit_0": Death(lambda: os._exit(0), "exit code 0"),
    "segfault": Death(lambda: ctypes.string_at(0), "SIGSEGV(-11)"),
    "abort": Death(os.abort, "SIGABRT(-6)"),
    "kill": Death(lambda: _signal(signal.SIGKILL), "SIGKILL(-9)"),
}

#: Signals from other processes: one that ends the process, and one that stops it for good.
SIGNALS: dict[str, Callable[[], Any]] = {
    "term": lambda: _signal(signal.SIGTERM),
    "stop": lambda: _signal(signal.SIGSTOP),
}

#: Hangs: in Python, in a busy loop, and in C with the GIL held.
HANGS: dict[str, Callable[[], Any]] = {
    "sleep": _sleep,
    "spin": _spin,
    "gil": _hold_the_gil,
}

#: Observations that break the env's own spec (int64 `[3]`).
BAD_OBSERVATIONS: dict[str, Callable[[np.ndarray], Any]] = {
    "none": lambda _: None,
    "wrong_shape": lambda observation: observation[:2],
    "scalar": lambda observation: observation[0],
    "wrong_dtype": lambda observation: observation + 0.5,
    "text": lambda _: "hello",
    "ragged": lambda _: [[1, 2], [3]],
}

_ACTS: dict[str, Callable[[], Any]] = {
    **EXCEPTIONS,
    **{name: death.act for name, death in DEATHS.items()},
    **SIGNALS,
    **HANGS,
    "slow": lambda: time.sleep(0.3),
    "close_descriptors": lambda: os.closerange(3, 256),
}


class FaultyEnv(CountingEnv):
    """A `CountingEnv` that breaks once, at a given place.

    Args:
        fault: a key of `EXCEPTIONS`, `DEATHS`, `SIGNALS`, `HANGS` or `BAD_OBSERVATIONS`; "slow" (0.3 s),
            "close_descriptors"; or None.
        at: "construct", "reset", "step", "render" or "close".
        step: the step of an episode (from 1) at which it breaks, if `at` is "step".
        episode: the first episode (from 0) in which it breaks; with `at="reset"`, the reset that begins it.
        flag: path of a file: break only if it does not exist, and create it first. So a lost worker's successor works.
        length: steps of an episode.
    """

    def __init__(
        self,
        fault: str | None = None,
        *,
        at: str = "step",
        step: int = 2,
        episode: int = 0,
        flag: str | None = None,
        length: int | None = 1_000_000,
    ) -> None:
        super().__init__(length)
        self._fault = fault
        self._at = at
        self._fault_step = step
        self._fault_episode = episode
        self._flag = flag
        self._break("construct")

    def reset(
        self,
        seed: int | None,
        options: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Begin the next episode, or break."""
        observation = super().reset(seed, options)
        return (
            self._break("reset", observation)
            if self.episode >= self._fault_episode
            else observation
        )

    def step(self, action: list[Any]) -> StepValues:
        """Count one step, or break."""
        observation, *others = super().step(action)
        is_due = (
            self.episode >= self._fault_episode and self.num_steps == self._fault_step
        )
        return (self._break("step", observation) if is_due else observation, *others)

    def render(self) -> np.ndarray:
        """Draw, or break."""
        self._break("render")
        return super().render()

    def close(self) -> None:
        """Close, or break."""
        self._break("close")

    def _break(self, where: str, observation: list[Any] | None = None) -> Any:
        if (
            self._fault is None
            or where != self._at
            or (self._flag is not None and Path(self._flag).exists())
        ):
            return observation
        if self._flag is not None:
            Path(self._flag).touch()
        if self._fault in BAD_OBSERVATIONS:
            assert observation is not None, f"{self._fault} is for reset and step"
            return [BAD_OBSERVATIONS[self._fault](observation[0])]
        _ACTS[self._fault]()
        return observation
