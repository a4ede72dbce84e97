"""A worker process from start to end.

Guarantees:
- It dies with its owner, however the owner died and wherever the worker is stuck: the kernel sends SIGKILL when the
  write end of the lifeline closes (`O_ASYNC` with `F_SETSIG`), without running Python.
- Ctrl-C never reaches it: it has its own process group, and ignores SIGINT.
- Its stack can be read at any time: SIGUSR2 and every crash dump it into the worker's log, also while
  C code holds the GIL.
- Its output goes to its log, a memfd that the owner also holds. The log is kept short.
- It never imports the user's `__main__`, nor torch or an RL package unless an env needs it.
Platforms: Linux.
"""

import contextlib
import dataclasses
import faulthandler
import functools
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from envherd.shm.platforms import (
    arm_lifeline,
    can_read,
    cut_log,
    detach,
    fcntl,
    listen_for_stack_requests,
    register_at_fork,
    visible_id,
)
from envherd.shm.segment import Segment
from envherd.shm.slab import Slab, Storage
from envherd.shm.sync import Bells, Doorbell
from envherd.workers import current, messages, seeding
from envherd.workers.adapters.base import Adapter
from envherd.workers.adapters.registry import install_import_hooks
from envherd.workers.block.block import Block
from envherd.workers.block.slot import SlotEvent, SlotState
from envherd.workers.build import Builder
from envherd.workers.current import WorkerInfo
from envherd.workers.guest import guest
from envherd.workers.options import BlockOptions, FactoryCall
from envherd.workers.process.loop import Loop, loop_class
from envherd.workers.reply import Fault
from envherd.workers.sending import registries, surroundings

_FIRST_FD = 512  # of the worker's own descriptors


def main(
    sock_fd: int,
    lifeline_fd: int,
    log_fd: int,
    config: dict[str, Any],
) -> None:
    """Run a worker, forked or executed, until a message tells it to exit; never returns."""
    surroundings.enter(config["caller"])
    install_import_hooks()
    detach(
        log_fd,
        is_captured=config.get("output") == "capture",
        is_leader=not config.get("python"),
    )
    lifeline_fd = _arm_lifeline(lifeline_fd)
    sock = socket.socket(fileno=_out_of_the_way(sock_fd))
    run(sock, _out_of_the_way(log_fd), config, lifeline_fd=lifeline_fd)


def run(
    sock: socket.socket,
    log_fd: int,
    config: dict[str, Any],
    *,
    lifeline_fd: int = -1,
    bells: Bells | None = None,
) -> None:
    """Serve messages and commands, in a process that is cut off from its parent's surroundings; never returns.

    Args:
        sock: to the owner.
        log_fd: of the worker's log.
        config: the settings of `executor.processes.worker_process.worker_config`.
        lifeline_fd: of the lifeline; -1 without one.
        bells: None for those in the slab.
    """
    faulthandler.enable(file=log_fd, all_threads=True)
    listen_for_stack_requests(log_fd)
    _apply(config)
    try:
        Worker(messages.WorkerChannel(sock), log_fd, lifeline_fd, bells).serve()
    except (EOFError, ConnectionError):
        os._exit(1)
    except Exception:
        sys.excepthook(*sys.exc_info())
        # Without exit handlers: in a process that an env has forked, they would end the worker's children.
        os._exit(1)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _out_of_the_way(fd: int) -> int:
    """Move a descriptor beyond the low numbers, which envs may close; leave it if there is no room."""
    try:
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD)
    except OSError:  # the limit on open files is lower
        return fd
    os.close(fd)
    return moved


def _arm_lifeline(fd: int) -> int:
    """Ask the kernel for SIGKILL when the owner's end closes; return the descriptor that replaces `fd`."""
    # F_SETOWN is of the open file, which the helper and all workers would share.
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.close(fd)
    own = _out_of_the_way(own)
    arm_lifeline(own, os.getpid())
    # An end that came before the line was armed sends no signal.
    if can_read(own):
        os._exit(1)
    return own


def _apply(config: dict[str, Any]) -> None:
    if config.get("affinity"):
        os.sched_setaffinity(0, config["affinity"])


class LoopLeft(BaseException):
    """Raised by a message's handler, to leave the loop and wait for messages."""


