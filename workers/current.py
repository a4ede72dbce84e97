"""`worker`: which envs a process runs, for factories and envs that need ports, files or seeds of their own."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """The ids of this process's worker and of its envs.

    Attributes:
        worker_id: of the worker, from 0; a replaced worker keeps it. Unique among the processes of an executor at any
            time.
        generation: how often the worker was replaced.
        num_workers: worker processes; 0 in a `SerialEnv`.
        env_ids: ids of its envs, ascending; with `ExecutorOptions.first_env_id` and on a cluster, those of the whole
            batch.
        env_id: of the env that is being built; afterwards the worker's only env, or None if it has several.
    """

    worker_id: int
    generation: int
    num_workers: int
    env_ids: tuple[int, ...]
    env_id: int | None = None


#: Environment variable that marks a worker's descendants, also outside its process group.
MARK = "ENVHERD_WORKER"

_info: WorkerInfo | None = None


def worker() -> WorkerInfo | None:
    """Return information about the worker in this process, or None outside workers.

    Factories and envs may call it. A port for each env, which no other env of the executor has:

        def make_env():
            return MyServerEnv(port=7000 + envherd.worker().env_id)

    In a `SerialEnv`, it is known only while the envs are built.
    """
    return _info


@contextlib.contextmanager
def building(info: WorkerInfo | None, env_id: int) -> Iterator[None]:
    """Let `worker` name this process and the env that is being built in the block."""
    global _info  # noqa: PLW0603
    before = _info
    _info = info and dataclasses.replace(info, env_id=env_id)
    try:
        yield
    finally:
        _info = before


def enter(info: WorkerInfo) -> None:
    """Make this process the worker that `worker` names, until it ends."""
    global _info  # noqa: PLW0603
    _info = dataclasses.replace(
        info,
        env_id=info.env_ids[0] if len(info.env_ids) == 1 else None,
    )


def mark_of(helper: int, worker: int | str) -> str:
    """Return the value of `MARK` for the descendants of a worker."""
    return f"{helper}.{worker}"


def mark_copy() -> None:
    """In a copy of a worker, mark its descendants as its own."""
    if MARK in os.environ:
        os.environ[MARK] = mark_of(int(os.environ[MARK].partition(".")[0]), os.getpid())
