"""The start of a worker that `multiprocessing` has spawned, its doorbells, and the thread that ends it with its owner.

Guarantees:
- It ends within a second after its owner has ended, with its process group where there are groups. On systems other
  than Linux, an env that holds Python's GIL in C delays this until it lets go of it.
- Its stacks can be read: where there is SIGUSR2 always, otherwise while it lets other threads run.
- Environment variables are set before numpy or a package of envs is imported.
- Ctrl-C does not end it.
Platforms: all. It is tested on Linux, and there without what macOS and Windows lack.
"""

import contextlib
import faulthandler
import os
import socket
import threading
from multiprocessing.connection import Connection
from typing import Any

from envherd.shm import platforms
from envherd.shm.platforms import waiter
from envherd.workers.sending import surroundings

# ---- socket bells ------------------------------------------------------------------------------
# Doorbells over sockets, where there are no semaphores; see `shm.sync` for what a doorbell is.
#
# Guarantees: `ring` neither blocks nor raises. `wait` blocks until a token, the timeout or a signal. A token that an
# interrupt loses costs its waiter one timeout, because tokens are only hints.
# Assumes: what was written before a byte was sent is seen by the process that receives it.

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


# ---- entry -------------------------------------------------------------------------------------

#: Seconds between looks at the parent's process id. A fork of the owner may hold the other end of the pipe.
_LOOK_S = 0.3


def main(
    sock: socket.socket,
    bells: tuple[socket.socket, socket.socket],
    watch: Connection,
    log_path: str,
    config: dict[str, Any],
) -> None:
    """Run a worker until a message tells it to exit; never returns.

    Args:
        sock: to the owner.
        bells: the sockets of `go`, on which the worker waits, and `done`, which it rings.
        watch: on which the owner asks for stacks; its end is the owner's end.
        log_path: of the log, a file that the owner has open.
        config: see `executor.processes.worker_process.worker_config`.
    """
    log_fd = os.open(
        log_path,
        os.O_RDWR | os.O_APPEND | platforms.O_TEMPORARY | platforms.O_BINARY,
    )
    with contextlib.suppress(OSError):  # Windows removes it when it is closed
        os.unlink(log_path)
    platforms.detach(log_fd, is_captured=config["output"] == "capture")
    platforms.listen_for_stack_requests(log_fd)
    platforms.let_signals_in()
    with contextlib.suppress(OSError, AttributeError):
        platforms.arm_lifeline(watch.fileno(), -os.getpid())
    threading.Thread(
        target=_watch,
        args=(watch, log_fd, platforms.parent_id()),
        name="envherd-watch",
        daemon=True,
    ).start()
    surroundings.enter(config["caller"])
    from envherd.shm.sync import Bells
    from envherd.workers.adapters.registry import install_import_hooks
    from envherd.workers.process.entry import run  # imports numpy

    install_import_hooks()
    go, done = bells
    run(
        sock,
        log_fd,
        config,
        bells=Bells(SocketBell(go, None), SocketBell(None, done)),
    )


def _watch(watch: Connection, log_fd: int, parent: int) -> None:
    """Write the stacks when the owner asks for them, and end this process when the owner has ended."""
    with contextlib.suppress(EOFError, OSError):
        while platforms.parent_id() == parent:
            if watch.poll(_LOOK_S):
                watch.recv_bytes()
                faulthandler.dump_traceback(log_fd, all_threads=True)
    with contextlib.suppress(OSError):
        platforms.end_own_group()
    os._exit(1)
