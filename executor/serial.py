"""`SerialEnv`: the executor in the caller's own process."""

from collections.abc import Sequence
from typing import Any

from envherd.executor.batched import BatchedEnv, Parts
from envherd.executor.batches.transfer import as_device
from envherd.executor.keywords import names_right_keyword
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.serial_pool import SerialPool
from envherd.executor.sending.blueprint import (
    EnvKwargs,
    MakeEnv,
    as_factories,
    check_agreement,
    checked_options,
    choose_workers,
    counted,
    serial_blueprint,
)
from envherd.shm.specs import DONE_KEYS
from envherd.workers.build import Factory


class SerialEnv(BatchedEnv):
    """N envs in this process, stepped one after the other: the same API and the same data as `ParallelEnv`.

    For debugging, and for envs so cheap that worker processes are slower. See `ParallelEnv` for the arguments;
    `num_workers` is accepted and ignored. Factories need not be picklable here.

    Raises:
        FactoryError: not a factory, returned no env, or raised.
        SpecError: envs of one factory have different specs.
    """

    @names_right_keyword
    def __init__(  # noqa: PLR0913  # the signature that users know from other vector envs
        self,
        num_envs: int | Sequence[Factory | str],
        make_env: MakeEnv | None = None,
        *,
        num_workers: int | str | None = None,
        env_kwargs: EnvKwargs = None,
        seed: int | None = None,
        device: Any = None,
        copy: bool = True,
        options: ExecutorOptions | None = None,
    ) -> None:
        count, make_env = counted(num_envs, make_env)
        if num_workers is not None and num_workers != "auto":
            choose_workers(1, num_workers)  # type: ignore[arg-type]  # accepted as by `ParallelEnv`, and not used
        options = checked_options(options, copy=copy)
        where = as_device(device)
        factories = as_factories(count, make_env)
        if options.alone and len(factories) > 1:
            raise ValueError(
                f"SerialEnv failed: expected one env with alone=True, got {len(factories)} in this process."
            )
        blueprint = serial_blueprint(factories, env_kwargs, seed)
        pool = SerialPool(blueprint, options)
        try:
            pool.start()
            check_agreement(
                pool.specs,
                factories,
                [call.sent.kwargs for call in blueprint.calls.values()],
            )
            parts = Parts()
            if is_simulator(pool):
                from envherd.executor.guests.simulator.engine import (
                    SimulatorEngine,
                    SimulatorExchange,
                    SimulatorRun,
                )

                parts = Parts(SimulatorEngine, SimulatorExchange, SimulatorRun)
                options.refuse_interrupts("SerialEnv of a torch simulator")
            super().__init__(
                pool,
                seed=blueprint.root_seed,
                device=where,
                copy=copy,
                options=options,
                parts=parts,
            )
        except BaseException:
            pool.close()
            raise


def is_simulator(pool: SerialPool) -> bool:
    """Return whether a pool has one torch simulator, and nothing else."""
    return (
        pool.num_envs == 1
        and pool.adapters[0].takes_tensors
        and len(pool.specs[0].done) == len(DONE_KEYS)
    )
