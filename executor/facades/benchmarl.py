"""BenchMARL's experiments on the executor: it replaces TorchRL's `ParallelEnv` in training.

    from envherd.benchmarl import installed

    with installed(num_processes=4):
        experiment = Experiment(task=MeltingPotTask.COMMONS_HARVEST__OPEN.get_from_yaml(), ...)
    experiment.run()

Experiments that are built inside the block collect with `envherd.torchrl.ParallelEnv`, also after the block,
if their config sets `parallel_collection` and their task is not a batch itself (VMAS). The env for BenchMARL's
evaluation stays in its process.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from envherd.executor.facades import needing
from envherd.executor.options import ExecutorOptions

with needing("benchmarl", "benchmarl"):
    import benchmarl.experiment.experiment
from envherd.executor.facades.torchrl import ParallelEnv

__all__ = ["installed"]


@contextlib.contextmanager
def installed(*, num_processes: int | None = None, options: ExecutorOptions | None = None) -> Iterator[None]:
    """Replace TorchRL's `ParallelEnv` in BenchMARL's experiments for the block.

    Args:
        num_processes: worker processes of an experiment; None for one per usable core, at most one per env.
        options: of the executor.
    """
    module = benchmarl.experiment.experiment
    before = module.ParallelEnv
    module.ParallelEnv = functools.partial(ParallelEnv, num_processes=num_processes, options=options)
    try:
        yield
    finally:
        module.ParallelEnv = before
