"""The base of pools: of `WorkerPool`, `PortablePool` and `SerialPool`.

Terms: an env *owes an answer* from when it is given a command until the command is carried out, its rows are written,
and the env is counted as answered. Env ids are int64 `[k]` without duplicates, columns int64 `[k]`.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.commands import CommandWords, Outcome
from envherd.executor.sending.blueprint import Blueprint
from envherd.shm.segment import PrivateView
from envherd.shm.slab import Slab, SlabPlan, StoragePlan, plan_slab
from envherd.shm.specs import EnvSpec
from envherd.workers import messages, native
from envherd.workers.errors import EnvherdError
from envherd.workers.info_rows import Schema
from envherd.workers.processes import cpu_ns, cpu_of, memory_of
from envherd.workers.protocol import Op


class WorkerFigures(NamedTuple):
    """The operating system's figures of a worker process; zeros if it has ended.

    Attributes:
        uss_bytes: private memory.
        pss_bytes: the same plus its part of shared memory.
        cpu_s: processor seconds, user and system.
        cpu: the processor that it runs on, or ran on last; None if unknown.
        gpu: that `ExecutorOptions.gpus` has given it.
    """

    uss_bytes: int
    pss_bytes: int
    cpu_s: float
    cpu: int | None
    gpu: str | None = None

    @classmethod
    def of(
        cls,
        pid: int,
        gpu: str | None = None,
        *,
        is_alone: bool = False,
    ) -> "WorkerFigures":
        """Read the figures of a process, with the memory of its descendants unless `is_alone`."""
        memory = memory_of(pid, is_alone=is_alone)
        return cls(memory["uss"], memory["pss"], cpu_ns(pid) / 1e9, cpu_of(pid), gpu)


def refuse_batches(specs: Sequence[EnvSpec], options: ExecutorOptions) -> None:
    """Raise ValueError if exceptions are to end episodes of envs that are batches: they would end those of all rows."""
    batched = next((spec for spec in specs if spec.batch_shape), None)
    if batched is not None:
        options.refuse_interrupts(
            f"making envs that are batches of rows ({batched.batch_shape})"
        )


class Pool(ABC):
    """Gives commands to envs and waits for their answers; one caller at a time.

    What is defined here is that of a pool which carries out every command at once, in this process.

    Attributes:
        blueprint: what it is made of; `blueprint.blocks[worker_id]` are the env ids of a worker.
        num_envs: N.
        num_workers: worker processes; 0 if the envs run in the caller's.
        worker_of: int `[N]`, the worker of each env.
        specs: one per env.
        plan: of the slab.
        slab: inputs, rows and words of all envs.
        options: of the executor.
        words: commands and answers of all envs; the engine writes to `answers_lost`.
        outcome: reports besides the rows, until they are handed out.
        why_python: why commands cannot be given to it in C, in words for users; empty if they can.
        envs_in_python: why its envs are called by the loop in Python, in words for users; empty if none is.
        absent: workers that do not serve; C may give commands only while it is empty.
        lost: worker id -> the error that describes its loss, for workers that are out of service.
        serve: carries out commands that were written; None if workers do so.
        is_recyclable: whether the engine can replace its workers between episodes.
        num_losses, num_recycled: workers that were lost, and that were replaced between episodes, ever.
        holds_storages: whether the pool keeps the memory of a rollout storage until that is detached.
        lendable: a private view of the slab's lendable frames; None for none.
        resets_before_start: of a recyclable pool: resets of an env of each worker before its present process was
            started, int64 `[workers]`.
    """

    num_workers: int
    worker_of: np.ndarray
    specs: list[EnvSpec]
    plan: SlabPlan
    slab: Slab
    words: CommandWords
    lost: Mapping[int, EnvherdError]
    resets_before_start: np.ndarray
    envs_in_python: Sequence[str] = ()
    absent: Collection[int] = ()
    serve: Callable[[], None] | None = None
    is_recyclable = False
    num_losses = num_recycled = 0
    holds_storages = False
    lendable: PrivateView | None = None
    _caller: Any = None  # gives commands and waits in C; None if Python must do it

    def __init__(self, blueprint: Blueprint, options: ExecutorOptions) -> None:
        self.blueprint = blueprint
        self.options = options
        self.num_envs = len(blueprint.calls)
        self.why_python: Sequence[str] = native.why_not()
        self.outcome = Outcome()

    @property
    def schemas(self) -> Mapping[int, Schema]:
        """The schemas of infos in rows, by id; workers report further ones."""
        return self.outcome.schemas

    def _plan_slab(self, num_workers: int, *, lends: bool) -> SlabPlan:
        return plan_slab(
            self.specs,
            num_workers,
            self.options.num_frames,
            lends=lends,
            has_infos=self.options.info_policy != "drop",
        )

    # ---- commands ----------------------------------------------------------------------------

    def compile(self, facts: Mapping[str, Any]) -> Any:
        """Return `submit` and `wait_some` for steps in C, an `Exchange`; only if `why_python` is empty.

        Args:
            facts: the engine's arguments for `executor/native/exchange.c`.
        """
        module = native.load()
        return module.Exchange(
            {"caller": self._caller, "caller_type": module.Caller, **facts}
        )

    def must_look(self) -> bool:
        """Return whether a check of the workers is due, which `wait_some` makes."""
        return False

    @abstractmethod
    def submit(
        self,
        env_ids: np.ndarray,
        op: Op | np.ndarray,
        target: int,
        columns: np.ndarray | int,
        flags: int = 0,
    ) -> None:
        """Give each of some envs a command.

        Args:
            env_ids: which envs.
            op: for all of them, or int `[k]`.
            target: RING, or the number of a rollout storage.
            columns: of the target: int64 `[k]`, or an int for all of them.
            flags: of `workers.protocol.Flag`.

        Raises:
            WorkerLost, WorkerTimeout: a worker is lost and not replaced; no env was given the command.
        Blocks: until workers that are being replaced serve.
        """

    def submit_later(
        self,
        env_ids: np.ndarray,
        op: Op,
        target: int,
        columns: np.ndarray,
        flags: int = 0,
    ) -> None:
        """As `submit`, to complete the latest commands of envs that have failed to: they keep their place in the order.

        Envs of a worker that is being replaced get the commands in its successor. Never waits for that.
        """
        self.words.complete(env_ids)
        self.submit(env_ids, op, target, columns, flags)

    @abstractmethod
    def prepare(self, message: messages.Prepare) -> None:
        """Send the extras of an env's next command (side inputs, or a seed and options) ahead of it, or a factory call.

        Raises:
            WorkerLost, WorkerTimeout: its worker is lost and not replaced.
        """

    def send_calls(
        self,
        env_ids: Iterable[int],
        others: Blueprint | None = None,
    ) -> None:
        """Make workers close envs, and build new instances by a blueprint when they need them.

        Args:
            env_ids: they owe nothing, or only the answer that a new instance completes.
            others: the blueprint; None for the pool's own, by which successors of workers build.
        """
        for env_id in env_ids:
            if self.is_serving(int(self.worker_of[env_id])):
                self.prepare(
                    messages.Prepare(
                        env_id=env_id,
                        call=(others or self.blueprint).calls[env_id].sent,
                    )
                )

    def await_workers(self, env_ids: np.ndarray) -> None:  # noqa: B027  # envs in this process are always there
        """Make sure that some envs can be given commands, before anything is sent or changed for a call.

        Raises:
            WorkerLost, WorkerTimeout: one of their workers is lost and not replaced.
        """

    @abstractmethod
    def wake_workers(self) -> None:
        """After a call was broken off anywhere: announce commands that were written but not announced."""

    def was_given(self, env_ids: np.ndarray, since: int) -> np.ndarray:
        """Return which envs were given a command after the one of number `since`, bool `[k]`."""
        return np.asarray(self.words.command_seq[env_ids] > since)

    def show_path(self, path: str) -> None:  # noqa: B027  # nobody watches this process
        """Tell `envherd top` which calls are made in C: the text of `protocol.plain.Plain`."""

    # ---- answers -----------------------------------------------------------------------------

    def wait_some(
        self,
        env_ids: np.ndarray,
        count: int,  # noqa: ARG002
        timeout_s: float | None,  # noqa: ARG002
        more_for_resets_s: float | None = 0.0,  # noqa: ARG002
        *,
        kill_late: bool = True,  # noqa: ARG002
        through_losses: bool = False,  # noqa: ARG002
    ) -> np.ndarray:
        """Wait until at least `count` of some envs owe no answer; return these.

        Reports besides the rows are in `outcome`. Fewer are returned only after a loss that must be raised before the
        others have answered, or without `kill_late`.

        Args:
            env_ids: which envs.
            count: at most `k`.
            timeout_s: seconds, after which late workers are killed, which is a loss; None waits without a limit.
            more_for_resets_s: additional seconds for a worker that has begun a reset since.
            kill_late: kill workers that are late; False returns fewer envs instead.
            through_losses: wait for the others even long after a worker was lost.
        """
        return env_ids

    # ---- questions ---------------------------------------------------------------------------

    def ask(self, what: str, env_ids: list[int], **question: Any) -> dict[int, Any]:
        """Send envs a request of the kinds of `messages.Ask`, and wait for the answers.

        `args` of the request has one item per env for "set", "each" and "restore".

        Returns:
            env id -> value as received (`{"plain": ...}` or `{"pickled": ...}`).

        Raises:
            EnvError: an env raised.
            WorkerLost, WorkerTimeout: a worker died or was late; the others have answered.
        """
        return self.answers(self.question(what, env_ids, **question), what)

    def question(
        self,
        what: str,
        env_ids: list[int],
        **question: Any,
    ) -> dict[int, Any]:
        """Begin `ask` without waiting; return the argument for `has_answered` and `answers`."""
        return self.ask(what, env_ids, **question)

    def has_answered(self, asked: dict[int, Any]) -> bool:  # noqa: ARG002
        """Return whether `answers` would not block."""
        return True

    def answers(self, asked: dict[int, Any], what: str) -> dict[int, Any]:  # noqa: ARG002
        """Wait for the answers to the latest request; returns and raises as `ask`."""
        return asked

    @abstractmethod
    def seed(self, root_seed: int, episodes: Sequence[int] | None = None) -> None:
        """Use a new root seed.

        Args:
            root_seed: of all envs.
            episodes: the episode that the next reset of each env begins; None for episode 0 of all.

        Raises:
            WorkerLost, WorkerTimeout: a worker is lost and stays so.
        """

    # ---- memory ------------------------------------------------------------------------------

    @abstractmethod
    def attach_storage(
        self,
        target: int,
        plan: StoragePlan,
    ) -> Callable[[], np.ndarray]:
        """Create memory for a rollout storage, which commands can name as `target` from now on.

        Returns:
            A function that returns the bytes as uint8 `[nbytes]`, a new VIEW each time.

        Raises:
            WorkerLost, WorkerTimeout: a worker is lost and stays so.
        """

    @abstractmethod
    def detach_storage(self, target: int) -> None:
        """Forget a rollout storage; arrays over it keep its memory. May be repeated, as after an interrupt."""

    # ---- workers -----------------------------------------------------------------------------

    def begin_restart(self, worker_id: int) -> None:  # noqa: ARG002
        """Start a successor of a lost worker; it builds its envs while the other workers continue.

        Raises:
            WorkerLost, WorkerTimeout: too many restarts within the window, or no process can be started.
        """
        raise AssertionError("it has no workers")

    def worker_output(self, worker_id: int) -> str:  # noqa: ARG002
        """Return the kept part of a worker's output; envs in this process print to its console."""
        return ""

    def pid_of(self, worker_id: int) -> int:  # noqa: ARG002
        """Return a worker's process id."""
        return os.getpid()

    def gpu_of(self, worker_id: int) -> str | None:  # noqa: ARG002
        """Return the GPU that a worker was given (`ExecutorOptions.gpus`), or None."""
        return None

    def generation_of(self, worker_id: int) -> int:  # noqa: ARG002
        """Return how often a worker was replaced."""
        return 0

    @abstractmethod
    def figures(self) -> list[WorkerFigures]:
        """Return the figures of each worker, by worker id."""

    @abstractmethod
    def close(self, timeout_s: float | None = None) -> None:
        """Close the envs and end the workers within `timeout_s` (default: the option's). Idempotent, never raises."""

    # ---- workers that the engine replaces between episodes: of a recyclable pool -------------

    def is_serving(self, worker_id: int) -> bool:
        """Return whether a worker is neither lost nor being replaced."""
        return worker_id not in self.absent

    def memory_of(self, worker_id: int) -> int:
        """Return the bytes of private memory of a worker and its descendants."""
        raise NotImplementedError

    def recycle(self, worker_id: int, *, is_anew: bool) -> None:
        """Close the envs of a worker that owes nothing, and begin to replace it.

        Args:
            worker_id: of the worker.
            is_anew: its envs have just begun episodes, which its successor begins again.

        Raises:
            WorkerLost: no process can be started; the worker is lost.
        """
        raise NotImplementedError
