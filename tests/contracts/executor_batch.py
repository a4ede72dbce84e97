"""The batches through which this folder runs the contract."""

from functools import partial
from typing import Any

from envherd.executor import ExecutorOptions
from envherd.executor.testing import ExecutorBatch, in_this_process, in_workers

PORTABLE = ExecutorOptions(start_method="portable")


BATCHES: dict[str, Any] = {
    "serial": in_this_process,
    "parallel": in_workers,
    "portable": partial(in_workers, options=PORTABLE),
}


def batch_apart(
    make_env: Any, num_envs: int, num_workers: int, root_seed: int
) -> ExecutorBatch:
    """Run envs that must be alone in their process: one worker per env, ignoring `num_workers`."""
    return in_workers(make_env, num_envs, num_envs, root_seed)
