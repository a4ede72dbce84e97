"""Whether envs that share a process disturb each other.

The data of each env are taken twice, with the same seed and actions: alone in a worker, and together with the others
in one. Pictures are compared too, where the env draws any.
"""

import contextlib
import functools
import pickle
import sys
import types
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

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
    Shown,
    Trace,
    equal,
    fused,
    show,
    show_key,
    take_trace,
)
from envherd.workers.adapters.base import Adapter
from envherd.workers.errors import EnvError, FactoryError, WorkerLost

_RULE = "rule 10 is broken"
_PICTURE = ("picture",)
_DEEPEST = 20  # wrappers around an env
#: Packages whose classes are not suspected.
_LIBRARIES = ("builtins", "gymnasium", "typing", "abc", "envherd")
#: Types of attributes and globals that are compared.
_VALUES = (bool, int, float, str, bytes, list, dict, set, tuple, np.ndarray, np.generic)


@dataclass(frozen=True)
class Record:
    """What some envs have shown in one worker.

    Attributes:
        trace: its roots have checksums of the pictures.
        changed: class attributes and module globals of the envs that their steps have changed.
    """

    trace: Trace
    changed: tuple[str, ...]

    def shown(self, at: int) -> list[Shown]:
        """Return the rows of the env at a place among the envs, in order."""
        return [one for one in self.trace.shown() if one.env_id == at]


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
        ContractViolation: names the first difference, what envs probably share, and the remedy.
        FactoryError: the factory cannot be pickled.
    """
    watched = functools.partial(_watched, make_env)
    take = functools.partial(_take, watched, num_steps, seed, draw_action)
    alone = {env_id: take(range(env_id, env_id + 1)) for env_id in range(num_envs)}
    if found := _first_difference(alone[0], take(range(1)), 0):
        raise ContractViolation(
            f"{_RULE}: nothing was proved, as the seed does not determine the env: a second worker gave another "
            f"{found}. Draw all randomness from reset's seed."
        )
    try:
        together = take(range(num_envs))
    except FactoryError as error:
        if "expected one simulator in a process" in error.message:
            return
        raise ContractViolation(f"{_RULE}: {error}") from error
    for env_id in range(num_envs):
        if found := _first_difference(alone[env_id], together, env_id):
            raise ContractViolation(
                f"{_RULE}: with {num_envs} envs in one worker, env {env_id} gave another {found}. "
                f"{_cause(found, alone, together, take)}"
            )


@dataclass(frozen=True)
class _Difference:
    """The first difference between two records of an env."""

    index: int
    where: str
    key: tuple[str, ...]
    expected: Any
    got: Any

    def __str__(self) -> str:
        if self.key == _PICTURE:
            return f"picture than alone ({self.where})"
        return f"{show_key(self.key)} than alone ({self.where}): expected {show(self.expected)}, got {show(self.got)}"


def _first_difference(alone: Record, other: Record, at: int) -> _Difference | None:
    """Return the first difference between the only env of a record and the env at a place of another."""
    rows = zip(alone.shown(0), other.shown(at), strict=True)
    for index, (mine, its) in enumerate(rows):
        for key, value in mine.row.items():
            if not equal(value, its.row[key]):
                return _Difference(index, its.where, key, value, its.row[key])
    return None


def _cause(
    found: _Difference,
    alone: dict[int, Record],
    together: Record,
    take: Callable[..., Record],
) -> str:
    """Return what the envs probably share, and the remedy."""
    apart = "Give each env a process: ExecutorOptions(alone=True)."
    isolated = take(range(len(alone)), isolates=True)
    own = {env_id: take(range(env_id, env_id + 1), isolates=True) for env_id in alone}
    if not any(_first_difference(own[env_id], isolated, env_id) for env_id in alone):
        return "It draws from global generators. ExecutorOptions(isolate_rng=True) is the remedy."
    for env_id, record in alone.items():
        row = record.shown(0)[found.index].row
        is_constant = equal(row.get(found.key), found.expected)
        if not is_constant and equal(row.get(found.key), found.got):
            what = (
                "a display or a GL context"
                if found.key == _PICTURE
                else "one simulator or a buffer of it"
            )
            return f"It is that of env {env_id}: the envs share {what}. {apart}"
    if together.changed:
        return f"Steps change {', '.join(together.changed)}, which the envs share. Keep it in the env, or: {apart}"
    if found.key == _PICTURE:
        return (
            f"They probably share a display, a GL context or a pygame surface. {apart}"
        )
    return (
        f"They probably share a variable of a library in C, a file, or a port. {apart}"
    )


def _take(
    factory: MakeEnv,
    num_steps: int,
    seed: int,
    drawn_by: DrawAction | None,
    env_ids: range,
    *,
    isolates: bool = False,
) -> Record:
    """Return what envs show in one worker of their own.

    Raises:
        ContractViolation: the worker died.
    """
    try:
        with ParallelEnv(
            len(env_ids),
            factory,
            num_workers=1,
            seed=seed,
            # Workers need this module for `_watched`, and it imports torch.
            options=ExecutorOptions(
                preload=(__name__,),
                first_env_id=env_ids[0],
                isolate_rng=isolates,
            ),
        ) as env:
            before = _shared(env)
            trace = take_trace(
                _DrawnBatch(env),
                num_steps,
                advance=fused,
                drawn_by=drawn_by,
                seed=seed,
            )
            after = _shared(env)
    except WorkerLost as error:
        raise ContractViolation(f"{_RULE}: {error}") from error
    return Record(
        trace,
        tuple(name for name, value in before.items() if after.get(name) != value),
    )


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
                        row[_PICTURE] = zlib.crc32(data)
        return rows


# ---- in the worker ---------------------------------------------------------------------------------


def _watched(make_env: MakeEnv) -> Any:
    """Build an env that can tell what it shares with others of its process."""
    made = make_env()
    env = made.env if isinstance(made, Adapter) else made
    with contextlib.suppress(AttributeError, TypeError):
        env.envherd_shared = functools.partial(_fingerprints, env)
    return made


def _shared(env: ParallelEnv) -> dict[str, int]:
    """Return a fingerprint of each value that the envs share; none of envs that cannot tell."""
    try:
        return {
            name: value
            for one in env.call("envherd_shared")
            for name, value in one.items()
        }
    except EnvError:
        return {}


def _fingerprints(env: Any) -> dict[str, int]:
    """Return fingerprints of plain values: attributes of an env's classes, and globals of their modules."""
    owners: dict[int, tuple[Any, str]] = {}
    for _ in range(_DEEPEST):
        for cls in type(env).__mro__[:-1]:
            if cls.__module__.partition(".")[0] not in _LIBRARIES:
                owners[id(cls)] = cls, f"{cls.__qualname__}."
                module = sys.modules.get(cls.__module__)
                owners[id(module)] = module, f"{cls.__module__}."
        env = getattr(env, "env", None)
    return {
        name: _fingerprint(value)
        for owner, label in owners.values()
        for name, value in _values_of(owner, label)
    }


def _values_of(
    owner: type | types.ModuleType | None,
    label: str,
) -> Iterator[tuple[str, Any]]:
    for name, value in vars(owner).items() if owner is not None else ():
        if not name.startswith("__") and isinstance(value, _VALUES):
            yield f"{label}{name}", value


def _fingerprint(value: Any) -> int:
    """Return a number that changes with a value, as far as it can be written."""
    try:
        return zlib.crc32(pickle.dumps(value))
    except Exception:
        return zlib.crc32(repr(value).encode(errors="replace"))
