"""What many tests of executors need: both kinds of them, one that was reset, endless envs, masks, actions, rows."""

import contextlib
import functools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from envherd.executor import ExecutorOptions, ParallelEnv, SerialEnv
from envherd.workers.testing import CountingEnv

TWO_WORKERS = functools.partial(ParallelEnv, num_workers=2)
PARALLEL = pytest.param(TWO_WORKERS, id="parallel", marks=pytest.mark.slow)
both = pytest.mark.parametrize("make", [PARALLEL, pytest.param(SerialEnv, id="serial")])

ENDLESS = functools.partial(CountingEnv, 1_000_000)
RESTART = ExecutorOptions(on_worker_loss="restart")


@contextlib.contextmanager
def begun(opened: Any) -> Iterator[Any]:
    """Reset all envs of an executor before the block; close it afterwards."""
    with opened as env:
        env.reset()
        yield env


def act(env: Any) -> TensorDict:
    """Return a batch with action 1 for each env."""
    leaf = env.action_spec[0]
    return TensorDict(
        {leaf.key: torch.ones((env.num_envs, *leaf.shape), dtype=torch.int64)},
        env.batch_size,
    )


def ones(td: Any) -> Any:
    """Set action 1 for each row, also in a lazy stack of different tasks."""
    for part in td.unbind(0) if isinstance(td, LazyStackedTensorDict) else [td]:
        part["action"] = torch.ones(part.batch_size, dtype=torch.int64)
    return td


def only(env: Any, *env_ids: int) -> TensorDict:
    """Return a mask for a reset of some envs."""
    mask = torch.zeros(env.num_envs, dtype=torch.bool)
    mask[list(env_ids)] = True
    return TensorDict({"_reset": mask}, [env.num_envs])


def kill(env: Any, worker_id: int) -> None:
    """Kill a worker, and wait until it has ended."""
    pid = env.engine.pool.pid_of(worker_id)
    os.kill(pid, signal.SIGKILL)
    await_death(pid)


def await_death(pid: int) -> None:
    """Wait until a process has ended."""
    with contextlib.suppress(OSError):  # the process ended before or during the read
        while Path(f"/proc/{pid}/cmdline").read_bytes():
            time.sleep(0.005)


def counters(td: Any) -> list[int]:
    """Return the step of each row of `CountingEnv`s."""
    steps: list[int] = td["observation"][..., 1].tolist()
    return steps


def flags(td: Any, key: str) -> list[bool]:
    """Return the flags of the last observations."""
    found: list[bool] = td["next", key].flatten().tolist()
    return found
