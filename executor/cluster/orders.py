"""The messages between driver and hosts, as values. Env ids in both directions are the share's, from 0."""

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

#: What is sent to a host: a policy, or a callable that builds one there.
PolicyKind = Literal["policy", "factory"]
#: Words of each env that are returned with its rows; see `shm.slab.WORDS`.
ENV_WORDS = ("episode", "env_steps", "resets", "ends")


@dataclass(frozen=True, kw_only=True)
class Share:
    """The share of one host.

    Attributes:
        first_env_id: id in the batch of the share's env 0.
        first_worker_id: id in the batch of the share's worker 0.
        factories: one pickled factory per env.
        env_kwargs: keyword arguments of each call.
        num_workers: processes.
        root_seed: of the whole batch.
        preload: modules for the host's zygote to import.
        options: of the executor.
        registered: names of envs for the workers; see `workers.registries`.
        words: the replaced host's counts of the envs, int64 `[ENV_WORDS, n]`; None for the first host.
    """

    first_env_id: int
    first_worker_id: int
    factories: tuple[bytes, ...]
    env_kwargs: tuple[dict[str, Any], ...]
    num_workers: int
    root_seed: int
    preload: tuple[str, ...]
    options: ExecutorOptions
    registered: bytes
    words: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """A host's report on itself before it has envs.

    Attributes:
        node_id: Ray's, hexadecimal.
        hostname: of the machine.
        pid: of the host's process.
        cores: processors it may use.
        memory_bytes: memory that it may take.
        versions: by name, of packages that must be equal everywhere.
        boot_id: of the running kernel, equal for all processes on it; empty if unknown.
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
        """The node's name in messages."""
        return f"node {self.hostname}/{self.node_id[:8]}"


@dataclass(frozen=True, kw_only=True)
class Built:
    """A host has built its envs.

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
    """The measurements of a node and of an env there; see `sizing`."""

    machine: Machine
    measured: Measurement
    runs: tuple[Run, ...]


@dataclass(frozen=True, kw_only=True)
class Order:
    """Commands for some envs, all announced at once.

    Attributes:
        number: of the order; the answers repeat it.
        op: for all envs, or int `[k]`.
        ids: int `[k]`; None for all.
        target: RING, or the number of a rollout storage, which exists only in the driver.
        columns: of the target: int if `ids` is None, else int `[k]`.
        reset_ids: int, envs that are reset instead; only where `ids` is None.
        flags: see `workers.protocol.Flag`.
        inputs: see `WireRows.pack_inputs`; None if no input is read.
        extras: messages to send ahead, for resets and side inputs.
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
    """The answers to commands.

    Attributes:
        ids: int `[k]`, envs that have answered, without lost ones; None for all.
        numbers: of the orders that are answered: one for all, or int `[k]`.
        target: of the order; RING for answers to several orders.
        columns: of the order: one for all, or int `[k]`.
        next_ids: int, envs of `ids` that were stepped, whose `next` is included; None for all.
        nexts: their rows; see `WireRows.pack_rows`.
        root_ids: int, envs that were reset, whose `root` is included.
        roots: their rows.
        words: of the envs, int64 `[ENV_WORDS, n]`.
        resets_before_start: resets of an env of each worker before its present process was started, int64 `[workers]`.
        outcome: other events; None if there were none.
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
    resets_before_start: np.ndarray | None = None
    outcome: Outcome | None = None


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The counts and resources of a host's workers.

    Attributes:
        processes: `(uss bytes, pss bytes, cpu seconds)` of each worker.
        words: each worker's words, by name, each `[workers, ...]`; see `shm.slab.WORDS`.
        now_ns: the host's monotonic clock.
        pids: of the workers.
        generations: replacements of each worker since the host started.
        recycled: those between episodes.
    """

    processes: list[tuple[int, int, float]]
    words: dict[str, np.ndarray]
    now_ns: int
    pids: tuple[int, ...]
    generations: tuple[int, ...]
    recycled: int


@dataclass(frozen=True, kw_only=True)
class RollOrder:
    """A request for a rollout on the host.

    Attributes:
        num_steps: T.
        policy_id: of a policy that was shipped; None for random actions.
        version: of its weights.
        ended: bool `[n]`, envs that must be reset even if their rows do not say so.
        roots: the envs' present roots, see `WireRows.pack_rows`; None if the host has them (from a rollout there), or
            if all envs are reset.
        side: the side-channel values of these roots, one item per env; None likewise.
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
    """A finished rollout.

    Attributes:
        leaves: key -> array `[n, T, ...]`; None if the batch holds anything but arrays.
        folded: leaves that mostly repeat others of these, see `folding`.
        batch: the TensorDict itself, if `leaves` is None.
        tail: the batch size behind `[n, T]`.
        version: of the weights it was made with.
        worker_losses, interrupted: during the rollout; see `Statistics`.
        reply: the envs' present roots.
        side: the side-channel values of these roots, one item per env.
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
