"""Messages on the socket between parent and worker: everything that is not the hot path.

Parent to worker: one of the dataclasses below, pickled (the parent is trusted: it is the same user's
program). Worker to parent: a plain dict (`workers.plain`), never a pickle. A frame on the wire is a
head (length of the payload, number of descriptors that ride along) and the payload.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import socket
import struct
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from envherd.shm.slab import SlabPlan, StoragePlan
from envherd.workers import plain
from envherd.workers.adapters.info_leaves import InfoKeys
from envherd.workers.adapters.registry import EnvType
from envherd.workers.infos import InfoPolicy

_HEAD = struct.Struct("<QI")
_MAX_FDS = 4


@dataclass(frozen=True, kw_only=True)
class BlockOptions:
    """How a worker runs its envs.

    Attributes:
        isolate_rng: swap the global generators' state in and out around every call of an env.
        check_finite: refuse NaN and infinities in observations and rewards.
        infos: what becomes of the envs' infos.
        info_keys: entries of the infos that are leaves; see `adapters.info_leaves`.
        episode_seeds: seed every reset from (root seed, env id, episode), or only where the caller gives a seed.
        env_type: what the envs take and give; see `adapters.find_adapter`.
        first_env_id: what seeds call env 0, where these envs are a share of a larger batch.
        reset_ahead: the worker is one of the two that an env has; see `workers.ahead`.
    """

    isolate_rng: bool = False
    check_finite: bool = False
    infos: InfoPolicy = "drop"
    info_keys: InfoKeys | None = None
    episode_seeds: bool = True
    env_type: EnvType = "auto"
    first_env_id: int = 0
    reset_ahead: bool = False


@dataclass(frozen=True, kw_only=True)
class Build:
    """Build the envs. Answered by their specs, or by what went wrong.

    Attributes:
        worker_id: for messages.
        env_ids: which envs this worker owns, ascending.
        factories: one pickled callable for each env; equal objects are unpickled once.
        env_kwargs: keyword arguments for each factory call.
        root_seed: seeds the global generators before each factory runs, and the episodes.
        block: how the envs are run.
        pickle_replies: answers to calls may be pickled.
    """

    worker_id: int
    env_ids: tuple[int, ...]
    factories: tuple[bytes, ...]
    env_kwargs: tuple[dict[str, Any], ...]
    root_seed: int
    block: BlockOptions
    pickle_replies: bool = False


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
    """Use a new root seed; the next reset of every env is episode 0 again."""

    root_seed: int


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Extras for the next command of one env: explicit seed, reset keyword arguments, side inputs."""

    env_id: int
    seed: int | None = None
    has_seed: bool = False
    options: dict[str, Any] | None = None
    side: list[Any] | None = None


#: The questions whose `args` hold one item for each env that is asked.
PER_ENV = frozenset({"set", "each", "load_state_dict"})


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Do something with envs that is not a step; answered by one value per env.

    `what` is "call", "each" (a call with one argument, each env its own), "get", "has" (whether a "get"
    would find something), "set", "layers" (the classes of an env and its wrappers), "render", "state_dict" or
    "load_state_dict"; `number` comes back with the answer, so that the answer to a question whose asker was
    interrupted is not taken for the next one's. An `is_silent` one is not answered, whatever comes of it.
    """

    what: str
    env_ids: tuple[int, ...]
    name: str = ""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    number: int = 0
    is_silent: bool = False


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Measure an env instead of building a block; answered by "probed" frames, the last of which says so, or a fault.

    Attributes:
        factory: pickled.
        env_kwargs: keyword arguments of the factory call.
        root_seed: of the envs and of the random actions.
        block: how the envs are run.
        num_envs: how many are built beside each other at most.
        budget_s: seconds after which no further step, reset or build is begun.
    """

    factory: bytes
    env_kwargs: dict[str, Any]
    root_seed: int
    block: BlockOptions
    num_envs: int
    budget_s: float


