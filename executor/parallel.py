"""`ParallelEnv`: the executor over worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from envherd.executor.batched import BatchedEnv
from envherd.executor.batches.transfer import as_device
from envherd.executor.keywords import names_right_keyword
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.blueprint import (
    EnvKwargs,
    MakeEnv,
    as_factories,
    check_agreement,
    checked_options,
    choose_apart,
    choose_workers,
    counted,
    draw,
)
from envherd.executor.pools.interpreters import num_runs
from envherd.executor.pools.portable import make_pool
from envherd.workers.build import Factory
from envherd.workers.interpreters import interpreter_of


class ParallelEnv(BatchedEnv):
    """N envs in worker processes, stepped as one batch over shared memory.

    Args:
        num_envs: N, or a list of N factories alone; "auto" measures an env for some seconds and decides (see
            `envherd size` and docs/sizing.md).
        make_env: a callable that builds one env, or a list of N callables (different tasks). It is
            pickled by value and called inside a worker; this process never builds an env. Called twice for each env
            with `options.reset_ahead`, in two processes.
        num_workers: processes; None for one per usable core, at most N; "auto" measures and decides. Envs are
            spread over them in contiguous blocks. With `options.reset_ahead`, N (and as many that prepare resets).
        env_kwargs: keyword arguments of the factory calls: one dict for all, or a list of N.
        seed: root seed of everything random; None draws one (see the attribute `seed`).
        device: of the batches; None leaves them on the CPU.
        copy: True hands out batches that nothing overwrites; False hands out views of a ring. The
            `options.ring_frames`-th step after a view's own step overwrites it; resets and rollouts do not.
        options: see `ExecutorOptions`.

    Raises:
        ValueError: `options.reset_ahead` with fewer workers than envs, or with envs that are batches themselves.
        FactoryError: not a factory, cannot be pickled, returned no env, or raised.
        SpecError: envs of one factory disagree.
        WorkerLost, WorkerTimeout: a worker did not start.
    """

    @names_right_keyword
    def __init__(  # noqa: PLR0913  # the signature that users know from other vector envs
        self,
        num_envs: int | Literal["auto"] | Sequence[Factory],
        make_env: MakeEnv | None = None,
        *,
        num_workers: int | Literal["auto"] | None = None,
        env_kwargs: EnvKwargs = None,
        seed: int | None = None,
        device: Any = None,
        copy: bool = True,
        options: ExecutorOptions | None = None,
    ) -> None:
        count, make_env = counted(num_envs, make_env)
        options = checked_options(options, copy=copy)
        where = as_device(device)  # refused before anything is measured
        if options.alone and not isinstance(count, str):
            num_workers = choose_apart(count, num_workers, "alone")
        if isinstance(count, str) or isinstance(num_workers, str):
            from envherd.executor.sizing.recommending import resolve  # imported here: only "auto" needs it

            count, num_workers = resolve(count, num_workers, make_env, env_kwargs, options)
        if options.reset_ahead:
            num_workers = choose_apart(count, num_workers)
        factories = as_factories(count, make_env)
        fewest = num_runs([interpreter_of(factory) for factory in factories])
        blueprint = draw(factories, env_kwargs, choose_workers(count, num_workers, fewest=fewest), seed, options)
        pool = make_pool(blueprint, options)
        pool.start()
        try:
            check_agreement(pool.specs, factories, blueprint.env_kwargs)
            super().__init__(pool, seed=blueprint.root_seed, device=where, copy=copy, options=options)
        except BaseException:
            pool.close(timeout_s=0)
            raise
