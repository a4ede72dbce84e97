"""The messages between driver and hosts, as values. Env ids in both directions are the host's, from 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envherd.executor.cluster.rows import Part
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.crew import Blueprint
from envherd.workers.errors import EnvherdError
from envherd.workers.messages import Prepare

#: Words of each env that are returned with its rows; see `shm.slab.WORDS`.
ENV_WORDS = ("episode", "env_steps", "resets", "ends")


@dataclass(frozen=True, kw_only=True)
class Share:
    """The envs of one host.

    Attributes:
        first_env_id: id in the batch of the host's env 0.
        first_worker_id: id in the batch of the host's worker 0.
        blueprint: of the host's pool.
        options: of the executor.
        registered: names of envs for the workers; see `workers.registries`.
        generation: number of earlier hosts of these envs.
        words: their counts, int64 `[ENV_WORDS, n]`; None for the first host.
        tally: theirs; see `Answer`.
    """

    first_env_id: int
    first_worker_id: int
    blueprint: Blueprint
    options: ExecutorOptions
    registered: bytes
    generation: int = 0
    words: np.ndarray | None = None
    tally: Any = 0


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
        ids: int64 `[k]`, ascending; None for all.
        inputs: of steps; of resets the masks of envs that are batches.
        prepared: side inputs of steps; seeds and options of resets.
    """

    op: int
    ids: np.ndarray | None
    inputs: Sequence[Part]
    prepared: Sequence[Prepare]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to an order.

    Attributes:
        nexts: of envs that were stepped.
        roots: of envs whose present row is a root; of all envs, if there was no order.
        interrupted: int64, the envs whose `next` a loss has interrupted.
        states: int8 `[n]`, the `State` of every env of the host.
        words: of every env, int64 `[ENV_WORDS, n]`.
        tally: int64 `[4]`, worker losses, interrupted rows, exceptions of envs and recycled workers so far.
        side, infos: env id -> message, as workers send them.
        errors: of envs and workers. Envs of the order that have no rows here share the first one's fate.
    """

    nexts: Sequence[Part]
    roots: Sequence[Part]
    interrupted: np.ndarray
    states: np.ndarray
    words: np.ndarray
    tally: np.ndarray
    side: dict[int, dict[str, Any]]
    infos: dict[int, dict[str, Any]]
    errors: Sequence[EnvherdError]
