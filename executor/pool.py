"""The pool: workers that are given commands and waited for.

Guarantees:
- A command is announced only after its rows are complete, and an answer is read only after its number
  has come. An interrupt or a timeout at any instant leaves numbers that tell what is outstanding.
- A worker's death is noticed within `_LOOK_S` while anybody waits; nobody spins without bound.
- After a loss the other workers go on and their rows are whole.
Assumes: one caller at a time.
"""

from __future__ import annotations

import contextlib
import logging
import select
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envherd.executor.lifecycle import WorkerProcess, Zygote, worker_config
from envherd.executor.options import ExecutorOptions
from envherd.shm.segment import Segment
from envherd.shm.slab import Slab, SlabPlan, StoragePlan, plan_slab
from envherd.shm.specs import EnvSpec
from envherd.shm.sync import Doorbell
from envherd.workers import messages
from envherd.workers.errors import EnvError, EnvherdError, FactoryError, InternalError, WorkerLost, WorkerTimeout
from envherd.workers.protocol import Op, describe_phase, pack

log = logging.getLogger("envherd")

#: Seconds between looks at the workers' pidfds while waiting: bounds how late a death is noticed.
_LOOK_S = 0.02


@dataclass(frozen=True)
class Blueprint:
    """What a pool is made of.

    Attributes:
        factories: one pickled factory per env.
        env_kwargs: keyword arguments of each call.
        blocks: env ids of each worker: contiguous, ascending, none empty.
        root_seed: see `workers.seeding`.
        preload: modules for the zygote to import.
    """

    factories: tuple[bytes, ...]
    env_kwargs: tuple[dict[str, Any], ...]
    blocks: tuple[tuple[int, ...], ...]
    root_seed: int
    preload: tuple[str, ...] = ()


@dataclass
class Outcome:
    """What happened besides the rows, since it was last asked.

    Attributes:
        faults: env id -> fault message (what an env raised).
        side: env id -> side values message.
        losses: worker id -> the error that describes its loss.
    """

    faults: dict[int, dict[str, Any]] = field(default_factory=dict)
    side: dict[int, dict[str, Any]] = field(default_factory=dict)
    losses: dict[int, EnvherdError] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.faults or self.side or self.losses)


