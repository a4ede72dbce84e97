"""End a benchmark's processes with the process that started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

from benchmarks.accounting import started_by

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends, in any way, and leave Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def terminate_with_parent() -> None:
    """Make this process end itself and its descendants when its parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _end(*_: object) -> None:
    raise SystemExit(1)


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants."""
    for one in (pid, *started_by(pid)):
        with contextlib.suppress(OSError):
            os.kill(one, signal.SIGKILL)
