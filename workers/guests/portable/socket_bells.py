"""Doorbells over sockets, where there are no semaphores; see `shm.sync` for what a doorbell is.

Guarantees: `ring` neither blocks nor raises. `wait` blocks until a token, the timeout or a signal. A token that an
interrupt loses costs its waiter one timeout, because tokens are only hints.
Assumes: what was written before a byte was sent is seen by the process that receives it.
"""

import contextlib
import socket
from typing import Any

from envherd.shm.platforms import waiter

_MOST_TOKENS = 4096  # that one call takes


class SocketBell:
    """One doorbell; `create` makes it, and other processes get the socket that they need.

    Args:
        reader: for the process that waits; None in one that only rings.
        writer: for processes that ring; None in one that only waits.
    """

    memory: Any = None

    def __init__(
        self,
        reader: socket.socket | None,
        writer: socket.socket | None,
    ) -> None:
        self.reader = reader
        self.writer = writer
        self._num_tokens = 0
        for sock in (reader, writer):
            if sock is not None:
                sock.setblocking(False)  # noqa: FBT003  # its only argument
        if reader is not None:
            self._receive = reader.recv
            self._await_token = waiter(reader)
        if writer is not None:
            self._send = writer.send

    @classmethod
    def create(cls) -> "SocketBell":
        """Return a new doorbell."""
        reader, writer = socket.socketpair()
        return cls(reader, writer)

    def ring(self) -> None:
        """Add a token; wakes the waiter. A full socket holds tokens enough, and a gone process needs none."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            self._send(b"\1")

    def try_wait(self) -> bool:
        """Take a token if there is one; never blocks.

        Raises:
            EOFError: all processes that could ring have gone.
        """
        if not self._num_tokens:
            try:
                self._num_tokens = len(self._receive(_MOST_TOKENS))
            except BlockingIOError:
                return False
            except ConnectionError:
                pass
            if not self._num_tokens:
                raise EOFError("the other end has gone")
        self._num_tokens -= 1
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Take a token, waiting for one up to `timeout_s` seconds (None: without a limit); False on timeout."""
        if self.try_wait():
            return True
        self._await_token(timeout_s)
        return self.try_wait()

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        for sock in (self.reader, self.writer):
            if sock is not None:
                sock.close()
