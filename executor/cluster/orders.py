"""What driver and hosts say to each other, as plain values. Env ids are the share's own, from 0, in both directions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from envherd.executor.cluster.folding import Rest
from envherd.executor.machine.machine import Machine
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.replies import Outcome
from envherd.executor.sizing.measurement import Measurement
from envherd.executor.sizing.search import Run
from envherd.shm.specs import EnvSpec
from envherd.workers import messages
from envherd.workers.protocol import RING

#: What is shipped to a host: a policy, or a callable that builds one there.
PolicyKind = Literal["policy", "factory"]
#: Words of each env that come back with its rows; see `shm.slab.WORDS`.
ENV_WORDS = ("episode", "env_steps", "resets", "ends")


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one host runs.

    Attributes:
        first_env_id: what the batch calls the share's env 0.
        first_worker_id: what it calls the share's worker 0.
        factories: one pickled factory per env.
        env_kwargs: keyword arguments of each call.
        num_workers: processes.
        root_seed: of the whole batch.
        preload: modules for the host's zygote to import.
        options: of the executor.
        words: what the host that it replaces has counted of the envs, int64 `[ENV_WORDS, n]`; None for the first one.
    """

    first_env_id: int
    first_worker_id: int
    factories: tuple[bytes, ...]
    env_kwargs: tuple[dict[str, Any], ...]
    num_workers: int
    root_seed: int
    preload: tuple[str, ...]
    options: ExecutorOptions
    words: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a host says of itself before it has envs.

    Attributes:
        node_id: Ray's, hexadecimal.
        hostname: of the machine.
        pid: of the host's process.
        cores: processors it may use.
        memory_bytes: it may take.
        versions: of what must be equal everywhere, by name.
        boot_id: the same for all that runs under one kernel; empty if unknown.
    """

    node_id: str
    hostname: str
    pid: int
    cores: int
    memory_bytes: int
    versions: dict[str, str]
    boot_id: str = ""

    @property
    def place(self) -> str:
        """What messages call the node."""
        return f"node {self.hostname}/{self.node_id[:8]}"


@dataclass(frozen=True, kw_only=True)
class Built:
    """A host's envs are there.

    Attributes:
        specs: one per env.
        pids: of each worker.
        report: of the host.
    """

    specs: tuple[EnvSpec, ...]
    pids: tuple[int, ...]
    report: Report


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What was found out about a node and an env there; see `sizing`."""

    machine: Machine
    measured: Measurement
    runs: tuple[Run, ...]


@dataclass(frozen=True, kw_only=True)
class Order:
    """Commands for some envs, all announced at once.

    Attributes:
        number: of the order; comes back with the answers.
        op: for all envs, or int `[k]`.
        ids: int `[k]`; None for all.
        target: RING, or the number of a rollout storage, which only the driver has.
        columns: of the target: int where `ids` is None, else int `[k]`.
        reset_ids: int, envs that are reset instead; only where `ids` is None.
        flags: see `workers.protocol.Flag`.
        inputs: see `End.pack_inputs`; None where no input is read.
        extras: to be sent ahead, for resets and side inputs.
        timeout_s: for the answers, in seconds; None for no deadline.
        is_late: the workers concerned are being replaced; see `Pool.submit_later`.
    """

    number: int
    op: Any
    ids: np.ndarray | None
    target: int
    columns: Any
    reset_ids: np.ndarray | None = None
    flags: int = 0
    inputs: list[np.ndarray] | None = None
    extras: tuple[messages.Prepare, ...] = ()
    timeout_s: float | None = None
    is_late: bool = False


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What became of commands.

    Attributes:
        ids: int `[k]`, who has answered, the lost ones left out; None for all.
        numbers: of the orders that are answered: one for all, or int `[k]`.
        target: of the order; answers to several orders are rows of the ring.
        columns: of the order: one for all, or int `[k]`.
        next_ids: int, whose `next` came: those of `ids` that were stepped; None for all.
        nexts: these; see `End.pack_rows`.
        root_ids: int, whose `root` came: those that were reset.
        roots: these.
        words: of the envs, int64 `[ENV_WORDS, n]`.
        began: how often the envs of each worker had been reset when it came, int64 `[workers]`.
        outcome: what else happened; None if nothing did.
    """

    ids: np.ndarray | None = None
    numbers: Any = 0
    target: int = RING
    columns: Any = 0
    next_ids: np.ndarray | None = None
    nexts: list[np.ndarray] = field(default_factory=list)
    root_ids: np.ndarray | None = None
    roots: list[np.ndarray] = field(default_factory=list)
    words: np.ndarray | None = None
    began: np.ndarray | None = None
    outcome: Outcome | None = None


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a host's workers have done and use.

    Attributes:
        processes: `(uss bytes, pss bytes, cpu seconds)` of each worker.
        words: what is known of each worker, by word, each `[workers, ...]`; see `shm.slab.WORDS`.
        now_ns: the host's monotonic clock.
        pids: of the workers.
        generations: how often each was replaced since the host came.
        recycled: how often between episodes.
    """

    processes: list[tuple[int, int, float]]
    words: dict[str, np.ndarray]
    now_ns: int
    pids: tuple[int, ...]
    generations: tuple[int, ...]
    recycled: int


@dataclass(frozen=True, kw_only=True)
class RollOrder:
    """A rollout to be made on the host.

    Attributes:
        num_steps: T.
        policy_id: of a policy that was shipped; None for random actions.
        version: of its weights.
        ended: bool `[n]`, envs that must be reset whatever their rows say.
        roots: where the envs are, see `End.pack_rows`; None if the host knows (a rollout there made the
            envs' latest steps), or if all of them are reset.
        side: the side-channel values that belong to these, one item per env; None likewise.
        kwargs: further arguments of `rollout`.
    """

    num_steps: int
    policy_id: int | None
    version: int
    ended: np.ndarray
    roots: list[np.ndarray] | None
    side: list[Any] | None
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Rolled:
    """A rollout that was made.

    Attributes:
        leaves: key -> array `[n, T, ...]`; None where the batch is none of plain arrays.
        folded: leaves that mostly repeat others of these, see `folding`.
        batch: the TensorDict itself then.
        tail: the batch size behind `[n, T]`.
        version: of the weights it was made with.
        worker_losses, interrupted: what was replaced meanwhile; see `Statistics`.
        reply: where the envs are now, as roots.
        side: the side-channel values of these, one item per env.
        wall_s: seconds that it took.
    """

    leaves: dict[tuple[str, ...], np.ndarray] | None
    folded: dict[tuple[str, ...], Rest]
    batch: Any
    tail: tuple[int, ...]
    version: int
    worker_losses: int
    interrupted: int
    reply: Reply
    side: list[Any]
    wall_s: float
