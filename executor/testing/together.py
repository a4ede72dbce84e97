"""Whether envs that share a process disturb each other.

The data of each env are taken twice, with the same seed and actions: alone in a new process, and together with the
others in one. Pictures are compared too, where the env draws any.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import types
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from envherd.executor.testing.batch import BlockBatch, MakeEnv, Row
from envherd.executor.testing.compare import ContractViolation, equal, show, show_key
from envherd.executor.testing.traces import DrawAction, draw_actions
from envherd.workers import registries, seeding
from envherd.workers.build import pickle_factory
from envherd.workers.options import BlockOptions
from envherd.workers.pickling import dumps

_RULE = "rule 10 is broken"
_PICTURE = ("picture",)
_DEEPEST = 20  # wrappers around an env
#: Packages whose classes are not suspected.
_LIBRARIES = ("builtins", "gymnasium", "typing", "abc", "envherd")
_ROOT = str(Path(__file__).parents[3])
#: Types of attributes and globals that are compared.
_VALUES = (bool, int, float, str, bytes, list, dict, set, tuple, np.ndarray, np.generic)
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from envherd.executor.testing.together import run_job
run_job(sys.argv[2])
"""


@dataclass(frozen=True)
class Record:
    """What some envs have shown in one process.

    Attributes:
        rows: env id -> `(where, row)` in order; a row holds a checksum of the picture instead of the picture.
        generators: global generators that the envs drew from.
        changed: class attributes and module globals of the envs that their steps have changed.
        is_alone: whether the envs' family allows only one in a process.
    """

    rows: dict[int, list[tuple[str, Row]]]
    generators: tuple[str, ...]
    changed: tuple[str, ...]
    is_alone: bool


@dataclass(frozen=True)
class _Job:
    """What a new process does.

    Attributes:
        factory: pickled.
        registered: names of envs; see `workers.registries`.
        draw: the actions, as `Contract.actions`, pickled.
        env_ids: contiguous.
        num_steps, seed: see `Contract`.
        isolates: whether each env has its state of the global generators.
    """

    factory: bytes
    registered: bytes
    draw: bytes
    env_ids: range
    num_steps: int
    seed: int
    isolates: bool = False


