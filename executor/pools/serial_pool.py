"""The pool without processes: the same block of envs, driven in the caller's own thread.

Guarantees: the same rows, words and messages as `WorkerPool`, so the executor treats both alike. The caller's global
random generators are restored.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.base import Pool, WorkerFigures, refuse_batches
from envherd.executor.pools.commands import CommandWords, native_caller
from envherd.executor.processes.error_messages import (
    env_error,
    lacks_arguments,
    log_close_fault,
    raised,
)
from envherd.executor.sending.blueprint import Blueprint
from envherd.shm.segment import HAS_MEMFD, Segment
from envherd.shm.slab import Slab, Storage, StoragePlan
from envherd.shm.sync import Bells, Doorbell, LocalBell
from envherd.workers import messages, plain, seeding
from envherd.workers.adapters import Adapter
from envherd.workers.block.block import Block
from envherd.workers.build import Builder
from envherd.workers.current import WorkerInfo, building
from envherd.workers.errors import EnvherdError, FactoryError
from envherd.workers.options import FactoryCall
from envherd.workers.process.loop import Loop, loop_class
from envherd.workers.protocol import Op, pack_each
from envherd.workers.reply import Fault


class SerialPool(Pool):
    """One block in this process; a worker's loop carries out commands as they are submitted.

    Attributes:
        adapters: env id -> adapter; none once it is closed.
    """

    def __init__(self, blueprint: Blueprint, options: ExecutorOptions) -> None:
        super().__init__(blueprint, options)
        self.num_workers = 0
        self.holds_storages = True  # in the block
        self.worker_of = np.zeros(self.num_envs, np.int64)
        self.lost: dict[int, EnvherdError] = {}
        self._segment: Segment | None = None  # only with lendable frames
        self.adapters: dict[int, Adapter] = {}

    def start(self) -> None:
        """Build the envs; set `specs`, `plan` and `slab`."""
        before = seeding.caller_state()
        self._builder = Builder(self.options.for_block())
        first = self.options.first_env_id
        self._info = WorkerInfo(
            worker_id=0,
            generation=0,
            num_workers=0,
            env_ids=tuple(range(first, first + self.num_envs)),
        )
        try:
            for env_id in range(self.num_envs):
                seeding.seed_globals(
                    seeding.build_seed(self.blueprint.root_seed, first + env_id)
                )
                self._build(env_id)
            self.specs = [self.adapters[i].spec for i in range(self.num_envs)]
            refuse_batches(self.specs, self.options)
        except BaseException:
            self.close()
            raise
        finally:
            seeding.restore_globals(before)
        self.plan = self._plan_slab(1, lends=HAS_MEMFD)
        self.slab = Slab(self.plan, self._make_memory())
        self._block = Block(
            0,
            self.adapters,
            self.blueprint.root_seed,
            self._take,
            self.options.for_block(),
            passes=(KeyboardInterrupt,),
        )
        self._block.build_again = self._build_env
        self._block.forget = self._forget
        self.envs_in_python = self._block.why_python()
        self._block.attach(self.slab)
        self.words = CommandWords(self.slab)
        self._serve = self._make_server()
        go, done = self._bells
        if go.memory is None:
            self.why_python = [
                *self.why_python,
                "this system has no semaphores in shared memory",
            ]
        if not self.why_python:
            self._caller = native_caller(
                self.words,
                [go],
                done,
                self.slab.words,
                self.worker_of,
            )

    def _make_memory(self) -> np.ndarray:
        """Return memory for the slab: with lendable frames it must be mapped twice."""
        plan = self.plan
        if not plan.num_lendable:
            return np.zeros(plan.nbytes, np.uint8)
        self._segment = Segment.create(
            plan.nbytes,
            num_sparse=plan.nbytes - plan.ring_nbytes,
        )
        self.lendable = self._segment.private_view(plan.ring_nbytes)
        return self._segment.array()

    def _make_server(self) -> Callable[[], None]:
        """Return a function that carries out the written commands by a worker's loop."""
        mail = self.slab.words["mail_seq"]
        kind, self._bells = self._make_bells()
        serve_token = kind(
            self._block,
            self.slab,
            self._bells,
            lambda: int(mail[0]),
            lambda: None,
            int(mail[0]),
        ).server()
        take_token = self._bells.done.try_wait

        def serve() -> None:
            serve_token()
            # Drop the loop's tokens: a semaphore holds only 2**31 - 1.
            while take_token():
                pass

        return serve

    def _make_bells(self) -> tuple[type[Loop], Bells]:
        """Return the class of the loop and its doorbells; without semaphores in shared memory, the one in Python."""
        buffer = self.slab.buffer
        try:
            go = Doorbell.create(buffer, self.plan.go_offset(0))
            done = Doorbell.create(buffer, self.plan.bells_offset)
        except (AttributeError, OSError):
            return Loop, Bells(LocalBell(), LocalBell())
        return loop_class(), Bells(go, done)

    def _note_change(self) -> None:
        """Make the loop read the envs again, after a change other than by a command."""
        self.slab.words["mail_seq"][0] += 1

    def _build_env(self, env_id: int, call: FactoryCall) -> Adapter:
        with building(self._info, self.options.first_env_id + env_id):
            self.adapters[env_id] = self._builder.adopt(*call)
        return self.adapters[env_id]

    def _forget(self, closed: Adapter) -> None:
        self.adapters = {
            env_id: adapter
            for env_id, adapter in self.adapters.items()
            if adapter is not closed
        }
        self._builder.forget(closed)

    def _build(self, env_id: int) -> None:
        try:
            self._build_env(env_id, self.blueprint.calls[env_id].sent)
        except EnvherdError:
            raise
        except Exception as error:
            fault = Fault.from_exception(env_id, "build", error)
            raise FactoryError(
                f"make_env failed: the factory raised {raised(fault.type_name, fault.message)} (env {env_id}, phase "
                f"build).{lacks_arguments(fault.type_name, fault.message)}",
                remote_traceback=fault.traceback,
                env_ids=(env_id,),
                phase="build",
            ) from error

    def serve(self) -> None:
        """Carry out the commands that were written."""
        # Looked up each time, because `wake_workers` replaces it.
        self._serve()

    def submit(
        self,
        env_ids: np.ndarray,
        op: Op | np.ndarray,
        target: int,
        columns: np.ndarray | int,
        flags: int = 0,
    ) -> None:
        """Carry out a command for some envs."""
        self.words.write(
            env_ids,
            pack_each(op, target, columns, flags, self.plan.num_frames),
        )
        self._serve()

    def _take(self, frame: dict[str, Any]) -> None:
        # Encoded as for a socket, which refuses what a worker could not send.
        self.outcome.take(plain.decode(plain.encode(frame)))

    def wake_workers(self) -> None:
        """Drop commands that were broken off: they will not be carried out."""
        self.words.reply_seq[:] = self.words.command_seq
        self._serve = self._make_server()

    def was_given(self, env_ids: np.ndarray, since: int) -> np.ndarray:
        """Return which envs have carried out a command since that of number `since`, bool `[k]`."""
        return np.asarray(self.words.reply_seq[env_ids] > since)

    def prepare(self, message: messages.Prepare) -> None:
        """Keep the extras of an env's next command."""
        self._block.prepare(message)
        self._note_change()

    def seed(self, root_seed: int, episodes: Sequence[int] | None = None) -> None:
        self._block.seed(root_seed, episodes)
        self._note_change()

    def ask(self, what: str, env_ids: list[int], **question: Any) -> dict[int, Any]:
        self._note_change()
        reply = self._block.ask(
            messages.Ask(what=what, env_ids=tuple(env_ids), **question)
        )
        if reply["kind"] == "fault":
            raise env_error([reply], 0, os.getpid())
        return dict(zip(env_ids, reply["values"], strict=True))

    def attach_storage(
        self,
        target: int,
        plan: StoragePlan,
    ) -> Callable[[], np.ndarray]:
        """Write to a new rollout storage as `target`."""
        memory = np.empty(plan.nbytes, np.uint8)
        self._block.attach_storage(target, Storage(plan, memory.view()))
        self._note_change()
        return memory.view

    def detach_storage(self, target: int) -> None:
        """Forget a rollout storage."""
        self._block.detach_storage(target)
        self._note_change()

    def figures(self) -> list[WorkerFigures]:
        """Return the figures of this process."""
        # Descendants are left out, because some are not the envs'.
        return [WorkerFigures.of(os.getpid(), is_alone=True)]

    def close(self, timeout_s: float | None = None) -> None:
        """Close the envs; log their exceptions. Without a limit, because a call of an env cannot be ended."""
        if self._segment is not None:
            self._segment.close()
        adapters = self.adapters
        # First: a repeated call closes no env twice.
        self.adapters = {}
        for env_id, adapter in adapters.items():
            try:
                adapter.close()
            except (Exception, SystemExit) as error:
                log_close_fault(Fault.from_exception(env_id, "close", error).to_plain())
