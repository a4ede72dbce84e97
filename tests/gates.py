"""A gate at which an env waits for the test, instead of sleeps that may be too short on a busy machine."""

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: Seconds: far above any duration on a busy machine.
_PATIENCE_S = 60.0


class Gate:
    """Two files: one shows that an env waits, the other that the gate is open.

    Args:
        folder: where they are.
    """

    def __init__(self, folder: str | Path) -> None:
        self._waits = Path(folder, "waits")
        self._is_open = Path(folder, "open")

    def pass_through(self) -> None:
        """Announce that this env waits, and wait until the gate is open."""
        self._waits.touch()
        wait_for(self._is_open.exists, "nobody has opened the gate")

    def await_somebody(self) -> None:
        """Wait until an env waits at the gate."""
        wait_for(self._waits.exists, "nobody came to the gate")

    def open(self) -> None:
        """Open the gate for all from now on."""
        self._is_open.touch()


def wait_for(happened: Callable[[], Any], complaint: str = "it did not happen") -> None:
    """Wait until `happened` returns a true value; raise AssertionError on timeout."""
    end = time.monotonic() + _PATIENCE_S
    while not happened():
        assert time.monotonic() < end, complaint
        time.sleep(0.005)


def files_of(thread_id: int) -> list[str]:
    """Return the files of the functions that a thread is in."""
    return [
        frame.filename
        for frame in traceback.extract_stack(sys._current_frames()[thread_id])
    ]


def interrupt(gate: Gate, call: Callable[[], Any]) -> None:
    """Make a call; send SIGINT to this process once an env waits at the gate, and then open the gate.

    Requires that the call raises KeyboardInterrupt.
    """
    caller = threading.get_ident()

    def kill() -> None:
        with contextlib.suppress(AssertionError):
            gate.await_somebody()
            wait_for(
                lambda: any(
                    "/executor/" in file and "/tests/" not in file
                    for file in files_of(caller)
                )
            )
        # An env may have waited before the call: from its begin to its wait.
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=kill)
    is_interrupted = False
    try:
        thread.start()
        call()
    except KeyboardInterrupt:
        is_interrupted = True
    finally:
        # Where it ended by itself: not into another test.
        with contextlib.suppress(KeyboardInterrupt):
            thread.join()
        gate.open()
    assert is_interrupted, "it ended before it was interrupted"


def is_interrupted(call: Callable[[], Any], number: int, file: str) -> bool:
    """Make a call, and raise KeyboardInterrupt before the n-th bytecode that it runs in a file; return whether it did.

    Args:
        call: is made.
        number: of the bytecode, from 1.
        file: of the code that is counted, as its `__file__`.
    """
    left = number

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        # Python drops what that raises.
        if frame.f_code.co_filename != file or frame.f_code.co_name == "__del__":
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@contextlib.contextmanager
def alarm(after_s: float) -> Iterator[None]:
    """Raise a `TimeoutError("alarm")` in the block from a handler of SIGALRM, as programs do that limit their time."""

    def ring(*_: object) -> None:
        raise TimeoutError("alarm")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
