"""A host ends when what started it ends.

Ray's own processes look whether their parent is now process 1, which it is not under a session manager, in some
containers, and wherever else orphans are given to somebody else; then hosts would stay, with all of their workers.

Guarantees: this process ends within moments of its parent, whatever ended that, also if both were stopped meanwhile.
Assumes: Linux (pidfd).
"""

from __future__ import annotations

import contextlib
import os
import select
import threading

_EXIT_CODE = 1


def end_with_parent() -> None:
    """Have this process end, at once and without cleaning up, when its present parent has ended."""
    parent = os.getppid()
    with contextlib.suppress(ProcessLookupError):  # it has ended already: the thread sees that
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
