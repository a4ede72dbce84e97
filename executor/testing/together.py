"""Whether envs that share a process disturb each other.

The data of each env are taken twice, with the same seed and actions: alone in a worker, and together with the others
in one. Pictures are compared too, where the env draws any.
"""

import contextlib
import functools
import zlib

import numpy as np
from tensordict import TensorDictBase

from envherd.executor.options import ExecutorOptions
from envherd.executor.parallel import ParallelEnv
from envherd.executor.testing.traces import (
    ContractViolation,
    DrawAction,
    ExecutorBatch,
    MakeEnv,
    Row,
    Trace,
    demand,
    fused,
    take_trace,
)
from envherd.workers.errors import EnvError, FactoryError, WorkerLost

_RULE = "rule 10 is broken"


def check_together(
    make_env: MakeEnv,
    *,
    num_envs: int = 2,
    num_steps: int = 100,
    seed: int = 0,
    draw_action: DrawAction | None,
) -> None:
    """Require that envs have the same data in one worker as in a worker each.

    Args:
        make_env: builds one env; sent to workers.
        num_envs: envs that share a worker.
        num_steps: steps of each env.
        seed: root seed of envs and actions.
        draw_action: see `Contract.actions`.

    Raises:
        ContractViolation: names the first difference, and the remedy.
        FactoryError: the factory cannot be pickled.
    """
    take = functools.partial(_take, make_env, num_steps, seed, draw_action)
    alone = [take(range(env_id, env_id + 1)) for env_id in range(num_envs)]
    _compare(
        alone[0],
        take(range(1)),
        0,
        "a second worker gave other data, so nothing was proved: the seed does not determine the env. Draw all "
        "randomness from reset's seed.",
    )
    try:
        together = take(range(num_envs))
    except FactoryError as error:
        if "expected one simulator in a process" in error.message:
            return
        raise ContractViolation(f"{_RULE}: {error}") from error
    for env_id, trace in enumerate(alone):
        _compare(
            trace,
            together,
            env_id,
            f"with {num_envs} envs in one worker it is not what it was alone: they share a global generator "
            f"(ExecutorOptions(isolate_rng=True) is the remedy), or an attribute of a class, a global, a GL context, a "
            f"library's variable (ExecutorOptions(alone=True) gives each env a process).",
        )


def _compare(alone: Trace, other: Trace, at: int, why: str) -> None:
    """Require that the only env of a trace has shown the same as the env at a place of another."""
    rows = [one for one in other.shown() if one.env_id == at]
    for mine, its in zip(alone.shown(), rows, strict=True):
        demand(10, mine.row, its.row, its.where, why)


def _take(
    factory: MakeEnv,
    num_steps: int,
    seed: int,
    drawn_by: DrawAction | None,
    env_ids: range,
) -> Trace:
    """Return what envs show in one worker of their own; roots have checksums of the pictures.

    Raises:
        ContractViolation: the worker died.
    """
    try:
        with ParallelEnv(
            len(env_ids),
            factory,
            num_workers=1,
            seed=seed,
            options=ExecutorOptions(first_env_id=env_ids[0]),
        ) as env:
            return take_trace(
                _DrawnBatch(env),
                num_steps,
                advance=fused,
                drawn_by=drawn_by,
                seed=seed,
            )
    except WorkerLost as error:
        raise ContractViolation(f"{_RULE}: {error}") from error


class _DrawnBatch(ExecutorBatch):
    """Its roots also have a checksum of the picture, of envs that draw one."""

    def _rows(self, td: TensorDictBase, section: str) -> list[Row]:
        rows = super()._rows(td, section)
        if section == "root":
            with contextlib.suppress(EnvError):  # of an env that draws none
                pictures = self.env.ask("render", None)
                for row, picture in zip(rows, pictures, strict=True):
                    if isinstance(picture, np.ndarray):
                        data = np.ascontiguousarray(picture).tobytes()
                        row["picture",] = zlib.crc32(data)
        return rows
