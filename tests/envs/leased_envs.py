"""Envs without spaces, for leases: what an env may do to its caller, a method each."""

import os
import time
from typing import Any


class Odd(Exception):
    """Arrives as what its first argument makes of the others, if anything."""

    def __reduce__(self) -> Any:
        return self.args[0], self.args[1:]


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

    def reset(self) -> None:
        self.count = 10

    def echo(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return args, kwargs

    def fail(self, kind: type[BaseException] = ValueError, *args: Any) -> None:
        print("about to fail")  # noqa: T201  # captured
        raise kind(*args)

    def hang(self) -> None:
        self.is_busy = True
        time.sleep(1000)

    def die(self) -> None:
        print("last words", flush=True)  # noqa: T201  # captured
        os.kill(os.getpid(), 9)

    def talk(self, num_writes: int) -> None:
        for _ in range(num_writes):
            os.write(1, b"x" * 64)
        os._exit(3)
