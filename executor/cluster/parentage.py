"""A host ends when its parent process ends.

Ray's own processes check whether their parent has become process 1. Under a session manager, in some containers and
with other subreapers it does not, and hosts would stay alive with all their workers.

Guarantees: this process ends shortly after its parent, however that ended, also if both had been stopped.
Assumes: Linux (pidfd).
"""

from __future__ import annotations

import contextlib
import os
import select
import threading

_EXIT_CODE = 1


def end_with_parent() -> None:
    """End this process at once, without cleanup, when its present parent has ended."""
    parent = os.getppid()
    with contextlib.suppress(ProcessLookupError):  # it has ended already, which the thread notices
        pidfd = os.pidfd_open(parent)
        threading.Thread(target=_watch, args=(pidfd,), name="envherd-parent", daemon=True).start()
        if os.getppid() == parent:
            return
    os._exit(_EXIT_CODE)


def _watch(pidfd: int) -> None:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.poll()
    os._exit(_EXIT_CODE)