def check_together(
    make_env: MakeEnv, *, num_envs: int = 2, num_steps: int = 100, seed: int = 0, draw_action: DrawAction | None
) -> None:
    """Require that envs have the same data in one process as in a process each.

    Args:
        make_env: builds one env; sent to new processes.
        num_envs: envs that share the process.
        num_steps: steps of each env.
        seed: root seed of envs and actions.
        draw_action: see `Contract.actions`.

    Raises:
        ContractViolation: names the first difference, what envs probably share, and the remedy.
        FactoryError: the factory cannot be pickled.
    """
    job = _Job(pickle_factory(make_env), registries.collect(), dumps(draw_action), range(1), num_steps, seed)

    def take(env_ids: range, *, isolates: bool = False) -> Record:
        return _in_new_process(_Job(**{**vars(job), "env_ids": env_ids, "isolates": isolates}))

    alone = {env_id: take(range(env_id, env_id + 1)) for env_id in range(num_envs)}
    if alone[0].is_alone:
        return  # workers refuse a second one
    if found := _first_difference(alone[0], take(range(1)), 0):
        raise ContractViolation(
            f"{_RULE}: nothing was proved, as the seed does not determine the env: a second process gave another "
            f"{found}. Draw all randomness from reset's seed."
        )
    together = take(range(num_envs))
    for env_id in range(num_envs):
        if found := _first_difference(alone[env_id], together, env_id):
            cause = _cause(found, alone, together, take)
            raise ContractViolation(
                f"{_RULE}: with {num_envs} envs in one process, env {env_id} gave another {found}. {cause}"
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


def _first_difference(alone: Record, other: Record, env_id: int) -> _Difference | None:
    for index, ((where, row), (_, its_row)) in enumerate(zip(alone.rows[env_id], other.rows[env_id], strict=True)):
        for key, value in row.items():
            if not equal(value, its_row[key]):
                return _Difference(index, where, key, value, its_row[key])
    return None


def _cause(found: _Difference, alone: dict[int, Record], together: Record, take: Callable[..., Record]) -> str:
    """Return what the envs probably share, and the remedy."""
    apart = "Give each env a process: ExecutorOptions(alone=True)."
    if together.generators:
        isolated = take(range(len(alone)), isolates=True)
        own = {env_id: take(range(env_id, env_id + 1), isolates=True) for env_id in alone}
        names = ", ".join(together.generators)
        if not any(_first_difference(own[env_id], isolated, env_id) for env_id in alone):
            return f"It draws from global generators ({names}). ExecutorOptions(isolate_rng=True) is the remedy."
        return f"It draws from global generators ({names}), and shares something else. {apart}"
    for env_id, record in alone.items():
        row = record.rows[env_id][found.index][1]
        is_constant = equal(row.get(found.key), found.expected)
        if not is_constant and equal(row.get(found.key), found.got):
            what = "a display or a GL context" if found.key == _PICTURE else "one simulator or a buffer of it"
            return f"It is that of env {env_id}: the envs share {what}. {apart}"
    if together.changed:
        return f"Steps change {', '.join(together.changed)}, which the envs share. Keep it in the env, or: {apart}"
    if found.key == _PICTURE:
        return f"They probably share a display, a GL context or a pygame surface. {apart}"
    return f"They probably share a variable of a library in C, a file, or a port. {apart}"


# ---- in the new process ----------------------------------------------------------------------------


def _in_new_process(job: _Job) -> Record:
    """Run a job in a new interpreter, and return its record.

    Raises:
        ContractViolation: it failed.
    """
    with tempfile.NamedTemporaryFile() as file:
        file.write(pickle.dumps(job))
        file.flush()
        path = json.dumps([_ROOT, *map(os.path.abspath, sys.path)])
        command = [sys.executable, "-P", "-c", _BOOT, path, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode:
            ids = ", ".join(map(str, job.env_ids))
            raise ContractViolation(
                f"{_RULE}: a process with env {ids} ended with exit code {done.returncode}. Its last output:\n"
                f"{(done.stdout + done.stderr)[-2000:]}"
            )
        record: Record = pickle.loads(Path(file.name).read_bytes())
        return record


def run_job(path: str) -> None:
    """Run the job in a file, and replace the file's content by the record."""
    job: _Job = pickle.loads(Path(path).read_bytes())
    registries.install(job.registered)
    drawn_by: DrawAction | None = pickle.loads(job.draw)
    first = job.env_ids[0]
    options = BlockOptions(first_env_id=first, isolate_rng=job.isolates)
    batch = BlockBatch(pickle.loads(job.factory), len(job.env_ids), 1, job.seed, options)
    seeding.seed_globals(seeding.build_seed(job.seed, job.env_ids[-1]))  # as after the last build of a worker
    watched = list(_shared_values(batch.envs))
    before = {name: _fingerprint(value()) for name, value in watched}
    rngs = [np.random.default_rng([job.seed, env_id]) for env_id in job.env_ids]
    rows: dict[int, list[tuple[str, Row]]] = {env_id: [] for env_id in job.env_ids}

    def note(where: str, its_rows: list[Row], *, is_last: bool = True) -> None:
        for env_id, row in zip(job.env_ids, its_rows, strict=True):
            picture = _picture(batch, env_id - first) if is_last else {}
            rows[env_id].append((where, {**row, **picture}))

    roots = batch.reset(None)
    note("the first root", roots)
    for step in range(job.num_steps):
        nexts, roots = batch.step(draw_actions(drawn_by, batch.specs, rngs, roots), resets_ended=True)
        note(f"next, step {step}", nexts, is_last=False)
        note(f"root, step {step}", roots)
    changed = tuple(name for name, value in watched if _fingerprint(value()) != before[name])
    record = Record(rows, tuple(sorted(batch.generators)), changed, batch.is_alone)
    batch.close()
    Path(path).write_bytes(pickle.dumps(record))


def _picture(batch: BlockBatch, index: int) -> Row:
    """Return a checksum of an env's picture; nothing if it draws none."""
    try:
        picture = batch.render(index)
    except Exception:  # of an env that draws none
        return {}
    return {_PICTURE: zlib.crc32(np.ascontiguousarray(picture).tobytes())} if isinstance(picture, np.ndarray) else {}


def _shared_values(envs: list[Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield plain values that envs of one process share: attributes of their classes, and globals of the modules."""
    owners: dict[int, tuple[Any, str]] = {}
    for env in envs:
        inner = env
        for _ in range(_DEEPEST):
            for cls in type(inner).__mro__[:-1]:
                if cls.__module__.partition(".")[0] not in _LIBRARIES:
                    owners[id(cls)] = cls, f"{cls.__qualname__}."
                    module = sys.modules.get(cls.__module__)
                    owners[id(module)] = module, f"{cls.__module__}."
            inner = getattr(inner, "env", None)
    for owner, label in owners.values():
        if owner is not None:
            yield from _values_of(owner, label)


def _values_of(owner: type | types.ModuleType, label: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, value in list(vars(owner).items()):
        if not name.startswith("__") and isinstance(value, _VALUES):
            yield f"{label}{name}", lambda name=name: vars(owner).get(name)  # type: ignore[misc]


def _fingerprint(value: Any) -> int:
    """Return a number that changes with a value, as far as it can be written."""
    try:
        return zlib.crc32(pickle.dumps(value))
    except Exception:
        return zlib.crc32(repr(value).encode(errors="replace"))