@dataclass(frozen=True, kw_only=True)
class Close:
    """Close the envs and leave."""


Message = Build | Attach | AttachStorage | DetachStorage | Seed | Prepare | Ask | Probe | Close


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Put Ctrl-C off for as long as this lasts; nothing inside may wait."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _dumps(message: Message) -> bytes:
    """Return a message as bytes; arguments that the user's script defines travel by value."""
    return bytes(cloudpickle.dumps(message))


class Channel:
    """One end of the socket: whole frames in, whole frames out."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._fds: list[int] = []
        self._received = bytearray()
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()

    def queue_message(self, message: Message, fds: list[int] | None = None) -> None:
        """Take a message that `flush_nowait` will send; its descriptors stay open until then (parent's side)."""
        payload = _dumps(message)
        fds = fds or []
        self._unsent.append((memoryview(_HEAD.pack(len(payload), len(fds)) + payload), fds))

    def flush_nowait(self) -> bool:
        """Send what is queued, as far as the socket takes it now; return whether all of it is sent."""
        if not self._unsent:
            return True
        with uninterrupted():
            while self._unsent:
                data, fds = self._unsent[0]
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
                try:
                    num_sent = self.sock.sendmsg([data], rights, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return False
                self._unsent[0] = (data[num_sent:], [])
                if num_sent == len(data):
                    self._unsent.popleft()
        return True

    def send_message(self, message: Message, fds: list[int] | None = None) -> None:
        """Send a message to a worker that is waiting for one (parent's side); blocks until all of it is sent."""
        self._send(_dumps(message), fds or [])

    def receive_message(self) -> tuple[Message, list[int]]:
        """Wait for a message from the parent (worker's side); `EOFError` when the parent has gone."""
        payload, num_fds = self._receive()
        fds, self._fds = self._fds[:num_fds], self._fds[num_fds:]
        message: Message = pickle.loads(payload)
        return message, fds

    def send_plain(self, value: dict[str, Any]) -> None:
        """Send plain data to the parent (worker's side)."""
        self._send(plain.encode(value), [])

    def receive_plain(self) -> dict[str, Any]:
        """Wait for plain data from the worker (parent's side); `EOFError` when the worker has gone."""
        value: dict[str, Any] = plain.decode(self._receive()[0])
        return value

    def drain_nowait(self) -> list[dict[str, Any]]:
        """Return the whole frames that have arrived, without blocking (parent's side)."""
        while True:
            try:
                chunk = self.sock.recv(1 << 20, socket.MSG_DONTWAIT)
            except (BlockingIOError, ConnectionError):
                break
            if not chunk:
                break
            self._received += chunk
        frames = []
        while (frame := self._take_frame()) is not None:
            frames.append(plain.decode(frame[0]))
        return frames

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self.sock.close()

    def _send(self, payload: bytes, fds: list[int]) -> None:
        head = _HEAD.pack(len(payload), len(fds))
        if fds:
            socket.send_fds(self.sock, [head], fds)
            self.sock.sendall(payload)
        else:
            self.sock.sendall(head + payload)

    def _receive(self) -> tuple[bytes, int]:
        while (frame := self._take_frame()) is None:
            chunk, fds, _, _ = socket.recv_fds(self.sock, 1 << 20, _MAX_FDS)
            self._fds += fds
            if not chunk:
                raise EOFError("the other end has gone")
            self._received += chunk
        return frame

    def _take_frame(self) -> tuple[bytes, int] | None:
        """Return the payload of the next whole frame and how many descriptors belong to it."""
        if len(self._received) < _HEAD.size:
            return None
        size, num_fds = _HEAD.unpack_from(self._received)
        end = _HEAD.size + size
        if len(self._received) < end:
            return None
        payload = bytes(self._received[_HEAD.size : end])
        del self._received[:end]
        return payload, num_fds
