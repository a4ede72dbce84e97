"""Run each env of a worker on a separate thread, for envs that mostly wait (`ExecutorOptions.env_threads`).

The worker's first thread reads commands and mail, and passes them to the threads of the envs concerned. An env is
built, reset, stepped, asked and closed on one thread.

Guarantees: those of `Loop`. Commands of one env are carried out in order. A change that concerns all envs (a root seed,
a rollout storage) waits until no env is in a call.
Assumes: an env that waits releases the GIL (sockets, subprocesses, sleep). Python code of two envs never runs at once.
The process's global random generators are shared by all envs of the worker, and are neither watched nor isolated.
"""

import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

from envherd.shm.slab import NUM_BINS, Slab, bin_of
from envherd.shm.sync import keep_order
from envherd.workers.adapters.base import Adapter
from envherd.workers.block.block import Block, Report
from envherd.workers.block.slot import Slot
from envherd.workers.messages import PER_ENV, Ask
from envherd.workers.options import BlockOptions
from envherd.workers.process.entry import EnvCalls
from envherd.workers.process.loop import Loop
from envherd.workers.protocol import EACH, describe_phase

#: Bytes of a thread's stack; Linux allocates only the pages that are touched.
_STACK_BYTES = 1 << 21


class EnvThreads(EnvCalls):
    """One thread for each of some envs."""

    def __init__(self, env_ids: Iterable[int]) -> None:
        before = threading.stack_size(_STACK_BYTES)
        try:
            self._calls = {env_id: self._start(env_id) for env_id in env_ids}
        finally:
            threading.stack_size(before)

    def _start(self, env_id: int) -> queue.SimpleQueue[Callable[[], None]]:
        calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        worker = os.getpid()

        def run() -> None:
            # A process that the env has forked has this thread only.
            while os.getpid() == worker:
                call = calls.get()
                try:
                    call()
                # Not an env's exception, which `Block.execute` and `run` catch.
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            os._exit(1)

        threading.Thread(target=run, name=f"env-{env_id}", daemon=True).start()
        return calls

    def post(self, env_id: int, call: Callable[[], None]) -> None:
        """Queue a call on an env's thread; do not wait. The call must not raise."""
        self._calls[env_id].put(call)

    def begin(self, env_id: int, call: Callable[[], Any]) -> Callable[[], Any]:
        """Queue a call on an env's thread; return what waits for it, and returns what it returns."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        self.post(env_id, run)
        return future.result

    def await_all(self) -> None:
        """Wait until no env is in a call."""
        for end in [self.begin(env_id, lambda: None) for env_id in self._calls]:
            end()

    def make_block(self, *arguments: Any) -> Block:
        """Return the block of the envs."""
        return ThreadedBlock(*arguments, threads=self)

    def loop_type(self, *, is_native: bool) -> type[Loop]:  # noqa: ARG002
        """Return the class of the loop, which is in Python in any case."""
        return ThreadedLoop


class _Call(NamedTuple):
    """The phase of a thread, and when its call began."""

    phase: int
    since_ns: int


class _Phases:
    """The worker's words `phase` and `since_ns`: of the env whose call has lasted longest.

    If resets have no limit, envs in a step come first, so that the parent notices a step that hangs.
    Thread-safety: any thread may call.
    """

    def __init__(self, words: Mapping[str, memoryview], *, steps_first: bool) -> None:
        self._words = words
        self._steps_first = steps_first
        # Of each thread, oldest first.
        self._running: dict[int, _Call] = {}
        self._lock = threading.Lock()

    def __setitem__(self, worker_id: int, phase: int) -> None:
        """Note the phase of the calling thread; 0: it is in no call."""
        thread = threading.get_ident()
        idle = _Call(0, time.perf_counter_ns())
        with self._lock:
            if phase:
                began = self._running.get(thread, idle).since_ns
                self._running[thread] = _Call(phase, began)
            else:
                self._running.pop(thread, None)
            shown = next(iter(self._running.values()), idle)
            if self._steps_first and describe_phase(shown.phase).name == "reset":
                steps = (
                    call
                    for call in self._running.values()
                    if describe_phase(call.phase).name == "step"
                )
                shown = next(steps, shown)
            self._words["phase"][worker_id] = shown.phase
            self._words["since_ns"][worker_id] = shown.since_ns


class ThreadedBlock(Block):
    """A block whose envs may be called at the same time, each on its own thread."""

    def __init__(  # a block's, and the threads
        self,
        worker_id: int,
        adapters: Mapping[int, Adapter],
        root_seed: int,
        report: Report,
        options: BlockOptions,
        *,
        threads: EnvThreads,
    ) -> None:
        super().__init__(worker_id, adapters, root_seed, report, options)
        self.threads = threads
        self._steps_first = not options.limits_resets
        self._build_lock = threading.Lock()
        for slot in self.slots.values():
            slot.unwatched.clear()

    def attach(self, slab: Slab) -> None:
        super().attach(slab)
        self._phase: Any = _Phases(self._words, steps_first=self._steps_first)

    def why_python(self) -> list[str]:
        return [*super().why_python(), "env_threads=True"]

    def rest(self) -> None:
        """Note that the calling thread is in no call of an env."""
        self._phase[self.worker_id] = 0

    def ask(self, message: Ask) -> dict[str, Any]:
        """Ask the envs, each on its thread and all at once."""
        ask_one = super().ask
        asked = []
        for position, env_id in enumerate(message.env_ids):
            args = (
                (message.args[position],) if message.what in PER_ENV else message.args
            )
            one = replace(message, env_ids=(env_id,), args=args)
            asked.append(self.threads.begin(env_id, lambda one=one: ask_one(one)))  # type: ignore[misc]
        replies: list[dict[str, Any]] = [end() for end in asked]
        fault = next((reply for reply in replies if reply["kind"] == "fault"), None)
        if fault is not None or not replies:
            return fault or ask_one(message)
        return {
            **replies[0],
            "values": [value for reply in replies for value in reply["values"]],
        }

    def _rebuild(self, slot: Slot) -> None:
        """Build a new instance of an env; as at the start, one env at a time."""
        with self._build_lock:
            super()._rebuild(slot)

    def _with_own_rng(self, slot: Slot, phase: str, call: Callable[[], Any]) -> Any:  # noqa: ARG002
        """Call an env; all envs share the generators."""
        return call()


class ThreadedLoop(Loop):
    """Hands commands to the envs' threads; see the module."""

    _block: ThreadedBlock

    def server(self) -> Callable[[], bool]:
        self._lock = threading.Lock()
        self._num_running = self._busy_since = 0
        return self._serve_token

    def _scan(self) -> None:
        """Pass new commands to their envs' threads."""
        latest = self._latest
        numbers = self._words["command_seq"]
        commands = self._words["command"]
        pending = [env_id for env_id in latest if numbers[env_id] != latest[env_id]]
        if len(pending) > 1 and commands[pending[0]] & EACH:
            pending.sort(key=numbers.__getitem__)
        if not self._check_mail() or not pending:
            return
        keep_order()  # before what the numbers announce
        with self._lock:
            if not self._num_running:
                self._busy_since = time.perf_counter_ns()
            self._num_running += len(pending)
        # Answers missing before the one ring.
        owed = [sum(not commands[env_id] & EACH for env_id in pending)]
        for env_id in pending:
            number = numbers[env_id]
            latest[env_id] = number
            self._block.threads.post(
                env_id,
                self._task(env_id, number, commands[env_id], owed),
            )

    def _task(
        self,
        env_id: int,
        number: int,
        command: int,
        owed: list[int],
    ) -> Callable[[], None]:
        words = self._words
        block = self._block

        def carry_out() -> None:
            resets = words["resets"]
            before = resets[env_id]
            began = time.perf_counter_ns()
            words["status"][env_id] = block.execute(env_id, command)
            block.rest()
            ended = time.perf_counter_ns()
            if command & EACH:
                words["answered_ns"][env_id] = ended
            keep_order()
            words["reply_seq"][env_id] = number
            with self._lock:
                if self._note_answer(
                    ended,
                    ended - began,
                    owed,
                    command,
                    was_reset=resets[env_id] != before,
                ):
                    self._done.ring()

        return carry_out

    def _note_answer(
        self,
        now: int,
        took: int,
        owed: list[int],
        command: int,
        *,
        was_reset: bool,
    ) -> bool:
        """Count an answer, with the lock held; return whether to wake the parent."""
        words = self._words
        worker_id = self._block.worker_id
        if was_reset:
            # Its part of the time, because the envs that were in calls meanwhile count the same time.
            words["reset_ns"][worker_id] += took // self._num_running
        else:
            words["step_bins"][worker_id * NUM_BINS + bin_of(took)] += 1
        self._num_running -= 1
        if not self._num_running:
            words["busy_ns"][worker_id] += now - self._busy_since
        if command & EACH:
            return self._counter.add()
        owed[0] -= 1
        return not owed[0]
