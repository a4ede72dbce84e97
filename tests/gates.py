"""Where an env waits, in its process, for what a test does first: no sleep is long enough on a busy machine."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Seconds: far above what anything takes on a machine that is busy with much else.
_PATIENCE_S = 60.0


class Gate:
    """Two files: one says that somebody waits, the other that nobody has to any more.

    Args:
        folder: where they are.
    """

    def __init__(self, folder: str | Path) -> None:
        self._waits = Path(folder, "waits")
        self._is_open = Path(folder, "open")

    def pass_through(self) -> None:
        """Say that somebody waits, and wait until it is open."""
        self._waits.touch()
        wait_for(self._is_open.exists, "nobody has opened the gate")

    def await_somebody(self) -> None:
        """Wait until somebody waits."""
        wait_for(self._waits.exists, "nobody came to the gate")

    def open(self) -> None:
        """Let everybody through, from now on."""
        self._is_open.touch()


def wait_for(happened: Callable[[], Any], complaint: str = "it did not happen") -> None:
    """Wait until something has happened; an AssertionError says that it did not."""
    end = time.monotonic() + _PATIENCE_S
    while not happened():
        assert time.monotonic() < end, complaint
        time.sleep(0.005)


def interrupt(gate: Gate, call: Callable[[], Any]) -> None:
    """Call something, send this process the signal of Ctrl-C once somebody waits at the gate, and open it then.

    Demands that the call ends in KeyboardInterrupt.
    """

    def kill() -> None:
        with contextlib.suppress(AssertionError):
            gate.await_somebody()
        time.sleep(0.05)  # somebody may wait since before the call, which should have begun; it need not
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=kill)
    is_interrupted = False
    try:
        thread.start()
        call()
    except KeyboardInterrupt:
        is_interrupted = True
    finally:
        with contextlib.suppress(KeyboardInterrupt):  # where it ended by itself: not into another test
            thread.join()
        gate.open()
    assert is_interrupted, "it ended before it was interrupted"