class EnvCalls:
    """How a worker calls its envs: directly. A guest may call them otherwise."""

    def begin(self, env_id: int, call: Callable[[], Any]) -> Callable[[], Any]:  # noqa: ARG002
        """Begin a call of an env, if others can be made meanwhile; return what ends it and returns its result."""
        return call

    def run(self, env_id: int, call: Callable[[], Any]) -> Any:
        """Make a call of an env; return what it returns, or raise what it raises."""
        return self.begin(env_id, call)()

    def await_all(self) -> None:
        """Wait until no env is in a call."""

    def make_block(self, *arguments: Any) -> Block:
        """Return the block of the envs, made with the arguments of `Block`."""
        return Block(*arguments)

    def loop_type(self, *, is_native: bool) -> type[Loop]:
        """Return the class of the loop; `is_native` if its doorbells are in the slab."""
        return loop_class() if is_native else Loop


class Worker:
    """One worker: a block of envs, its memory, and the socket to the parent."""

    # The first message, but for those of `Register`.
    _build: messages.Build

    def __init__(
        self,
        channel: messages.WorkerChannel,
        log_fd: int,
        lifeline_fd: int,
        bells: Bells | None,
    ) -> None:
        self._channel = channel
        register_at_fork(after_in_child=self._disown_in_fork)
        self._bells = bells
        self._log_fd = log_fd
        self._lifeline_fd = lifeline_fd
        self._fds: list[int] = []
        self._builder = Builder(BlockOptions())
        # Without envs until they are built.
        self._block = Block(0, {}, 0, channel.send_plain, BlockOptions())
        self._loop: Loop | None = None
        self._calls = EnvCalls()
        self._handlers: dict[type, Callable[[Any], None]] = {
            messages.Register: lambda message: registries.install(message.entries),
            messages.Build: self._on_build,
            messages.Attach: self._on_attach,
            messages.AttachStorage: self._on_attach_storage,
            messages.DetachStorage: self._on_detach_storage,
            messages.Seed: self._on_seed,
            messages.Prepare: self._on_prepare,
            messages.Ask: self._on_ask,
            messages.Branch: self._on_branch,
        }

    def serve(self) -> None:
        """Handle messages, then commands and messages, until `Close`."""
        while True:
            while self._loop is None:
                if self._read_mail() is None:
                    return
            with contextlib.suppress(LoopLeft):
                self._loop.run()
                return

    def _disown_in_fork(self) -> None:
        """Refuse what an env returns or raises in a process that it has forked: only the worker may answer."""
        self._channel.sock.close()
        for slot in self._block.slots.values():
            slot.state[0] = SlotState.IN_FORK

    def _read_mail(self) -> int | None:
        """Handle one message; return its number, or None to exit."""
        message, fds = self._channel.receive_message()
        number = self._channel.number
        if isinstance(message, messages.Close):
            self._close()
            return None
        self._fds = fds
        self._handlers[type(message)](message)
        cut_log(self._log_fd)
        return number

    def _on_build(self, message: messages.Build) -> None:
        self._build = message
        self._builder = Builder(message.block)
        adapters = {}
        self._enter(message.worker)
        if message.block.env_threads:
            self._calls = guest("env_threads").EnvThreads(message.worker.env_ids)
        for env_id, call in message.calls.items():
            # Before each one: a constructor draws from the global generators, and what it draws must not depend on
            # the envs that were built before in the same process.
            seeding.seed_globals(
                seeding.build_seed(
                    message.root_seed,
                    message.block.first_env_id + env_id,
                )
            )
            try:
                adapters[env_id] = self._calls.run(
                    env_id,
                    functools.partial(self._build_env, env_id, call),
                )
            # A factory may raise anything, and the parent decides what follows.
            except BaseException as error:
                self._channel.send_plain(
                    Fault.from_exception(env_id, "build", error).to_plain()
                )
                return
        self._block = self._calls.make_block(
            message.worker.worker_id,
            adapters,
            message.root_seed,
            self._channel.send_plain,
            message.block,
        )
        self._block.build_again = self._build_env
        self._block.forget = self._builder.forget
        # Again, because a package that the envs import may have replaced the handler.
        listen_for_stack_requests(self._log_fd)
        specs = {
            str(env_id): adapter.spec.to_plain() for env_id, adapter in adapters.items()
        }
        self._channel.send_plain(
            {"kind": "specs", "specs": specs, "why_python": self._block.why_python()}
        )

    def _build_env(self, env_id: int, call: FactoryCall) -> Adapter:
        with current.building(
            current.worker(),
            self._build.block.first_env_id + env_id,
        ):
            return self._builder.build(env_id, *call)

    def _enter(self, worker: WorkerInfo) -> None:
        """Make this process that worker, with the ids of messages."""
        first = self._build.block.first_env_id
        info = dataclasses.replace(
            worker,
            worker_id=self._build.first_worker_id + worker.worker_id,
            env_ids=tuple(first + env_id for env_id in worker.env_ids),
        )
        current.enter(info)

    def _on_attach(self, message: messages.Attach) -> None:
        buffer = _map(message.nbytes, self._fds, message.name)
        slab = Slab(message.plan, buffer)
        self._block.attach(slab)
        # For `envherd top`, which tells by them that another process has taken the place.
        slab.words["pid"][self._block.worker_id] = visible_id()
        slab.words["starts"][self._block.worker_id] += 1
        kind = self._calls.loop_type(is_native=self._bells is None)
        bells = self._bells or Bells(
            Doorbell(buffer, message.plan.go_offset(self._block.worker_id)),
            Doorbell(buffer, message.plan.bells_offset),
        )
        self._loop = kind(
            self._block,
            slab,
            bells,
            self._read_mail,
            functools.partial(cut_log, self._log_fd),
            self._channel.number,
        )
        self._channel.send_plain({"kind": "attached"})

    def _on_attach_storage(self, message: messages.AttachStorage) -> None:
        self._calls.await_all()
        # The owner has removed the name again, so the next message detaches the storage.
        with contextlib.suppress(FileNotFoundError):
            memory = _map(message.nbytes, self._fds, message.name)
            self._block.attach_storage(message.target, Storage(message.plan, memory))

    def _on_detach_storage(self, message: messages.DetachStorage) -> None:
        self._calls.await_all()
        self._block.detach_storage(message.target)

    def _on_seed(self, message: messages.Seed) -> None:
        self._calls.await_all()
        self._block.seed(message.root_seed, message.episodes)

    def _on_prepare(self, message: messages.Prepare) -> None:
        self._calls.run(message.env_id, functools.partial(self._block.prepare, message))

    def _on_ask(self, message: messages.Ask) -> None:
        self._channel.send_plain(self._block.ask(message))

    def _on_branch(self, message: messages.Branch) -> None:
        fds = self._fds
        # `branch` closes them.
        self._fds = []
        states = [slot.state.copy() for slot in self._block.slots.values()]
        pid, why = guest("branching").branch(
            self._channel.sock,
            fds,
            self._log_fd,
            functools.partial(self._become, message, states),
        )
        if pid == 0:
            raise LoopLeft
        self._channel.send_plain(
            {"kind": "branched", "pid": pid, "why": why, "number": message.number}
        )

    def _become(
        self,
        message: messages.Branch,
        states: list[np.ndarray],
        sock_fd: int,
    ) -> None:
        """In the copy, leave everything of the worker that was forked, and wait for the slab as another one."""
        self._lifeline_fd = _arm_lifeline(self._lifeline_fd)
        self._channel.move_to(socket.socket(fileno=_out_of_the_way(sock_fd)))
        current.mark_copy()
        _apply(message.config)
        self._enter(message.worker)
        # Its env has another id from now on, by which the next build keeps or forgets the factory.
        self._builder.in_use.clear()
        self._block.take_place(
            message.worker.worker_id,
            message.worker.env_ids[0],
            states[0],
        )
        self._loop = None

    def _close(self) -> None:
        ends = [
            (env_id, self._calls.begin(env_id, slot.adapter.close))
            for env_id, slot in self._block.slots.items()
            if slot.is_built
        ]
        for env_id, end in ends:
            try:
                end()
                # Refuses a process that the env has forked.
                self._block.slots[env_id].move(SlotEvent.IS_BROKEN_OFF)
            # An env that cannot close must not keep the others open.
            except BaseException as error:
                self._channel.send_plain(
                    Fault.from_exception(env_id, "close", error).to_plain()
                )


def _map(nbytes: int, fds: list[int], name: str | None) -> np.ndarray:
    segment = Segment.attach(nbytes, fd=next(iter(fds), -1), name=name)
    buffer = segment.array()
    segment.close()  # the views keep the mapping; the descriptor is no longer needed
    return buffer
