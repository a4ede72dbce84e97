"""Start the probe's and the search's workers from one helper process; this process builds no env."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from envherd.executor.batched import BatchedEnv
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.ahead_pool import AheadPool
from envherd.executor.pools.blueprint import as_factories, draw, spread
from envherd.executor.pools.crew import Blueprint
from envherd.executor.pools.preloading import preloaded
from envherd.executor.pools.worker_pool import WorkerPool
from envherd.executor.sizing.probing import Subject
from envherd.executor.sizing.settings import Setting


def start(subject: Subject, options: ExecutorOptions, setting: Setting, patience_s: float) -> BatchedEnv:
    """Start the executor of a setting with worker processes.

    Args:
        subject: the env.
        options: of the executor.
        setting: see `Setting`.
        patience_s: most seconds for a build, a reset or a step of a worker.

    Raises:
        EnvherdError: it cannot be started; none of its processes is left running.
    """
    count = setting.num_envs
    options = replace(
        options,
        reset_ahead=setting.reset_ahead,
        build_timeout_s=min(patience_s, options.build_timeout_s or patience_s),
        reset_timeout_s=min(patience_s, options.reset_timeout_s or patience_s),
        step_timeout_s=min(patience_s, options.step_timeout_s or patience_s),
    )
    blocks = spread(count, setting.num_workers)
    blueprint = Blueprint((subject.factory,) * count, (subject.env_kwargs,) * count, blocks, 0, subject.preload)
    pool = AheadPool(blueprint, options) if setting.reset_ahead else WorkerPool(blueprint, options)
    pool.start()
    try:
        return BatchedEnv(pool, seed=0, device=None, copy=True, options=options)
    except BaseException:
        pool.close(timeout_s=0)
        raise


def subject_of(make_env: Callable[..., Any], env_kwargs: dict[str, Any] | None, options: ExecutorOptions) -> Subject:
    """Return the subject of a probe: a pickled factory."""
    blueprint = draw(as_factories(1, make_env), env_kwargs, 1, 0, options)
    return Subject(
        factory=blueprint.factories[0],
        env_kwargs=blueprint.env_kwargs[0],
        preload=blueprint.preload,
        seed=blueprint.root_seed,
    )


@contextlib.contextmanager
def helper(subject: Subject, options: ExecutorOptions) -> Iterator[None]:
    """Make the probe and all executors start their workers from one helper, if possible."""
    with contextlib.ExitStack() as stack:
        if subject.preload and options.start_method == "zygote":
            with contextlib.suppress(ImportError):  # workers report a module that cannot be imported
                stack.enter_context(preloaded(*subject.preload, options=options))
        yield
