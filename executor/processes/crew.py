"""The crew: the worker processes and their messages, outside the hot path.

It starts the workers, makes them build their envs, gives them memory, sends messages and receives answers, replaces a
worker, and ends them all. It knows nothing of commands and rows.

Guarantees: a wait for a worker that dies or is late raises, and never hangs; an answer is read completely or not at
all; `close` is bounded by one deadline and never raises.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from envherd.executor.options import ExecutorOptions
from envherd.executor.processes.error_messages import (
    Frame,
    factory_error,
    log,
    log_close_fault,
    not_forked,
    not_started,
    numbering,
    worker_late,
    worker_lost,
)
from envherd.executor.processes.worker_process import WorkerProcess, worker_config
from envherd.executor.progress import showing
from envherd.executor.sending.blueprint import Blueprint
from envherd.executor.sending.variables import gpus_of, variables_of
from envherd.executor.start.preloading import helper_for
from envherd.executor.start.zygote import Helper, surroundings_of
from envherd.shm import platforms
from envherd.shm.interrupts import ignoring_refusals, uninterrupted
from envherd.shm.segment import Segment
from envherd.shm.slab import SlabPlan, StoragePlan
from envherd.shm.specs import EnvSpec
from envherd.workers import messages
from envherd.workers.current import WorkerInfo
from envherd.workers.sending import registries

#: Kinds of frames that belong to the rows of a command, not to a call that waits for an answer.
_ROW_KINDS = ("side", "infos", "schema", "notice", "left_out")


class Crew:
    """The workers of one pool.

    Args:
        blueprint: of the pool.
        options: of the executor.
        on_row_frame: called with each frame that belongs to rows (faults of steps and resets, side values).

    Attributes:
        workers: by worker id.
        root_seed: of a replaced worker's start.
        is_closing: `close` was called: workers end.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        options: ExecutorOptions,
        on_row_frame: Callable[[Frame], None],
    ) -> None:
        self.blueprint = blueprint
        self.options = options
        self.root_seed = blueprint.root_seed
        self._registered = registries.collect()
        # Also of workers that replace others.
        self._surroundings = surroundings_of(options)
        # An env's two workers have the same.
        num_workers = len(dict.fromkeys(blueprint.blocks))
        self._gpus = gpus_of(options, num_workers)
        self._variables = variables_of(options, self._gpus)
        self._episodes: tuple[int, ...] | None = None  # with which it was set
        self.workers: list[WorkerProcess] = []
        self.envs_in_python: list[str] = []
        self._on_row_frame = on_row_frame
        self._inbox: list[list[Frame]] = [[] for _ in blueprint.blocks]
        self._zygote: Helper | None = None
        self._num_forks = 0
        self.is_closing = self._has_ended = False
        self._owner = os.getpid()
        self._plan: SlabPlan | None = None
        self._segment: Segment | None = None
        self._wake_worker: Callable[[int], None] = lambda _: None
        self._storages: dict[int, tuple[StoragePlan, Segment]] = {}

    # ---- start -------------------------------------------------------------------------------

    def start(self) -> list[EnvSpec]:
        """Start the workers, have them build their envs, and return the specs in env order.

        Raises:
            FactoryError, WorkerLost, WorkerTimeout: the crew is unusable and must be closed.
            ValueError: the options do not fit this machine.
        """
        self.options.check_here()
        self._log_ready(0)
        self._get_helper()
        for worker_id in range(len(self.blueprint.blocks)):
            with uninterrupted():  # or no one would end it
                self.workers.append(self._launch(worker_id, generation=0))
        specs = []
        with showing("workers ready", len(self.workers)) as shown:
            for worker_id in range(len(self.workers)):
                specs += self.collect_specs(worker_id)
                self._log_ready(worker_id + 1)
                shown.update()
        return specs

    def _get_helper(self) -> None:
        """Wait for the helper that forks workers."""
        with uninterrupted():  # or it would have a user that never closes it
            self._zygote = helper_for(self, self.options, self.blueprint.preload)
        self._zygote.wait_ready()
        for name, why in self._zygote.failed_preloads.items():
            log.info(
                "preload of %s failed (%s); workers import what they need", name, why
            )
        if self._zygote.num_threads > 1 and self.options.start_method != "spawn":
            log.info(
                "a preloaded module started threads: workers are exec'd instead of forked"
            )

    def _make_process(self, info: WorkerInfo) -> WorkerProcess:
        return WorkerProcess(info, self._zygote)

    def _info(self, worker_id: int, generation: int) -> WorkerInfo:
        return WorkerInfo(
            worker_id=worker_id,
            generation=generation,
            num_workers=len(self._variables),
            env_ids=self.blueprint.blocks[worker_id],
        )

    def _start_process(self, worker: WorkerProcess, config: dict[str, Any]) -> None:
        zygote = self._zygote
        assert zygote is not None
        worker.start(
            lambda sock, log: zygote.fork(config, [sock, zygote.lifeline_read, log])
        )

    def _launch(self, worker_id: int, generation: int) -> WorkerProcess:
        """Start a worker and make it build its envs, without waiting for them; after an error it has ended.

        Raises:
            WorkerLost: the system or the helper refuses a process or what it needs.
        """
        platforms.open_standard_descriptors()
        process = self._make_process(self._info(worker_id, generation))
        try:
            self._begin(process)
            return process
        except BaseException as error:
            process.kill()
            process.release()
            # Not one that a signal handler has raised.
            if isinstance(error, OSError) and error.errno is not None:
                raise not_started(process, error) from error.with_traceback(None)
            raise

    def _begin(self, process: WorkerProcess) -> None:
        worker_id = process.worker_id
        index = worker_id % len(self._variables)
        environ = {**self._surroundings["environ"], **self._variables[index]}
        env_ids = self.blueprint.blocks[worker_id]
        start = self.blueprint.starts[env_ids[0]] if self.blueprint.starts else None
        config = worker_config(self.options, worker_id)
        config["caller"] = {
            **self._surroundings,
            "environ": environ,
            "name": f"envherd-worker-{worker_id}",
        }
        if start is not None:
            start(config)
        self._start_process(process, config)
        process.gpu = self._gpus[index]
        build = messages.Build(
            worker=process.info,
            first_worker_id=numbering.first_worker_id,
            factories=tuple(self.blueprint.factories[i] for i in env_ids),
            env_kwargs=tuple(self.blueprint.env_kwargs[i] for i in env_ids),
            root_seed=self.root_seed,
            block=self.options.for_block(),
        )
        process.root_seed = self.root_seed
        # Another interpreter has other versions of the packages that know the names.
        if start is None:
            process.channel.queue_message(messages.Register(entries=self._registered))
        process.channel.queue_message(build)
        # The thread that waits for the worker notices its death.
        with contextlib.suppress(ConnectionError):
            # The rest is sent while waiting for the answer.
            process.channel.flush_nowait()

    def _log_ready(self, num_ready: int) -> None:
        """Log the progress of a start; the record has both numbers, for progress bars (docs/logging.md)."""
        counts = {"num_ready": num_ready, "num_workers": len(self.blueprint.blocks)}
        log.debug(
            "start: %(num_ready)d of %(num_workers)d workers are ready",
            counts,
            extra=counts,
        )

    def collect_specs(self, worker_id: int) -> list[EnvSpec]:
        """Wait until a worker has built its envs; return their specs."""
        frame = self.await_frame(worker_id, "build", self.options.build_timeout_s)
        if frame["kind"] == "fault":
            built = self.blueprint.equal_call_before(frame["env_id"], worker_id)
            raise factory_error(frame, self.workers[worker_id], built)
        self.envs_in_python += [
            why for why in frame["why_python"] if why not in self.envs_in_python
        ]
        return [
            EnvSpec.from_plain(frame["specs"][str(env_id)])
            for env_id in self.blueprint.blocks[worker_id]
        ]

    def hand_over(
        self, plan: SlabPlan, segment: Segment, wake_worker: Callable[[int], None]
    ) -> None:
        """Give every worker the slab; from then on `wake_worker(worker_id)` announces mail.

        Args:
            plan: of the slab.
            segment: its memory; closed with the crew.
            wake_worker: counts a message and rings the worker's doorbell.
        """
        self._plan, self._segment, self._wake_worker = plan, segment, wake_worker
        for worker in self.workers:
            self.attach(worker.worker_id)

    def attach(self, worker_id: int) -> None:
        """Give one worker the slab, the rollout storages in use, and the root seed if it has changed meanwhile."""
        assert self._plan is not None
        assert self._segment is not None
        worker = self.workers[worker_id]
        message = messages.Attach(
            plan=self._plan, nbytes=self._segment.nbytes, name=self._segment.name
        )
        worker.channel.queue_message(message, _fds(self._segment))
        self.await_frame(worker_id, "attach", self.options.build_timeout_s)
        # Mail makes it look for commands, so it serves from here on.
        with uninterrupted():
            for target, (plan, segment) in self._storages.items():
                self._send_storage(worker_id, target, plan, segment)
            if worker.root_seed != self.root_seed:
                self.mail(
                    worker_id,
                    messages.Seed(root_seed=self.root_seed, episodes=self._episodes),
                )
            worker.is_attached = True

    def replace(self, worker_id: int, copy: WorkerProcess | None = None) -> None:
        """Start a successor of a worker that has ended; it builds its envs while the other workers continue.

        Args:
            worker_id: of the worker; it is killed.
            copy: the successor, if it is a copy of another worker.
        """
        # The only wait inside is for the death of a killed process.
        with uninterrupted():
            old = self.workers[worker_id]
            old.kill()
            old.wait_exit(1.0)
            old.release()
            self._inbox[worker_id].clear()
            self.workers[worker_id] = copy or self._launch(
                worker_id, old.generation + 1
            )
            if self.is_closing:  # by another thread, which may have missed this worker
                self.workers[worker_id].kill()
                self.workers[worker_id].release()

    def fork(
        self,
        source_id: int,
        worker_id: int,
        seed: int | None,
        copies: list[WorkerProcess],
    ) -> None:
        """Make a worker fork itself. The copy is for the place of another worker, and waits for `replace` and `attach`.

        Args:
            source_id: of the worker.
            worker_id: whose place the copy is for.
            seed: see `messages.Branch`.
            copies: the copy is appended before it exists, so that it can be released after an interrupt.

        Raises:
            ValueError: the worker cannot be forked.
            WorkerLost, WorkerTimeout: the worker or the copy died, or the worker was late and was killed.
        """
        source, zygote = self.workers[source_id], self._zygote
        assert zygote is not None
        info = self._info(worker_id, self.workers[worker_id].generation + 1)
        with uninterrupted():
            copy = self._make_process(info)
            copies.append(copy)
        copy.gpu, copy.root_seed = source.gpu, self.root_seed
        self._num_forks += 1
        # No request has a negative number.
        number = -self._num_forks
        config = worker_config(self.options, worker_id)
        message = messages.Branch(worker=info, config=config, seed=seed, number=number)

        def fork(sock: int, log: int) -> int:
            self.mail(source_id, message, [sock, log])
            frame = self.await_frame(
                source_id, "branch", self.options.build_timeout_s, number
            )
            if frame["why"]:
                raise not_forked(source, frame["why"])
            return zygote.adopt(frame["pid"], copy.log_fd)

        copy.start(fork)

    # ---- messages ----------------------------------------------------------------------------

    def mail(
        self,
        worker_id: int,
        message: messages.Message,
        fds: Sequence[int] = (),
        *,
        waits: bool = True,
    ) -> None:
        """Send a message to a worker that serves commands; it reads the message before any later command.

        Args:
            worker_id: of the worker.
            message: any.
            fds: descriptors for it.
            waits: False if what its socket has no room for may be sent while the caller waits for answers.
        """
        worker = self.workers[worker_id]
        worker.channel.queue_message(message, fds)
        # Before everything is sent, because the worker reads only announced messages.
        self._wake_worker(worker_id)
        with contextlib.suppress(ConnectionError):  # waits for answers notice the death
            while (
                not worker.channel.flush_nowait() and waits and not worker.has_exited()
            ):
                worker.wait_for_any([worker])
                # The worker may be blocked in a write until this process reads.
                self.drain(worker_id)

    def await_frame(
        self,
        worker_id: int,
        phase: str,
        timeout_s: float | None,
        number: int | None = None,
    ) -> Frame:
        """Wait for a worker's next answer.

        Args:
            worker_id: of the worker.
            phase: of the worker, for messages.
            timeout_s: seconds; None waits without a limit.
            number: of the request; answers to earlier, interrupted requests are dropped.

        Raises:
            WorkerLost: it died instead.
            WorkerTimeout: it was late, and was killed.
        """
        worker = self.workers[worker_id]
        end = None if timeout_s is None else time.monotonic() + timeout_s
        self.drain(worker_id)
        while (
            not self._inbox[worker_id]
            or self._inbox[worker_id][0].get("number") != number
        ):
            if self._inbox[worker_id]:
                self._inbox[worker_id].pop(0)
                continue
            if not worker.wait_for_any(
                [worker], None if end is None else end - time.monotonic()
            ):
                raise worker_late(worker, phase, timeout_s or 0.0)
            # Asked first: what it wrote before its end is there to be read.
            has_exited = worker.has_exited()
            self.drain(worker_id)
            if has_exited and not self._inbox[worker_id]:
                raise worker_lost(worker, phase)
        return self._inbox[worker_id].pop(0)

    def has_answered(self, worker_id: int) -> bool:
        """Return whether `await_frame` would not block: an answer is there, or the worker has ended."""
        self.drain(worker_id)
        return bool(self._inbox[worker_id]) or self.workers[worker_id].has_exited()

    def drain(self, worker_id: int) -> None:
        """Read what a worker has written, and send what an interrupt has left unsent, without blocking."""
        channel = self.workers[worker_id].channel
        with contextlib.suppress(ConnectionError):
            channel.flush_nowait()
        frames = channel.drain_nowait()
        while frames:
            self._deliver(worker_id, frames[0])
            # Last: after an interrupt the frame is delivered again, which has no effect.
            del frames[0]

    def _deliver(self, worker_id: int, frame: Frame) -> None:
        inbox = self._inbox[worker_id]
        is_fault = frame["kind"] == "fault" and frame["phase"] in ("reset", "step")
        if is_fault or frame["kind"] in _ROW_KINDS:
            self._on_row_frame(frame)
        elif not inbox or inbox[-1] is not frame:
            inbox.append(frame)

    # ---- rollout storages --------------------------------------------------------------------

    def attach_storage(self, target: int, plan: StoragePlan, segment: Segment) -> None:
        """Make every worker map a rollout storage as `target`: now, or when it gets the slab."""
        self._storages[target] = (plan, segment)
        for worker in self._attached():
            self._send_storage(worker.worker_id, target, plan, segment)

    def _send_storage(
        self, worker_id: int, target: int, plan: StoragePlan, segment: Segment
    ) -> None:
        message = messages.AttachStorage(
            target=target, plan=plan, nbytes=segment.nbytes, name=segment.name
        )
        self.mail(worker_id, message, _fds(segment))

    def detach_storage(self, target: int) -> None:
        """Make every worker forget a rollout storage. May be repeated, as after an interrupt."""
        for worker in self._attached():
            self.mail(worker.worker_id, messages.DetachStorage(target=target))
        # Last: after an interrupt, successors that were attached meanwhile forget it too.
        if target in self._storages:
            self._storages.pop(target)[1].close()

    # ---- seeds -------------------------------------------------------------------------------

    def seed(self, root_seed: int, episodes: Sequence[int] | None = None) -> None:
        """Give every worker a new root seed: now, or when it gets the slab; see `Pool.seed`."""
        self.root_seed = root_seed
        self._episodes = None if episodes is None else tuple(episodes)
        for worker in self._attached():
            self.mail(
                worker.worker_id,
                messages.Seed(root_seed=root_seed, episodes=self._episodes),
            )

    def _attached(self) -> list[WorkerProcess]:
        """Return the workers that read mail; `attach` sends everything to the others, which are still building."""
        return [worker for worker in self.workers if worker.is_attached]

    # ---- the end -----------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """Close the envs and end the workers within `timeout_s` in all, then by force. Idempotent.

        Ctrl-C ends them at once. Raises nothing else, unless memory is short. Does nothing in a fork of this process,
        which may end inside any call.
        """
        if self._owner != os.getpid() or self._has_ended:
            return
        self.is_closing = True
        try:
            if timeout_s > 0:
                self._ask_to_close(time.monotonic() + timeout_s, self.workers)
        finally:
            with uninterrupted():
                try:
                    self._end()
                except BaseException:
                    self._end()  # what is left: each part may be repeated
                    raise

    def _end(self) -> None:
        """Kill the workers, and release all that the crew holds."""
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.wait_exit(1.0)
            worker.release()
        if self._zygote is not None:
            self._zygote.close(self)
        for _, segment in self._storages.values():
            segment.close()
        if self._segment is not None:
            self._segment.close()
        self._has_ended = True

    def dismiss(self, worker_id: int, timeout_s: float) -> None:
        """Close the envs of one worker and end it within `timeout_s`, before `replace`."""
        self._ask_to_close(time.monotonic() + timeout_s, [self.workers[worker_id]])

    def _ask_to_close(self, end: float, workers: list[WorkerProcess]) -> None:
        """Make workers close their envs and exit; read their output, as a full socket would block their exit."""
        for worker in workers:
            with ignoring_refusals():
                worker.channel.queue_message(messages.Close())
                self._wake_worker(worker.worker_id)
                worker.channel.flush_nowait()
        left = [worker for worker in workers if not worker.has_exited()]
        while left and (remaining_s := end - time.monotonic()) > 0:
            left[0].wait_for_any(left, remaining_s)
            for worker in list(left):
                # Asked first: what it wrote before its end is there to be read.
                has_exited = worker.has_exited()
                with uninterrupted(), contextlib.suppress(Exception):
                    self.drain(worker.worker_id)
                if has_exited:
                    left.remove(worker)
        for worker in workers:
            with uninterrupted(), contextlib.suppress(Exception):
                self.drain(worker.worker_id)
            for frame in self._inbox[worker.worker_id]:
                if frame["kind"] == "fault" and frame["phase"] == "close":
                    log_close_fault(frame)


def _fds(segment: Segment) -> list[int]:
    return [segment.fd] if segment.fd >= 0 else []
