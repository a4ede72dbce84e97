"""The interface of a pool: `WorkerPool`, `PortablePool` and `SerialPool` implement it.

Terms: an env *owes an answer* from when it is given a command until the command is carried out, its rows are written,
and the env is counted as answered. Env ids are int64 `[k]` without duplicates, columns int64 `[k]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from envherd.executor.pools.capsules import CapsuleWriter
from envherd.executor.pools.command_words import CommandWords
from envherd.executor.pools.crew import Blueprint
from envherd.executor.pools.fast_commands import FastCommands, NativeExchange
from envherd.executor.pools.replies import Outcome
from envherd.shm.private_view import PrivateView
from envherd.shm.slab import Slab, SlabPlan, StoragePlan
from envherd.shm.specs import EnvSpec
from envherd.workers import messages
from envherd.workers.errors import EnvherdError
from envherd.workers.processes import cpu_ns, cpu_of, memory_of
from envherd.workers.protocol import Op


class WorkerFigures(NamedTuple):
    """The operating system's figures of a worker process; zeros if it has ended.

    Attributes:
        uss_bytes: private memory.
        pss_bytes: the same plus its part of shared memory.
        cpu_s: processor seconds, user and system.
        cpu: the processor that it runs on, or ran on last; None if unknown.
        gpu: that it was given; see `ExecutorOptions.gpus`.
    """

    uss_bytes: int
    pss_bytes: int
    cpu_s: float
    cpu: int | None
    gpu: str | None = None

    @classmethod
    def of(cls, pid: int, gpu: str | None = None, *, is_alone: bool = False) -> WorkerFigures:
        """Read the figures of a process, with the memory of its descendants unless `is_alone`."""
        memory = memory_of(pid, is_alone=is_alone)
        return cls(memory["uss"], memory["pss"], cpu_ns(pid) / 1e9, cpu_of(pid), gpu)


class StorageMemory(Protocol):
    """Memory of a rollout storage."""

    def array(self) -> np.ndarray:
        """Return the bytes as uint8 `[nbytes]`, a VIEW."""
        ...


class Pool(Protocol):
    """Gives commands to envs and waits for their answers; one caller at a time.

    Attributes:
        blueprint: what it is made of; `blueprint.blocks[worker_id]` are the env ids of a worker.
        num_envs: N.
        num_workers: worker processes; 0 if the envs run in the caller's.
        worker_of: int `[N]`, the worker of each env.
        specs: one per env.
        plan: of the slab.
        slab: inputs, rows and words of all envs.
        words: commands and answers of all envs; the engine writes to `answers_lost`.
        outcome: reports besides the rows, until they are handed out.
        has_waited: set if the next `wait_all` need not wait before it looks at the workers; `wait_all` clears it.
        holds_storages: whether the pool keeps the memory of a rollout storage until that is detached.
        lendable: a private view of the slab's lendable frames; None for none.
        capsules: writes crash capsules; None if the options ask for none.
    """

    blueprint: Blueprint
    num_envs: int
    num_workers: int
    worker_of: np.ndarray
    specs: list[EnvSpec]
    plan: SlabPlan
    slab: Slab
    words: CommandWords
    outcome: Outcome
    has_waited: bool
    holds_storages: bool
    lendable: PrivateView | None
    capsules: CapsuleWriter | None

    @property
    def why_python(self) -> Sequence[str]:
        """Why commands cannot be given to it in C, in words for users; empty if they can."""
        ...

    @property
    def envs_in_python(self) -> Sequence[str]:
        """Why its envs are called by the loop in Python, likewise."""
        ...

    @property
    def lost(self) -> Mapping[int, EnvherdError]:
        """Worker id -> the error that describes its loss, for workers that are out of service."""
        ...

    @property
    def num_losses(self) -> int:
        """Workers that were lost, ever."""
        ...

    @property
    def num_recycled(self) -> int:
        """Workers that were replaced between episodes, ever."""
        ...

    @property
    def recyclable(self) -> RecyclablePool | None:
        """This pool, if the engine can replace its workers between episodes; else None."""
        ...

    # ---- commands ----------------------------------------------------------------------------

    def submit_all(self, op: Op, target: int, column: int, reset_ids: np.ndarray | None = None) -> None:
        """Give every env the same command.

        Args:
            op: see `workers.protocol`.
            target: RING, or the number of a rollout storage.
            column: of the target.
            reset_ids: int `[k]`, envs that get a RESET at that column instead.

        Raises:
            WorkerLost, WorkerTimeout: a worker is lost and not replaced; no env was given the command.
        Blocks: until workers that are being replaced serve.
        """
        ...

    def compile(self) -> FastCommands:
        """Return `submit_all` and `wait_all` in C; only if `why_python` is empty."""
        ...

    def compile_exchange(self, facts: Mapping[str, Any]) -> NativeExchange:
        """Return `submit` and `wait_some` for steps in C; only of a pool with workers, if `why_python` is empty.

        Args:
            facts: the engine's arguments for `executor/native/exchange.c`.
        """
        ...

    def submit(
        self, env_ids: np.ndarray, op: Op | np.ndarray, target: int, columns: np.ndarray, flags: int = 0
    ) -> None:
        """Give each of some envs a command; otherwise as `submit_all`.

        Args:
            env_ids: which envs.
            op: for all of them, or int `[k]`.
            target: RING, or the number of a rollout storage.
            columns: of the target.
            flags: see `workers.protocol.Flag`.
        """
        ...

    def submit_later(self, env_ids: np.ndarray, op: Op, target: int, columns: np.ndarray, flags: int = 0) -> None:
        """As `submit`, to complete the latest commands of envs that have failed to: they keep their place in the order.

        Envs of a worker that is being replaced get the commands in its successor. Never waits for that.
        """
        ...

    def prepare(self, message: messages.Prepare) -> None:
        """Send the extras of an env's next command (side inputs, or a seed and options) ahead of it.

        Raises:
            WorkerLost, WorkerTimeout: its worker is lost and not replaced.
        """
        ...

    def await_workers(self, env_ids: np.ndarray) -> None:
        """Make sure that some envs can be given commands, before anything is sent or changed for a call.

        Raises:
            WorkerLost, WorkerTimeout: one of their workers is lost and not replaced.
        """
        ...

    def wake_workers(self) -> None:
        """After a call was broken off anywhere: announce commands that were written but not announced."""
        ...

    def was_given(self, env_ids: np.ndarray, since: int) -> np.ndarray:
        """Return which envs were given a command after the one of number `since`, bool `[k]`."""
        ...

    def show_path(self, path: str) -> None:
        """Tell `envherd top` which calls are made in C: the text of `protocol.plain.Plain`."""
        ...

    # ---- answers -----------------------------------------------------------------------------

    def wait_all(self, timeout_s: float | None, more_for_resets_s: float | None = 0.0) -> bool:
        """Wait for every answer that is owed; reports besides the rows are in `outcome`.

        Args:
            timeout_s: seconds, after which late workers are killed, which is a loss; None waits without a limit.
            more_for_resets_s: additional seconds for a worker that has begun a reset since.

        Returns:
            Whether all envs have answered. False only after a loss that must be raised before the others have answered.
        """
        ...

    def wait_some(
        self,
        env_ids: np.ndarray,
        count: int,
        timeout_s: float | None,
        more_for_resets_s: float | None = 0.0,
        *,
        kill_late: bool = True,
        through_losses: bool = False,
    ) -> np.ndarray:
        """Wait until at least `count` of some envs owe no answer; return these, the oldest command first.

        Args:
            env_ids: which envs.
            count: at most `k`.
            timeout_s: seconds; None waits without a limit.
            more_for_resets_s: see `wait_all`.
            kill_late: kill workers that are late; False returns fewer envs instead.
            through_losses: wait for the others even long after a worker was lost.
        """
        ...

    def outstanding(self) -> np.ndarray:
        """Return the envs that owe an answer."""
        ...

    # ---- questions ---------------------------------------------------------------------------

    def ask(self, what: str, env_ids: list[int], **question: Any) -> dict[int, Any]:
        """Send envs a request other than a step; see `messages.Ask`.

        `args` of the request has one item per env for "set", "each" and "restore".

        Returns:
            env id -> value as received (`{"plain": ...}` or `{"pickled": ...}`).

        Raises:
            EnvError: an env raised.
            WorkerLost, WorkerTimeout: a worker died or was late; the others have answered.
        """
        ...

    def question(self, what: str, env_ids: list[int], **question: Any) -> dict[int, Any]:
        """Begin `ask` without waiting; return the argument for `has_answered` and `answers`."""
        ...

    def has_answered(self, asked: dict[int, Any]) -> bool:
        """Return whether `answers` would not block."""
        ...

    def answers(self, asked: dict[int, Any], what: str) -> dict[int, Any]:
        """Wait for the answers to the latest request; returns and raises as `ask`."""
        ...

    def seed(self, root_seed: int, episodes: Sequence[int] | None = None) -> None:
        """Use a new root seed.

        Args:
            root_seed: of all envs.
            episodes: the episode that the next reset of each env begins; None for episode 0 of all.

        Raises:
            WorkerLost, WorkerTimeout: a worker is lost and stays so.
        """
        ...

    # ---- memory ------------------------------------------------------------------------------

    def attach_storage(self, target: int, plan: StoragePlan) -> StorageMemory:
        """Create memory for a rollout storage, which commands can name as `target` from now on; return it.

        Raises:
            WorkerLost, WorkerTimeout: a worker is lost and stays so.
        """
        ...

    def detach_storage(self, target: int) -> None:
        """Forget a rollout storage; arrays over it keep its memory. May be repeated, as after an interrupt."""
        ...

    # ---- workers -----------------------------------------------------------------------------

    def begin_restart(self, worker_id: int) -> None:
        """Start a successor of a lost worker; it builds its envs while the other workers continue.

        Raises:
            WorkerLost, WorkerTimeout: too many restarts within the window, or no process can be started.
        """
        ...

    def is_alive(self, worker_id: int) -> bool:
        """Return whether a worker runs."""
        ...

    def worker_output(self, worker_id: int) -> str:
        """Return the kept part of a worker's output."""
        ...

    def pid_of(self, worker_id: int) -> int:
        """Return a worker's process id."""
        ...

    def gpu_of(self, worker_id: int) -> str | None:
        """Return the GPU that a worker was given (`ExecutorOptions.gpus`), or None."""
        ...

    def generation_of(self, worker_id: int) -> int:
        """Return how often a worker was replaced."""
        ...

    def figures(self) -> list[WorkerFigures]:
        """Return the figures of each worker, by worker id."""
        ...

    def close(self, timeout_s: float | None = None) -> None:
        """Close the envs and end the workers within `timeout_s` (default: the option's). Idempotent, never raises."""
        ...


class RecyclablePool(Pool, Protocol):
    """A pool whose workers the engine may replace between episodes."""

    @property
    def resets_before_start(self) -> np.ndarray:
        """Resets of an env of each worker before its present process was started, int64 `[workers]`."""
        ...

    def is_serving(self, worker_id: int) -> bool:
        """Return whether a worker is neither lost nor being replaced."""
        ...

    def memory_of(self, worker_id: int) -> int:
        """Return the bytes of private memory of a worker and its descendants."""
        ...

    def recycle(self, worker_id: int, *, is_anew: bool) -> None:
        """Close the envs of a worker that owes nothing, and begin to replace it.

        Args:
            worker_id: of the worker.
            is_anew: its envs have just begun episodes, which its successor begins again.

        Raises:
            WorkerLost: no process can be started; the worker is lost.
        """
        ...
