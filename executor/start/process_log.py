"""Read processes' logs, which are files in memory that outlive them."""

import os
import re
import time
from collections.abc import Callable
from typing import Any

from envherd.shm.platforms import pread

#: A frame of this package's code but its test envs, as `traceback` and `faulthandler` write it; with the frame of the
#: command that starts a helper, and the list of C modules after a crash.
_OWN = re.compile(
    r'^  File "[^"]*[\\/]envherd[\\/](?:shm|executor|workers(?![\\/]testing))[\\/][^"]*", line .*\n(?:    .*\n)*'
    r'(?:  File "<string>", line \d+ in <module>\n)?'
    r"|^\nExtension modules: .*\n?",
    re.MULTILINE,
)
#: Seconds for a stuck process to have written its stack, and without a further line after which that is complete. It
#: writes line by line, in well under a millisecond in all, but a busy machine may stop it in between.
_STACK_WAIT_S = 2.0
_STACK_PAUSE_S = 0.1
#: Bytes that are read of a log, and of what a process wrote after a request of its stack: a call may print for hours.
_LOG_BYTES = 1 << 20
_STACK_BYTES = 1 << 16


def read_log(log_fd: int) -> str:
    """Return the end of a log; empty if there is none."""
    if log_fd < 0:
        return ""
    start = max(0, os.fstat(log_fd).st_size - _LOG_BYTES)
    return pread(log_fd, _LOG_BYTES, start).decode(errors="replace")


def has_frames_of_others(text: str) -> bool:
    """Return whether a worker's output or traceback has frames of other code than this package."""
    return '  File "' in _OWN.sub("", text)


def without_own_frames(text: str) -> str:
    """Return a worker's output or traceback without the frames of this package; the same if it has no others."""
    if has_frames_of_others(text):
        return _OWN.sub("", text)
    return text


def request_stacks(log_fd: int, request: Callable[[], Any]) -> str:
    """Make a process dump its stacks to its log, and return them."""
    before = size = os.fstat(log_fd).st_size
    request()
    now = changed_at = time.monotonic()
    end = now + _STACK_WAIT_S
    while now < end and (size == before or now < changed_at + _STACK_PAUSE_S):
        time.sleep(0.01)
        now = time.monotonic()
        if size != os.fstat(log_fd).st_size:
            size = os.fstat(log_fd).st_size
            changed_at = now
    text = pread(log_fd, _STACK_BYTES, before).decode(errors="replace")
    return text or "(the process did not answer)"
