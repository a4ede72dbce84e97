"""The messages between driver and hosts, as values. Env ids in both directions are the host's, from 0."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envherd.executor.cluster.packing import Packed, Rest
from envherd.executor.options import ExecutorOptions
from envherd.shm.specs import EnvSpec, Key
from envherd.workers import messages
from envherd.workers.errors import EnvherdError

#: Words of each env that are returned with its rows; see `shm.slab.WORDS`.
ENV_WORDS = ("episode", "env_steps", "resets", "ends")


@dataclass(frozen=True, kw_only=True)
class Share:
    """The envs of one host.

    Attributes:
        first_env_id: id in the batch of the host's env 0.
        first_worker_id: id in the batch of the host's worker 0.
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
    """

    node_id: str
    hostname: str
    pid: int
    cores: int
    memory_bytes: int
    versions: dict[str, str]

    @property
    def place(self) -> str:
        """The node's name in messages."""
        return f"node {self.hostname}/{self.node_id[:8]}"


@dataclass(frozen=True, kw_only=True)
class Order:
    """A command for some envs.

    Attributes:
        op: see `workers.protocol`.
        ids: int `[k]`; None for all.
        inputs: batch `[k]` with the actions, of a step.
        mask: bool `[n, *B]`, parts of envs that are reset; None for all parts. Of a reset.
        extras: env id -> seed and options of its reset.
    """

    op: int
    ids: np.ndarray | None
    inputs: Packed | None = None
    mask: np.ndarray | None = None
    extras: dict[int, messages.Prepare] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to an order.

    Attributes:
        ids: int `[k]`, the stepped envs, whose `next` is included.
        next: batch `[k]`; None for no envs.
        cut: int, envs that were not stepped, because an earlier loss had taken their episodes.
        root_ids: int, envs whose present row is a root; all of the host, if there was no command.
        roots: these roots; None for no envs.
        states: int8 `[n]`, the `State` of every env of the host.
        words: of every env, int64 `[ENV_WORDS, n]`.
        tally: worker losses, interrupted rows, exceptions of envs and recycled workers of this host so far.
        infos: "next" and "root" -> env id -> info.
        errors: of envs and workers; the steps that they concern are in neither `ids` nor `cut`, or not valid.
    """

    ids: np.ndarray
    next: Packed | None
    cut: np.ndarray
    root_ids: np.ndarray
    roots: Packed | None
    states: np.ndarray
    words: np.ndarray
    tally: np.ndarray
    infos: dict[str, dict[int, dict[str, Any]]]
    errors: list[EnvherdError]


@dataclass(frozen=True, kw_only=True)
class Built:
    """A host has built its envs; see `Answer` for their roots."""

    specs: tuple[EnvSpec, ...]
    report: Report
    answer: Answer


@dataclass(frozen=True, kw_only=True)
class RollOrder:
    """A request for a rollout on the host.

    Attributes:
        num_steps: T.
        policy_id: of the policy; None for random actions.
        is_factory: what is sent builds the policy.
        version: of its weights.
        ended: bool `[n]`, envs that must be reset even if their rows do not say so.
        kwargs: further arguments of `rollout`.
    """

    num_steps: int
    policy_id: int | None
    is_factory: bool
    version: int
    ended: np.ndarray
    kwargs: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Rolled:
    """A finished rollout.

    Attributes:
        data: batch `[n, T]`, without the leaves in `folded`.
        folded: leaves that mostly repeat others, see `packing.fold`.
        tail: the batch size behind `[n, T]`.
        version: of the weights it was made with.
        answer: the envs' present roots.
        wall_s: seconds that it took.
    """

    data: Packed
    folded: dict[Key, Rest]
    tail: tuple[int, ...]
    version: int
    answer: Answer
    wall_s: float
