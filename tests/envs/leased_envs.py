"""Envs without spaces, for leases: what an env may do to its caller, a method each."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any


class Odd(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, text: str, *, number: int) -> None:
        super().__init__(text)
        self.number = number


class Unreadable:
    """Can be pickled, and not unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


class World:
    """Counts its calls; each other method does one thing."""

    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.is_busy = False

    def step(self, wait_s: float = 0.0) -> tuple[int, int]:
        """Return the pid and the number of steps; never entered twice at a time."""
        assert not self.is_busy
        self.is_busy = True
        time.sleep(wait_s)
        self.is_busy = False
        self.count += 1
        return os.getpid(), self.count

    def echo(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return args, kwargs

    def fail(self, error: BaseException | None = None) -> None:
        print("about to fail")  # noqa: T201  # captured
        raise error or ValueError("v")

    def fail_oddly(self) -> None:
        raise Odd("odd", number=3)

    def iter(self) -> Any:
        yield 1

    def clean(self) -> None:
        self.count = 10

    def kill_later(self) -> None:
        threading.Timer(0.1, self.die).start()

    def hang(self) -> None:
        time.sleep(1000)

    def die(self) -> None:
        print("last words", flush=True)  # noqa: T201  # captured
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self) -> None:
        sys.exit(3)

    def lock(self) -> Any:
        return [threading.Lock()]

    def unreadable(self) -> Any:
        return Unreadable()

    def many(self, num_bytes: int) -> bytes:
        return bytes(num_bytes)

    def environ(self, name: str) -> str | None:
        return os.environ.get(name)

    def grow(self, num_bytes: int) -> None:
        self.held = b"x" * num_bytes


def broken_after_first(folder: str) -> World:
    """Build an env, but only once."""
    os.mkdir(f"{folder}/built")
    return World()
