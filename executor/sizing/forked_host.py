"""A process for `SerialEnv`, forked from that of the command line, which has already imported torch: it starts at once.

Only `envherd size` uses it, before it has started a thread. Other programs' processes are never forked: see
`opening.SerialProcess`.

Guarantees: a crash or hang of an env there raises an error here. The process ends with this one, and `close` kills it
and its envs' processes.
Platforms: Linux (pidfd, prctl).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import select
import signal
import warnings
from multiprocessing.connection import Connection
from typing import Any

from envherd.executor.sizing.serial_host import SerialFactory, SerialHost
from envherd.workers.errors import EnvError, WorkerLost, WorkerTimeout

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ForkedHost:
    """The owner's handle of a forked process with a `SerialHost`, which `prepare` names."""

    def __init__(self) -> None:
        owner = os.getpid()
        self._connection, theirs = multiprocessing.Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads: they are numpy's, which supports forks
            self._pid = os.fork()
        if self._pid == 0:
            _become_host(owner, self._connection, theirs)
        theirs.close()
        self._pidfd = os.pidfd_open(self._pid)
        self._is_closed = False

    def prepare(self, made_by: SerialFactory, patience_s: float) -> None:
        """Set what to run, and the seconds that a call may take.

        Raises:
            WorkerLost: the process has ended.
        """
        self._patience_s = patience_s
        self._send(made_by)

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of the host and return what it returns.

        Raises:
            EnvError: the method raised. WorkerLost: the process has ended. WorkerTimeout: it was late, and was killed.
        """
        self._send((name, args))
        # The connection ends with the process.
        if not self._connection.poll(self._patience_s):
            self.close()
            raise WorkerTimeout(f"{name} failed: SerialEnv's process gave no answer within {self._patience_s:,.0f} s.")
        try:
            answer = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            if isinstance(error, TimeoutError):  # of a signal handler: pipes have no deadline
                raise
            raise self._lost() from None
        if "error" in answer:
            raise EnvError(answer["error"])
        return answer["value"]

    def _send(self, request: Any) -> None:
        if self._is_closed:
            raise WorkerLost("SerialEnv's process has ended.")
        try:
            self._connection.send(request)
        except ConnectionError:
            raise self._lost() from None

    def _lost(self) -> WorkerLost:
        code = self.close()
        how = f"{signal.Signals(-code).name}({code})" if code < 0 else f"exit code {code}"
        return WorkerLost(f"SerialEnv's process ended with {how}.")

    def close(self) -> int:
        """End the process; return its exit code, or minus the signal. Idempotent."""
        if not self._is_closed:
            with contextlib.suppress(ProcessLookupError):
                if not select.select([self._pidfd], [], [], 0)[0]:
                    os.kill(self._pid, signal.SIGKILL)
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)  # its envs' processes; the id is not reused before the wait
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            self._is_closed = True
            os.close(self._pidfd)
            self._connection.close()
        return self._code


def _become_host(owner: int, ours: Connection, theirs: Connection) -> None:
    """Serve calls until the owner has ended; never returns."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != owner:
            return
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ours.close()
        null = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        host = SerialHost(theirs.recv())
        while True:
            name, args = theirs.recv()
            theirs.send_bytes(_answer(host, name, args))
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)


def _answer(host: SerialHost, name: str, args: tuple[Any, ...]) -> bytes:
    try:
        answer = {"value": getattr(host, name)(*args)}
    except Exception as error:  # an env may raise anything
        answer = {"error": f"{type(error).__name__}: {error}"}
    return json.dumps(answer).encode()
