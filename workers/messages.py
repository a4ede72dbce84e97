"""Messages on the socket between parent and worker, for everything except steps; also those of the helper.

Parent to worker: one of the dataclasses below, pickled (the parent is trusted: it is the same user's
program). Worker to parent: a plain dict (`workers.plain`), never a pickle. A frame on the wire is a
head (length of the payload, number of the message, number of descriptors that ride along) and the payload.
"""

import contextlib
import functools
import itertools
import os
import pickle
import socket
import struct
import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from envherd.shm.interrupts import uninterrupted as uninterrupted  # noqa: PLC0414  # re-exported
from envherd.shm.platforms import MSG_DONTWAIT, MSG_NOSIGNAL, recv_fds
from envherd.shm.slab import SlabPlan, StoragePlan
from envherd.workers import plain
from envherd.workers.current import WorkerInfo
from envherd.workers.options import BlockOptions, FactoryCall
from envherd.workers.sending.pickling import dumps

_HEAD = struct.Struct("<QQI")
_MAX_FDS = 4
# SIGPIPE would end a program that has not changed its default.
_SEND_FLAGS = MSG_DONTWAIT | MSG_NOSIGNAL


@dataclass(frozen=True, kw_only=True)
class Register:
    """Know the names of envs that the caller's program has registered: entries of `workers.sending.registries`."""

    entries: bytes


@dataclass(frozen=True, kw_only=True)
class Build:
    """Build the envs. The answer is their specs, or a fault.

    Attributes:
        worker: of this process, with the ids that its pool uses.
        first_worker_id: id of the pool's worker 0 in messages.
        calls: env id -> factory call; equal factories are unpickled once.
        root_seed: seeds the global generators before each factory runs, and the episodes.
        block: how the envs are run.
    """

    worker: WorkerInfo
    calls: dict[int, FactoryCall]
    root_seed: int
    block: BlockOptions
    first_worker_id: int = 0


@dataclass(frozen=True, kw_only=True)
class Attach:
    """Map the slab (one descriptor rides along) and start to serve commands."""

    plan: SlabPlan
    nbytes: int
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class AttachStorage:
    """Map a rollout storage (one descriptor rides along) under a target number."""

    target: int
    plan: StoragePlan
    nbytes: int
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class DetachStorage:
    """Forget a rollout storage."""

    target: int


@dataclass(frozen=True, kw_only=True)
class Seed:
    """Use a new root seed.

    Attributes:
        root_seed: of all envs.
        episodes: the episode that the next reset of each env of the pool begins; None for 0.
    """

    root_seed: int
    episodes: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Extras for the next command of one env: explicit seed, reset keyword arguments, side inputs.

    With `call`, a new instance takes the env's place: this closes the env, and what needs it next builds it by that
    factory call.
    """

    env_id: int
    seed: int | None = None
    has_seed: bool = False
    options: dict[str, Any] | None = None
    side: list[Any] | None = None
    call: FactoryCall | None = None


#: The values of `what` for which `args` holds one item per env.
PER_ENV = frozenset({"set", "each", "check", "restore"})
#: The values of `what` after which a worker steps envs even if they need a reset, which the facade then checks.
UNGUARDS = frozenset({"each", "allow_steps"})


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Request something other than a step from envs; the answer holds one value per env.

    `what` is "call", "each" (a call with one argument, a different one for each env), "get", "has" (whether "get" would
    succeed), "set", "layers" (the classes of an env and its wrappers), "render", "save", "check" (why an env cannot
    have a state, as text), "restore", "allow_steps" (let envs be stepped that were never reset) or "rebuild" (which
    only builds the envs that are not built). The answer repeats
    `number`, so that a late answer to an interrupted request is not mistaken for the next one.
    """

    what: str
    env_ids: tuple[int, ...]
    name: str = ""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    number: int = 0


@dataclass(frozen=True, kw_only=True)
class Branch:
    """Fork; the copy serves another worker's env. Its socket and its log ride along.

    The answer is the copy's pid, or why this process cannot be forked. The copy first answers its own `Attach`.

    Attributes:
        worker: of the copy, with the ids that its pool uses.
        config: settings of the copy's process, as `executor.processes.worker_process.worker_config` makes them.
        number: as that of `Ask`.
    """

    worker: WorkerInfo
    config: dict[str, Any]
    number: int


