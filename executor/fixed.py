"""`FixedParallelEnv`: the executor over a number of worker processes that the caller names.

Sizing measures with this class, and `ParallelEnv` is this class with `"auto"`, which asks sizing for the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envherd.executor.batched import BatchedEnv
from envherd.executor.batches.transfer import as_device
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.agreement import check_agreement
from envherd.executor.pools.ahead_pool import AheadPool
from envherd.executor.pools.blueprint import (
    EnvKwargs,
    MakeEnv,
    as_factories,
    choose_apart,
    choose_workers,
    counted,
    draw,
)
from envherd.executor.pools.worker_pool import WorkerPool
from envherd.workers.build import Factory


class FixedParallelEnv(BatchedEnv):
    """N envs in W worker processes; see `ParallelEnv` for the arguments and for what is raised."""

    def __init__(  # noqa: PLR0913  # the signature that users know from other vector envs
        self,
        num_envs: int | Sequence[Factory],
        make_env: MakeEnv | None = None,
        *,
        num_workers: int | None = None,
        env_kwargs: EnvKwargs = None,
        seed: int | None = None,
        device: Any = None,
        copy: bool = True,
        options: ExecutorOptions | None = None,
    ) -> None:
        count, make_env = counted(num_envs, make_env)
        options = options or ExecutorOptions()
        where = as_device(device)
        if options.reset_ahead:
            num_workers = choose_apart(count, num_workers)
        factories = as_factories(count, make_env)
        blueprint = draw(factories, env_kwargs, choose_workers(count, num_workers), seed, options)
        pool = AheadPool(blueprint, options) if options.reset_ahead else WorkerPool(blueprint, options)
        pool.start()
        try:
            check_agreement(pool.specs, factories, blueprint.env_kwargs)
            super().__init__(pool, seed=blueprint.root_seed, device=where, copy=copy, options=options)
        except BaseException:
            pool.close(timeout_s=0)
            raise
