"""The crew: how worker processes start and build their envs, how one is replaced or copied, and how all end.

`mail` has their messages and answers, and what they are given once all envs are built. The crew knows nothing
of commands and rows.

Guarantee: `close` is bounded by one deadline and never raises.
"""

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from envherd.executor.options import ExecutorOptions
from envherd.executor.processes.error_messages import (
    Frame,
    factory_error,
    log,
    log_close_fault,
    not_forked,
    numbering,
    refusals_as_loss,
)
from envherd.executor.processes.mail import Equipment, await_frame, drain, mail
from envherd.executor.processes.worker_process import WorkerProcess, worker_config
from envherd.executor.progress import showing
from envherd.executor.sending.blueprint import Blueprint
from envherd.executor.sending.variables import gpus_of, variables_of
from envherd.executor.start.zygote import Helper, helper_for, surroundings_of
from envherd.shm import platforms
from envherd.shm.interrupts import ignoring_refusals, uninterrupted
from envherd.shm.specs import EnvSpec
from envherd.workers import messages
from envherd.workers.current import WorkerInfo
from envherd.workers.sending import registries


class Crew:
    """The workers of one pool.

    Args:
        blueprint: of the pool.
        options: of the executor.
        on_row_frame: called with each frame that belongs to rows (faults of steps and resets, side values).

    Attributes:
        workers: by worker id.
        equipment: what each of them has in service.
        envs_in_python: why envs are called by the loop in Python, in words for users.
        is_closing: `close` was called: workers end.
    """

    _process_type: type[WorkerProcess] = WorkerProcess

    def __init__(
        self,
        blueprint: Blueprint,
        options: ExecutorOptions,
        on_row_frame: Callable[[Frame], None],
    ) -> None:
        self.blueprint = blueprint
        self.options = options
        self._registered = registries.collect()
        # Read once: a successor starts as the first workers did.
        self._surroundings = surroundings_of(options)
        # An env's two workers have the same.
        self._gpus = gpus_of(options, len(dict.fromkeys(blueprint.blocks)))
        self._variables = variables_of(options, self._gpus)
        self.workers: list[WorkerProcess] = []
        self.equipment = Equipment(self.workers, blueprint.root_seed, options)
        self.envs_in_python: list[str] = []
        self._on_row_frame = on_row_frame
        self._zygote: Helper | None = None
        self._num_forks = 0
        self.is_closing = self._has_ended = False
        self._owner = os.getpid()

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
            # An interrupt would leave a worker that nobody ends.
            with uninterrupted():
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
        # An interrupt would leave it a user that never closes it.
        with uninterrupted():
            self._zygote = helper_for(self, self.options, self.blueprint.preload)
        self._zygote.wait_ready()
        for name, why in self._zygote.failed_preloads.items():
            log.info(
                "preload of %s failed (%s); workers import what they need",
                name,
                why,
            )
        if self._zygote.num_threads > 1 and self.options.start_method != "spawn":
            log.info(
                "a preloaded module started threads: workers are exec'd instead of forked"
            )

    def _make_process(self, worker_id: int, generation: int) -> WorkerProcess:
        """Return a process for a worker, which is not started yet.

        Raises:
            WorkerLost: the system refuses its socket.
        """
        info = WorkerInfo(
            worker_id=worker_id,
            generation=generation,
            num_workers=len(self._variables),
            env_ids=self.blueprint.blocks[worker_id],
        )
        with refusals_as_loss(info):
            return self._process_type(info, self._on_row_frame, self._zygote)

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
        process = self._make_process(worker_id, generation)
        try:
            with refusals_as_loss(process.info):
                process.open_log()
                self._begin(process)
            return process
        except BaseException:
            process.kill()
            process.release()
            raise

    def _begin(self, process: WorkerProcess) -> None:
        worker_id = process.worker_id
        index = worker_id % len(self._variables)
        env_ids = self.blueprint.blocks[worker_id]
        start = self.blueprint.starts[env_ids[0]] if self.blueprint.starts else None
        config = worker_config(self.options, worker_id)
        config["caller"] = {
            **self._surroundings,
            "environ": {**self._surroundings["environ"], **self._variables[index]},
            "name": f"envherd-worker-{worker_id}",
        }
        if start is not None:
            start(config)
        self._start_process(process, config)
        process.gpu = self._gpus[index]
        build = messages.Build(
            worker=process.info,
            first_worker_id=numbering.first_worker_id,
            calls={i: self.blueprint.calls[i].sent for i in env_ids},
            root_seed=self.equipment.seed.root_seed,
            block=self.options.for_block(),
        )
        process.root_seed = build.root_seed
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

    def collect_specs(
        self,
        worker_id: int,
        is_over: Callable[[], bool] = lambda: False,
    ) -> list[EnvSpec]:
        """Wait until a worker has built its envs; return their specs.

        Args:
            worker_id: of the worker.
            is_over: returns whether nobody wants them any more.
        """
        worker = self.workers[worker_id]
        frame = await_frame(
            worker,
            "build",
            self.options.build_timeout_s,
            is_over=is_over,
        )
        if frame["kind"] == "fault":
            raise factory_error(
                frame,
                worker,
                self.blueprint.equal_call_before(frame["env_id"], worker_id),
            )
        self.envs_in_python += [
            why for why in frame["why_python"] if why not in self.envs_in_python
        ]
        return [
            EnvSpec.from_plain(frame["specs"][str(env_id)])
            for env_id in self.blueprint.blocks[worker_id]
        ]

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
            self.workers[worker_id] = copy or self._launch(
                worker_id,
                old.generation + 1,
            )
            # By another thread, which may have ended the old worker instead.
            if self.is_closing:
                self.workers[worker_id].kill()
                self.workers[worker_id].release()

    def fork(
        self,
        source_id: int,
        worker_id: int,
        copies: list[WorkerProcess],
    ) -> None:
        """Make a worker fork itself. The copy is for the place of another worker, and waits for `replace` and `attach`.

        Args:
            source_id: of the worker.
            worker_id: whose place the copy is for.
            copies: the copy is appended before it exists, so that it can be released after an interrupt.

        Raises:
            ValueError: the worker cannot be forked.
            WorkerLost: the worker or the copy died, or the system refuses the copy or what it needs.
            WorkerTimeout: the worker was late and was killed.
        """
        source = self.workers[source_id]
        zygote = self._zygote
        assert zygote is not None
        with uninterrupted():
            copy = self._make_process(worker_id, self.workers[worker_id].generation + 1)
            copies.append(copy)
            with refusals_as_loss(copy.info):
                copy.open_log()
        copy.gpu = source.gpu
        copy.root_seed = self.equipment.seed.root_seed
        self._num_forks += 1
        # Negative, because questions have positive ones.
        number = -self._num_forks
        message = messages.Branch(
            worker=copy.info,
            config=worker_config(self.options, worker_id),
            number=number,
        )

        def fork(sock: int, log: int) -> int:
            mail(source, message, [sock, log])
            frame = await_frame(source, "branch", self.options.build_timeout_s, number)
            if frame["why"]:
                raise not_forked(source, frame["why"])
            return zygote.adopt(frame["pid"], copy.log_fd)

        with refusals_as_loss(copy.info):
            copy.start(fork)

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
                self.dismiss(self.workers, timeout_s)
        finally:
            with uninterrupted():
                try:
                    self._end()
                except BaseException:
                    # What is left: each part may be repeated.
                    self._end()
                    raise

    def _end(self) -> None:
        """Kill the workers, and release all that the crew holds."""
        # All before the first wait, so that their ends take one time together.
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.wait_exit(1.0)
            worker.release()
        if self._zygote is not None:
            self._zygote.close(self)
        self.equipment.close()
        self._has_ended = True

    def dismiss(self, workers: list[WorkerProcess], timeout_s: float) -> None:
        """Make workers close their envs and exit within `timeout_s`; those that take longer are left running."""
        end = time.monotonic() + timeout_s
        for worker in workers:
            with ignoring_refusals():
                worker.channel.queue_message(messages.Close())
                worker.wake()
                worker.channel.flush_nowait()
        left = [worker for worker in workers if not worker.has_exited()]
        while left and (remaining_s := end - time.monotonic()) > 0:
            # Their messages are read meanwhile, as a full socket would block their exit.
            left[0].wait_for_any(left, remaining_s)
            for worker in list(left):
                # Before its messages are read: what it wrote before its end is there by then.
                has_exited = worker.has_exited()
                with uninterrupted(), contextlib.suppress(Exception):
                    drain(worker)
                if has_exited:
                    left.remove(worker)
        for worker in workers:
            with uninterrupted(), contextlib.suppress(Exception):
                for frame in drain(worker):
                    if frame["kind"] == "fault" and frame["phase"] == "close":
                        log_close_fault(frame)