@dataclass(frozen=True, kw_only=True)
class Close:
    """Close the envs and leave."""


Message = (
    Register
    | Build
    | Attach
    | AttachStorage
    | DetachStorage
    | Seed
    | Prepare
    | Ask
    | Branch
    | Close
)
#: To the helper that forks workers: "op", what to do, and its arguments.
Request = dict[str, Any]


class _Frame(NamedTuple):
    """A frame, decoded.

    Attributes:
        number: of its message.
        payload: of the message.
        num_fds: descriptors that ride along.
    """

    number: int
    payload: bytes
    num_fds: int


def _frames_in(data: bytes | bytearray) -> tuple[list[_Frame], int]:
    """Return the complete frames at the start of a stream, and the number of their bytes."""
    frames = []
    begin = 0
    while len(data) >= begin + _HEAD.size:
        size, number, num_fds = _HEAD.unpack_from(data, begin)
        end = begin + _HEAD.size + size
        if len(data) < end:
            break
        frames.append(_Frame(number, bytes(data[begin + _HEAD.size : end]), num_fds))
        begin = end
    return frames, begin


class _Descriptors:
    """Copies of file descriptors, closed by `close`, or with this object."""

    fds: list[int] | tuple[()] = ()

    def __init__(self, fds: Sequence[int]) -> None:
        copies: list[int] = []
        self.fds = copies
        copies.extend(map(os.dup, fds))

    def close(self) -> None:
        """Close them. Idempotent; an interrupt finds each closed or kept, because C functions take and close it."""
        if isinstance(self.fds, list):
            deque(map(os.close, map(self.fds.pop, [0] * len(self.fds))), 0)

    def __del__(self) -> None:
        for fd in self.fds:
            os.close(fd)


class _Outgoing(NamedTuple):
    """A message that is being sent.

    Attributes:
        number: of the message.
        data: the frame.
        descriptors: sent with its first bytes.
        sent: how many bytes each call has sent.
    """

    number: int
    data: memoryview
    descriptors: _Descriptors | None
    sent: list[int]


class _Incoming(NamedTuple):
    """What was received.

    Attributes:
        frames: decoded frames that the caller has not taken yet.
        pieces: the bytes after them.
        num_needed: least number of bytes of the next frame.
    """

    frames: list[dict[str, Any]]
    pieces: list[bytes]
    num_needed: int