class WorkerPool:
    """Worker processes over one slab; `start` brings it up, `close` takes it down."""

    def __init__(self, blueprint: Blueprint, options: ExecutorOptions) -> None:
        self.blueprint = blueprint
        self.options = options
        self.num_envs = len(blueprint.factories)
        self.num_workers = len(blueprint.blocks)
        self.root_seed = blueprint.root_seed
        self.worker_of = np.repeat(np.arange(self.num_workers), [len(b) for b in blueprint.blocks])
        self.lost: dict[int, EnvherdError] = {}
        self.num_losses = 0
        self.outcome = Outcome()
        self.workers: list[WorkerProcess] = []
        self._restarts: list[list[float]] = [[] for _ in blueprint.blocks]
        self._rebuilding: set[int] = set()
        self._storages: dict[int, tuple[StoragePlan, Segment]] = {}
        self._number = 0
        self._inbox: list[list[dict[str, Any]]] = [[] for _ in blueprint.blocks]
        self._zygote: Zygote | None = None
        self.specs: list[EnvSpec] = []

    # ---- start -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the workers, build the envs in them, and set `specs`, `plan` and `slab`.

        Raises:
            FactoryError: a factory raised or returned no env; nothing is left running.
            WorkerLost, WorkerTimeout: a worker died or was late; nothing is left running.
        """
        try:
            self._zygote = Zygote(self.options, list(self.blueprint.preload))
            self._zygote.wait_ready()
            self._log_preload(self._zygote)
            for worker_id in range(self.num_workers):
                self.workers.append(self._launch(worker_id, generation=0))
            self.specs = [spec for worker_id in range(self.num_workers) for spec in self._collect_specs(worker_id)]
            self._make_slab()
            for worker_id in range(self.num_workers):
                self._attach(worker_id)
        except BaseException:
            self.close(timeout_s=0)
            raise

    def _log_preload(self, zygote: Zygote) -> None:
        for name, why in zygote.failed_preloads.items():
            log.info("preload of %s failed (%s); workers will import what they need", name, why)
        if zygote.num_threads > 1 and self.options.start_method != "spawn":
            log.info("a preloaded module started threads: workers are exec'd instead of forked")

    def _launch(self, worker_id: int, generation: int) -> WorkerProcess:
        assert self._zygote is not None
        process = WorkerProcess(worker_id, generation, self._zygote, worker_config(self.options, worker_id))
        env_ids = self.blueprint.blocks[worker_id]
        build = messages.Build(
            worker_id=worker_id,
            env_ids=env_ids,
            factories=tuple(self.blueprint.factories[i] for i in env_ids),
            env_kwargs=tuple(self.blueprint.env_kwargs[i] for i in env_ids),
            root_seed=self.root_seed,
            isolate_rng=self.options.isolate_rng,
            check_finite=self.options.check_finite,
            pickle_replies=self.options.pickle_replies,
        )
        with contextlib.suppress(BrokenPipeError, ConnectionError):  # its death is noticed when it is waited for
            process.channel.send_message(build)
        return process

    def _collect_specs(self, worker_id: int) -> list[EnvSpec]:
        frame = self._await_frame(worker_id, "build", self.options.build_timeout_s)
        if frame["kind"] == "fault":
            worker = self.workers[worker_id]
            is_ours = frame["type_name"] in ("FactoryError", "SpecError")
            said = frame["message"] if is_ours else f"the factory raised {frame['type_name']}: {frame['message']}"
            raise FactoryError(
                f"make_env failed: {said} (env {frame['env_id']}, worker {worker_id}, pid {worker.pid}, phase build).",
                remote_traceback=frame["traceback"],
                env_ids=(frame["env_id"],),
                worker_id=worker_id,
                pid=worker.pid,
                phase="build",
            )
        specs = frame["specs"]
        return [EnvSpec.from_plain(specs[str(env_id)]) for env_id in self.blueprint.blocks[worker_id]]

    def _make_slab(self) -> None:
        self.plan: SlabPlan = plan_slab(self.specs, self.num_workers, self.options.ring_frames)
        self._segment = Segment.create(self.plan.nbytes, "envherd-slab")
        buffer = self._segment.array()
        self.slab = Slab(self.plan, buffer)
        self._done = Doorbell.create(buffer, self.plan.bells_offset)
        self._go = [Doorbell.create(buffer, self.plan.go_offset(w)) for w in range(self.num_workers)]
        self._rings = [bell.ring for bell in self._go]
        words = self.slab.words
        self._command, self._command_seq = words["command"], words["command_seq"]
        self._reply_seq, self._status = words["reply_seq"], words["status"]

    def _attach(self, worker_id: int) -> None:
        message = messages.Attach(plan=self.plan, nbytes=self._segment.nbytes, name=self._segment.name)
        fds = [self._segment.fd] if self._segment.fd >= 0 else []
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            self.workers[worker_id].channel.send_message(message, fds)
        self._await_frame(worker_id, "attach", self.options.build_timeout_s)
        for target, (plan, segment) in self._storages.items():
            self._send_storage(worker_id, target, plan, segment)

    # ---- commands ----------------------------------------------------------------------------

    def submit_all(self, op: Op, target: int, column: int) -> None:
        """Give every env the same command."""
        self._revive(range(self.num_workers))
        self._number += 1
        self._command[:] = pack(op, target, column)
        self._command_seq[:] = self._number
        for ring in self._rings:
            ring()

    def submit(self, env_ids: np.ndarray, op: Op, target: int, columns: np.ndarray, flags: int = 0) -> None:
        """Give some envs a command each, at columns of their own.

        Args:
            env_ids: int `[k]`, no duplicates.
            op: for all of them.
            target: see `workers.protocol`.
            columns: int `[k]`.
            flags: see `workers.protocol.Flag`.
        """
        worker_ids = np.unique(self.worker_of[env_ids]).tolist()
        self._revive(worker_ids)
        self._number += 1
        self._command[env_ids] = [pack(op, target, column, flags) for column in columns.tolist()]
        self._command_seq[env_ids] = self._number
        for worker_id in worker_ids:
            self._rings[worker_id]()

    def submit_later(self, env_ids: np.ndarray, op: Op, target: int, columns: np.ndarray, flags: int = 0) -> None:
        """As `submit`, for envs of a worker that is being rebuilt: its successor finds the commands when it comes."""
        self._number += 1
        self._command[env_ids] = [pack(op, target, column, flags) for column in columns.tolist()]
        self._command_seq[env_ids] = self._number

    def outstanding(self) -> np.ndarray:
        """Return the env ids that owe an answer, int `[k]`."""
        return np.flatnonzero(self._command_seq != self._reply_seq)

    def is_idle(self) -> bool:
        """Return whether no env owes an answer."""
        return self._command_seq.tobytes() == self._reply_seq.tobytes()

    def wait_all(self, timeout_s: float | None) -> None:
        """Wait for every outstanding answer; what else happened is in `outcome`.

        Args:
            timeout_s: seconds; a worker that is late is killed and its loss is a `WorkerTimeout`.
        """
        wait = self._done.wait
        for _ in range(self.num_workers):
            if self.is_idle() or not wait(_LOOK_S):
                break
        if not self.is_idle():
            self._wait_slowly(np.arange(self.num_envs), self.num_envs, timeout_s, kill_late=True)
        self._collect()

    def wait_some(self, env_ids: np.ndarray, count: int, timeout_s: float | None, *, kill_late: bool = True) -> np.ndarray:
        """Wait until at least `count` of some envs have answered; return those that have, oldest command first.

        Args:
            env_ids: int `[k]`, which envs.
            count: at most `k`.
            timeout_s: seconds; None waits for ever.
            kill_late: whether a worker that is late is killed (a `WorkerTimeout` in `outcome`), or the
                wait just ends with fewer.
        """
        ready = self._ready(env_ids)
        if len(ready) < count:
            self._wait_slowly(env_ids, count, timeout_s, kill_late=kill_late)
            ready = self._ready(env_ids)
        self._collect()
        return ready[np.argsort(self._command_seq[ready], kind="stable")]

    def _ready(self, env_ids: np.ndarray) -> np.ndarray:
        return env_ids[self._command_seq[env_ids] == self._reply_seq[env_ids]]

    def _wait_slowly(self, env_ids: np.ndarray, count: int, timeout_s: float | None, *, kill_late: bool) -> None:
        """Wait token by token, looking around whenever none comes."""
        began = time.monotonic()
        end = None if timeout_s is None else began + timeout_s
        stall_at = began + self.options.stall_log_s
        while len(self._ready(env_ids)) < count:
            left = _LOOK_S if end is None else min(_LOOK_S, end - time.monotonic())
            if left > 0 and self._done.wait(left):
                continue
            self._look_around()
            now = time.monotonic()
            if end is not None and now >= end:
                if kill_late:
                    self._give_up_late(timeout_s or 0.0)
                return
            if end is None and now >= stall_at:
                stall_at = now + self.options.stall_log_s
                self._log_stall(now - began)

    def _look_around(self) -> None:
        """Notice deaths and successors, and read what workers have written so that none blocks on a full socket."""
        for worker_id in list(self._rebuilding):
            self._drain(worker_id)
            if self._inbox[worker_id] or self.workers[worker_id].has_exited():
                self._finish_restart(worker_id)
                self._rings[worker_id]()
        for worker_id in set(self.worker_of[self.outstanding()].tolist()):
            self._drain(worker_id)
            if worker_id in self._rebuilding or worker_id in self.lost:
                continue
            if self.workers[worker_id].has_exited():
                self._drain(worker_id)
                self._declare_lost(worker_id, self._death(worker_id))

    def _give_up_late(self, timeout_s: float) -> None:
        for worker_id in sorted(set(self.worker_of[self.outstanding()].tolist())):
            worker = self.workers[worker_id]
            phase, env_id = describe_phase(int(self.slab.words["phase"][worker_id]))
            stack = worker.stack()
            worker.kill()
            worker.wait_exit(1.0)
            env_ids = self.blueprint.blocks[worker_id]
            error = WorkerTimeout(
                f"{phase} failed: worker {worker_id} gave no answer within {timeout_s:g} s and was killed "
                f"(env {env_id}, envs {_span(env_ids)}, pid {worker.pid}, generation {worker.generation}). "
                f"Raise ExecutorOptions.{phase}_timeout_s if the env may take so long.",
                remote_traceback=stack,
                env_ids=env_ids,
                env_id=env_id,
                worker_id=worker_id,
                pid=worker.pid,
                generation=worker.generation,
                phase=phase,
            )
            self._declare_lost(worker_id, error)

    def _log_stall(self, waited_s: float) -> None:
        for worker_id in sorted(set(self.worker_of[self.outstanding()].tolist())):
            phase, env_id = describe_phase(int(self.slab.words["phase"][worker_id]))
            stack = self.workers[worker_id].stack()
            log.warning("worker %d has been in %s of env %s for %.0f s:\n%s", worker_id, phase, env_id, waited_s, stack)

    def _death(self, worker_id: int, phase: str | None = None) -> WorkerLost:
        worker = self.workers[worker_id]
        env_id = None
        if phase is None:
            phase, env_id = describe_phase(int(self.slab.words["phase"][worker_id]))
        env_ids = self.blueprint.blocks[worker_id]
        how = worker.exit_description()
        hint = "Often out-of-memory: see the memory of each worker in statistics()." if "SIGKILL" in how else ""
        lines = worker.last_lines()
        return WorkerLost(
            f"{phase} failed: worker {worker_id} ended with {how} (envs {_span(env_ids)}, pid {worker.pid}, "
            f"generation {worker.generation}). {hint} ExecutorOptions(on_worker_loss='restart') would replace it."
            + (f"\nIts last output:\n{lines}" if lines else ""),
            remote_traceback=lines or None,
            env_ids=env_ids,
            env_id=env_id,
            worker_id=worker_id,
            pid=worker.pid,
            generation=worker.generation,
            phase=phase,
            exit_code=worker.exit_code(),
        )

    def _declare_lost(self, worker_id: int, error: EnvherdError) -> None:
        """Take a worker out of service: its words are the parent's now."""
        self.num_losses += 1
        self.lost[worker_id] = error
        self.outcome.losses[worker_id] = error
        self.workers[worker_id].kill()
        env_ids = list(self.blueprint.blocks[worker_id])
        self._reply_seq[env_ids] = self._command_seq[env_ids]
        self._status[env_ids] = 0

    # ---- answers that are not rows -----------------------------------------------------------

    def _collect(self) -> None:
        """Read the messages that the status words announce into `outcome`."""
        if not np.count_nonzero(self._status):
            return
        for worker_id in set(self.worker_of[np.flatnonzero(self._status)].tolist()):
            self._drain(worker_id)
        self._status[self._ready(np.arange(self.num_envs))] = 0

    def _drain(self, worker_id: int) -> None:
        for frame in self.workers[worker_id].channel.drain_nowait():
            self._take(worker_id, frame)

    def _take(self, worker_id: int, frame: dict[str, Any]) -> None:
        kind = frame["kind"]
        if kind == "fault" and frame["phase"] in ("reset", "step"):
            self.outcome.faults[frame["env_id"]] = frame
        elif kind == "side":
            self.outcome.side[frame["env_id"]] = frame
        elif kind == "notice":
            self._log_notice(frame)
        else:
            self._inbox[worker_id].append(frame)

    def _log_notice(self, frame: dict[str, Any]) -> None:
        log.warning(
            "env %d drew from the global generators (%s) during %s: its data depend on which envs share its worker. "
            "ExecutorOptions(isolate_rng=True) makes them reproducible.",
            frame["env_id"], ", ".join(frame["generators"]), frame["phase"],
        )  # fmt: skip

    def take_outcome(self) -> Outcome:
        """Return what happened since the last call, and forget it."""
        outcome, self.outcome = self.outcome, Outcome()
        return outcome

    def _await_frame(self, worker_id: int, phase: str, timeout_s: float | None) -> dict[str, Any]:
        """Wait for a worker's next frame that is not about rows.

        Raises:
            WorkerLost: it died instead.
            WorkerTimeout: it was late, and was killed.
        """
        worker = self.workers[worker_id]
        end = None if timeout_s is None else time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(worker.channel.sock, select.POLLIN)
        poller.register(worker.pidfd, select.POLLIN)
        while not self._inbox[worker_id]:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not poller.poll(None if left is None else left * 1000 + 1) and end is not None:
                raise self._late(worker, phase, timeout_s or 0.0)
            self._drain(worker_id)
            if not self._inbox[worker_id] and worker.has_exited():
                self._drain(worker_id)
                if not self._inbox[worker_id]:
                    raise self._death(worker_id, phase)
        return self._inbox[worker_id].pop(0)

    def _late(self, worker: WorkerProcess, phase: str, timeout_s: float) -> WorkerTimeout:
        stack = worker.stack()
        worker.kill()
        env_ids = self.blueprint.blocks[worker.worker_id]
        return WorkerTimeout(
            f"{phase} failed: worker {worker.worker_id} gave no answer within {timeout_s:g} s and was killed "
            f"(envs {_span(env_ids)}, pid {worker.pid}, generation {worker.generation}).",
            remote_traceback=stack,
            env_ids=env_ids,
            worker_id=worker.worker_id,
            pid=worker.pid,
            phase=phase,
        )

    # ---- mail --------------------------------------------------------------------------------

    def mail(self, worker_id: int, message: messages.Message, fds: list[int] | None = None) -> None:
        """Send a message to a worker that serves commands; its turn comes before any later command."""
        with contextlib.suppress(BrokenPipeError, ConnectionError):  # a death is noticed where it matters
            self.workers[worker_id].channel.send_message(message, fds)
            self.slab.words["mail_seq"][worker_id] += 1
            self._rings[worker_id]()

    def prepare(self, message: messages.Prepare) -> None:
        """Send the extras of an env's next command ahead of it."""
        worker_id = int(self.worker_of[message.env_id])
        self._revive([worker_id])
        self.mail(worker_id, message)

    def seed(self, root_seed: int) -> None:
        """Use a new root seed in every worker."""
        self.root_seed = root_seed
        self._revive(range(self.num_workers))
        for worker_id in range(self.num_workers):
            self.mail(worker_id, messages.Seed(root_seed=root_seed))
        self.ask("seeded", list(range(self.num_workers)))

    def ask(self, what: str, worker_ids: Iterable[int] | None = None, **question: Any) -> dict[int, Any]:
        """Ask envs for something that is not a step; see `messages.Ask`.

        Args:
            what: see `messages.Ask`; "seeded" just waits until earlier mail was read.
            worker_ids: ask all envs of these workers.
            **question: `env_ids` (instead of `worker_ids`), `name`, `args`, `kwargs`.

        Returns:
            env id -> value as it crossed (`{"plain": ...}` or `{"pickled": ...}`).

        Raises:
            WorkerLost: a worker died; the others have answered.
        """
        env_ids = question.pop("env_ids", None)
        if env_ids is None:
            wanted = range(self.num_workers) if worker_ids is None else worker_ids
            env_ids = [i for w in wanted for i in self.blueprint.blocks[w]]
        by_worker: dict[int, list[int]] = {}
        for env_id in env_ids:
            by_worker.setdefault(int(self.worker_of[env_id]), []).append(env_id)
        self._revive(by_worker)
        args = question.pop("args", ())
        for worker_id, ids in by_worker.items():
            own = tuple(args[env_ids.index(i)] for i in ids) if what in ("set", "load_state_dict") else args
            name = "unwrapped" if what == "seeded" else question.get("name", "")
            asked = () if what == "seeded" else tuple(ids)
            kwargs = question.get("kwargs", {})
            self.mail(worker_id, messages.Ask(what=what, env_ids=asked, name=name, args=own, kwargs=kwargs))
        return self._answers(by_worker, what)

    def _answers(self, by_worker: dict[int, list[int]], what: str) -> dict[int, Any]:
        values: dict[int, Any] = {}
        fault: dict[str, Any] | None = None
        loss: EnvherdError | None = None
        for worker_id, ids in by_worker.items():
            try:
                frame = self._await_frame(worker_id, what, self.options.reset_timeout_s)
            except (WorkerLost, WorkerTimeout) as error:
                self._declare_lost(worker_id, error)
                loss = loss or error
                continue
            if frame["kind"] == "fault":
                fault = fault or frame
            elif ids:
                values.update(zip(ids, frame["values"], strict=False))
        if loss is not None:
            raise loss
        if fault is not None:
            raise env_error([fault], self)
        return values

    # ---- rollout storages --------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Segment:
        """Return memory for a rollout storage; its pages are touched by the workers that write them."""
        return Segment.create(nbytes, "envherd-rollout", is_prefaulted=False)

    def attach_storage(self, target: int, plan: StoragePlan, segment: Segment) -> None:
        """Have every worker map a rollout storage as `target`."""
        self._revive(range(self.num_workers))
        self._storages[target] = (plan, segment)
        for worker_id in range(self.num_workers):
            self._send_storage(worker_id, target, plan, segment)

    def _send_storage(self, worker_id: int, target: int, plan: StoragePlan, segment: Segment) -> None:
        fds = [segment.fd] if segment.fd >= 0 else []
        message = messages.AttachStorage(target=target, plan=plan, nbytes=segment.nbytes, name=segment.name)
        self.mail(worker_id, message, fds)

    def detach_storage(self, target: int) -> None:
        """Have every worker forget a rollout storage."""
        self._storages.pop(target)[1].close()
        for worker_id in range(self.num_workers):
            if worker_id not in self.lost:
                self.mail(worker_id, messages.DetachStorage(target=target))

    def worker_output(self, worker_id: int) -> str:
        """Return what a worker has printed, as far as it is kept."""
        return self.workers[worker_id].log()

    def pid_of(self, worker_id: int) -> int:
        """Return a worker's process id."""
        return self.workers[worker_id].pid

    def generation_of(self, worker_id: int) -> int:
        """Return how often a worker was replaced."""
        return self.workers[worker_id].generation

    # ---- losses and the end ------------------------------------------------------------------

    def begin_restart(self, worker_id: int) -> None:
        """Start a successor of a lost worker; it builds its envs while others go on.

        Raises:
            WorkerLost: too many restarts within the window (a crash loop).
        """
        now = time.monotonic()
        recent = [t for t in self._restarts[worker_id] if now - t < self.options.restart_window_s]
        if len(recent) >= self.options.max_restarts:
            raise self.lost[worker_id]
        self._restarts[worker_id] = [*recent, now]
        old = self.workers[worker_id]
        old.wait_exit(1.0)
        old.release()
        self._inbox[worker_id].clear()
        words = self.slab.words
        words["mail_seq"][worker_id] = 0
        words["phase"][worker_id] = 0
        while self._go[worker_id].try_wait():
            pass
        self.workers[worker_id] = self._launch(worker_id, old.generation + 1)
        self._rebuilding.add(worker_id)
        del self.lost[worker_id]

    def _revive(self, worker_ids: Iterable[int]) -> None:
        """Make sure that workers are in service before they are given something to do.

        Raises:
            WorkerLost, WorkerTimeout: a worker is lost and stays so.
        """
        if not (self.lost or self._rebuilding):
            return
        for worker_id in worker_ids:
            if worker_id in self.lost:
                raise self.lost[worker_id]
            if worker_id in self._rebuilding:
                self._finish_restart(worker_id)

    def _finish_restart(self, worker_id: int) -> None:
        self._rebuilding.discard(worker_id)
        try:
            specs = self._collect_specs(worker_id)
            for env_id, spec in zip(self.blueprint.blocks[worker_id], specs, strict=True):
                if spec != self.specs[env_id]:
                    raise InternalError(f"env {env_id} came back with another spec: {self.specs[env_id].difference(spec)}")
            self._attach(worker_id)
        except EnvherdError as error:
            self._declare_lost(worker_id, error)
            self.take_outcome()
            self.begin_restart(worker_id)
            self._finish_restart(worker_id)

    def close(self, timeout_s: float | None = None) -> None:
        """Close the envs and end the workers within `timeout_s` in all (default: the option's). Never raises."""
        budget = self.options.close_timeout_s if timeout_s is None else timeout_s
        end = time.monotonic() + budget
        if budget > 0:
            self._ask_to_close(end)
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.wait_exit(1.0)
            worker.release()
        if self._zygote is not None:
            self._zygote.close()
        for _, segment in self._storages.values():
            segment.close()
        segment_ = getattr(self, "_segment", None)
        if segment_ is not None:
            segment_.close()

    def _ask_to_close(self, end: float) -> None:
        for worker in self.workers:
            with contextlib.suppress(OSError, AttributeError):
                if hasattr(self, "slab") and worker.worker_id not in self._rebuilding:
                    self.mail(worker.worker_id, messages.Close())
                else:
                    worker.channel.send_message(messages.Close())
        for worker in self.workers:
            worker.wait_exit(max(0.0, end - time.monotonic()))
            with contextlib.suppress(Exception):
                for frame in worker.channel.drain_nowait():
                    if frame["kind"] == "fault":
                        log.warning("closing env %d raised %s: %s", frame["env_id"], frame["type_name"], frame["message"])


def env_error(faults: Sequence[dict[str, Any]], pool: Any) -> EnvError:
    """Return the exception for what envs raised: about the first, naming the others."""
    fault = min(faults, key=lambda one: one["env_id"])
    env_id = fault["env_id"]
    worker_id = int(pool.worker_of[env_id])
    pid = pool.pid_of(worker_id)
    others = sorted(one["env_id"] for one in faults if one is not fault)
    also = f" Envs {others} raised too." if others else ""
    return EnvError(
        f"{fault['phase']} failed: the env raised {fault['type_name']}: {fault['message']} "
        f"(env {env_id}, worker {worker_id}, pid {pid}).{also} The other envs go on; reset this one to use it again.",
        remote_traceback=fault["traceback"],
        env_ids=(env_id, *others),
        worker_id=worker_id,
        pid=pid,
        phase=fault["phase"],
        type_name=fault["type_name"],
    )


def _span(env_ids: Sequence[int]) -> str:
    return f"{env_ids[0]}-{env_ids[-1]}" if len(env_ids) > 1 else str(env_ids[0])