class Channel:
    """The owner's end of a worker's socket: messages out, plain data in.

    Guarantees: an exception at any bytecode (a signal handler that raises, such as that of Ctrl-C) loses no byte,
    sends none twice, and leaves no message half counted; the next call continues. No method blocks. Two threads
    may use a channel at once.

    A C function makes each system call and also stores its result (`list.extend` over an iterator), because Python runs
    signal handlers only between bytecodes. Everything else is one assignment, or may be repeated.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._unsent: deque[_Outgoing] = deque()
        self._last_sent = 0
        self._incoming = _Incoming([], [], _HEAD.size)
        sock.setblocking(False)  # noqa: FBT003  # its only argument
        self._receive = functools.partial(sock.recv, 1 << 20, MSG_DONTWAIT)

    def queue_message(
        self, message: Message | Request, fds: Sequence[int] = ()
    ) -> None:
        """Queue a message for `flush_nowait`, with copies of its descriptors."""
        payload = dumps(message, shares=True)
        number = next(self._numbers)
        data = memoryview(_HEAD.pack(len(payload), number, len(fds)) + payload)
        self._unsent.append(
            _Outgoing(number, data, _Descriptors(fds) if fds else None, [])
        )

    @property
    def num_queued(self) -> int:
        """Number of the latest message that was queued; 0 before the first. Numbers increase, with gaps."""
        unsent = self._unsent
        return unsent[-1].number if unsent else self._last_sent

    @property
    def has_unsent(self) -> bool:
        """Whether `flush_nowait` has something to send."""
        return bool(self._unsent)

    def flush_nowait(self) -> bool:
        """Send as much of the queued messages as the socket accepts; return whether everything is sent.

        Raises:
            ConnectionError: the worker has gone.
        """
        if not self._unsent:
            return True
        with self._lock:
            while self._unsent:
                first = self._unsent[0]
                while (done := sum(first.sent)) < len(first.data):
                    fds = (
                        first.descriptors.fds
                        if first.descriptors is not None and not done
                        else ()
                    )
                    send: Callable[..., int] = self.sock.send
                    # A slice of the bytes would copy them at each send.
                    rest = memoryview(first.data)[done:]
                    arguments: tuple[tuple[Any], ...] = (rest,), (_SEND_FLAGS,)
                    if fds:
                        ancillary = [
                            (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))
                        ]
                        send = self.sock.sendmsg
                        arguments = (([rest],), (ancillary,), (_SEND_FLAGS,))
                    try:
                        first.sent.extend(map(send, *arguments))
                    except BlockingIOError:
                        return False
                # Before it leaves the queue, because `num_queued` may be read in between.
                self._last_sent = first.number
                if first.descriptors is not None:
                    # An exception may keep this frame, and `first` in it.
                    first.descriptors.close()
                self._unsent.popleft()
        return True

    def drain_nowait(self) -> list[dict[str, Any]]:
        """Read what has arrived; return the untaken frames, oldest first. The caller deletes those that it takes."""
        with self._lock:
            incoming = self._incoming
            # A worker that has ended is noticed by its pidfd; what it wrote before is read here.
            with contextlib.suppress(BlockingIOError, ConnectionError):
                incoming.pieces.extend(iter(self._receive, b""))
            # Joined only then, because each join copies what has come of a large frame.
            if (
                incoming.pieces
                and sum(map(len, incoming.pieces)) >= incoming.num_needed
            ):
                received = b"".join(incoming.pieces)
                found, size = _frames_in(received)
                rest = received[size:]
                frames = [
                    *incoming.frames,
                    *(plain.decode(frame.payload) for frame in found),
                ]
                num_needed = _HEAD.size + (
                    _HEAD.unpack_from(rest)[0] if len(rest) >= _HEAD.size else 0
                )
                # One assignment: an interrupt leaves all bytes as pieces, or each as a frame or rest.
                self._incoming = _Incoming(frames, [rest] if rest else [], num_needed)
            return self._incoming.frames

    @property
    def is_in_frame(self) -> bool:
        """Whether a part of a frame has arrived: the worker is writing the rest."""
        return bool(self._incoming.pieces)

    def close(self) -> None:
        """Close the socket and drop unsent messages. Idempotent."""
        self.sock.close()
        for one in self._unsent:
            if one.descriptors is not None:
                one.descriptors.close()
        self._unsent.clear()


class WorkerChannel:
    """The worker's end: messages in, plain data out. Methods block; signals do not reach a worker.

    Attributes:
        number: of the latest message that was received.
    Thread-safety: one thread may receive; any may send.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._sending = threading.Lock()
        self.number = 0
        self._fds: list[int] = []
        self._frames: deque[_Frame] = deque()
        self._rest = bytearray()

    @property
    def has_received(self) -> bool:
        """Whether the next message is here already."""
        return bool(self._frames)

    def receive_message(self) -> tuple[Any, list[int]]:
        """Wait for a message and the descriptors that came with it; `EOFError` when the owner has gone."""
        while not self._frames:
            chunk, fds, _, _ = recv_fds(self.sock, 1 << 20, _MAX_FDS)
            self._fds += fds
            if not chunk:
                raise EOFError("the other end has gone")
            self._rest += chunk  # in place: a large message comes in many chunks
            frames, size = _frames_in(self._rest)
            del self._rest[:size]
            self._frames.extend(frames)
        self.number, payload, num_fds = self._frames.popleft()
        fds = self._fds[:num_fds]
        self._fds = self._fds[num_fds:]
        return pickle.loads(payload), fds

    def send_plain(self, value: dict[str, Any]) -> None:
        """Send plain data to the owner."""
        payload = plain.encode(value)
        with self._sending:
            self.sock.sendall(
                _HEAD.pack(len(payload), 0, 0) + payload,
                _SEND_FLAGS & ~MSG_DONTWAIT,
            )

    def move_to(self, sock: socket.socket) -> None:
        """Talk over another socket from now on, in a copy of the worker."""
        self.close()
        self.sock = sock
        self.number = 0
        # What was read ahead is for the worker that was forked.
        self._rest.clear()
        self._frames.clear()

    def close(self) -> None:
        """Close the socket, and descriptors that nobody has received. Idempotent."""
        self.sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
