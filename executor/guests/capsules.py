"""Crash capsules: when they are written, and their file, which holds facts as JSON and the bytes of the actions.

Guarantees: reading a capsule runs no code. Nothing is unpickled or imported; types and sizes are checked, and whatever
is not a complete capsule raises one error. A file is never replaced.
"""

import contextlib
import hashlib
import io
import itertools
import json
import math
import os
import platform
import re
import stat
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from envherd.executor.options import Capsules
from envherd.executor.processes.error_messages import Frame, numbering, with_sentence
from envherd.executor.sending.blueprint import EnvCall
from envherd.shm.slab import input_leaves
from envherd.shm.specs import EnvSpec, Key
from envherd.workers.adapters.named import reference_of
from envherd.workers.block.slot import Journal, JournalFlag
from envherd.workers.errors import EnvherdError
from envherd.workers.messages import Prepare
from envherd.workers.sending.importing import own_folders
from envherd.workers.sending.pickling import dumps

SCHEMA = "envherd.capsule/1"
SUFFIX = ".capsule"
_FACTS = "capsule.json"
_PICKLE = "factory.pickle"
_LARGEST_TEXT = 1 << 28  # bytes; an evaluation of a million episodes has 200 MB
#: Names of dtypes: whatever the bytes are, they are numbers.
_DTYPES = frozenset(str(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDG")


class CapsuleError(EnvherdError, RuntimeError):
    """A file is no complete capsule, or one that cannot be run again."""


class DamagedFile(EnvherdError, ValueError):
    """A file of text is not what it should be."""


@dataclass(frozen=True)
class Capsule:
    """What a file holds.

    Attributes:
        facts: plain data; see `_FORMS` for those that are always there.
        inputs: of each step, action first: key -> `[steps, ...]`.
        pickled: the factory and its keyword arguments, which stand for any code; or None.
    """

    facts: dict[str, Any]
    inputs: dict[tuple[str, ...], np.ndarray]
    pickled: bytes | None = None

    def save(self, path: Path) -> None:
        """Write a new file.

        Raises:
            FileExistsError: there is one.
        """
        facts = {
            "schema": SCHEMA,
            **self.facts,
            "inputs": [
                [list(key), list(array.shape), str(array.dtype)]
                for key, array in self.inputs.items()
            ],
        }
        memory = io.BytesIO()
        with zipfile.ZipFile(memory, "w") as archive:
            archive.writestr(_FACTS, json.dumps(facts, indent=2) + "\n")
            for index, array in enumerate(self.inputs.values()):
                archive.writestr(f"input{index}", array.tobytes())
            if self.pickled is not None:
                archive.writestr(_PICKLE, self.pickled)
        with path.open("xb") as file:
            file.write(memory.getvalue())


def load_capsule(path: Path) -> Capsule:
    """Read a file.

    Raises:
        CapsuleError: it is no complete capsule.
    """
    with path.open("rb") as file:
        try:
            return _read(file)
        except Exception as error:  # whatever the bytes are; those of `zipfile` and `json` have many types
            raise CapsuleError(
                f"reading {path} failed: expected a capsule, got a file that is none, or is damaged ({error!s:.300}). "
                f"ExecutorOptions(capsules=DIR) writes them."
            ) from None


def text_of(path: Path) -> str:
    """Return what a file holds; refuses devices and pipes, which may have no end, and large files.

    Reads as much as the file's size, which is 0 for files of the kernel: reading these may wait.

    Raises:
        OSError, ValueError: there is no such file, or it cannot be read.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_TEXT:
        raise ValueError(
            f"a device, a pipe or a folder, or more than {_LARGEST_TEXT >> 20} MiB"
        )
    with path.open("rb") as file:
        return file.read(status.st_size).decode()


def _read(file: IO[bytes]) -> Capsule:
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        # Members may be compressed, or lie over each other: a small file would take much memory.
        if (
            any(one.compress_type != zipfile.ZIP_STORED for one in members)
            or sum(max(one.file_size, one.compress_size) for one in members)
            > os.fstat(file.fileno()).st_size
        ):
            raise ValueError("members are compressed, or larger than the file")
        facts = json.loads(archive.read(_FACTS))
        for name, is_valid in _FORMS.items():
            if (
                not isinstance(facts, Mapping)
                or name not in facts
                or not is_valid(facts[name])
            ):
                raise ValueError(f"no valid {name!r}")
        inputs = {
            tuple(key): _array(archive.read(f"input{index}"), shape, dtype)
            for index, (key, shape, dtype) in enumerate(facts.pop("inputs"))
        }
        pickled = archive.read(_PICKLE) if _PICKLE in archive.namelist() else None
    return Capsule(facts, inputs, pickled)


def _array(data: bytes, shape: Sequence[int], dtype: str) -> np.ndarray:
    if dtype not in _DTYPES or len(data) != math.prod(shape) * np.dtype(dtype).itemsize:
        raise ValueError(f"{len(data)} bytes for {dtype!r} {shape}")
    # A copy, because an array over bytes cannot be written to.
    return np.frombuffer(data, dtype).reshape(shape).copy()


class Form(NamedTuple):
    """What a value of a file, or of a checkpoint, must be.

    Attributes:
        expected: in words.
        is_valid: returns whether a value is so.
    """

    expected: str
    is_valid: Callable[[Any], bool]


def is_count(value: Any, least: int = 0, most: int = 2**63 - 1) -> bool:
    """Return whether a value of a file is an integer from `least` to `most`."""
    return (
        isinstance(value, int)
        and not isinstance(value, bool)
        and least <= value <= most
    )


def is_root_seed(value: Any) -> bool:
    """Return whether a value of a file is a root seed; these have no limit, but a text of 4,300 digits has."""
    return is_count(value, most=2**4096)


def _is_leaf(value: Any) -> bool:
    if not (isinstance(value, list) and len(value) == 3):
        return False
    key, shape, dtype = value
    return (
        isinstance(dtype, str)
        and isinstance(key, list)
        and all(isinstance(part, str) for part in key)
        and all(map(is_count, shape))
    )


def is_line(value: Any) -> bool:
    """Return whether a value of a file is a text that a terminal can show."""
    return isinstance(value, str) and value.isprintable()


def _are_lines(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_line, value))


def _is_of_failure(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, str)
        or (isinstance(value, int) and abs(value) < 2**31)
    )


#: Option of a named factory -> whether a value can be one. None says which env the factory builds.
_FIELDS: dict[str, Callable[[Any], bool]] = {
    "render_mode": lambda value: value == "rgb_array",
    "max_steps": lambda value: is_count(value, 1),
    "horizon": lambda value: is_count(value, 1),
    "num_rows": lambda value: is_count(value, 1),
    "device": lambda value: (
        isinstance(value, str) and re.fullmatch("cpu|cuda(:[0-9]+)?", value) is not None
    ),
    "group_map": lambda value: (
        isinstance(value, dict) and all(map(_are_lines, value.values()))
    ),
    **dict.fromkeys(("roles", "keys", "drop"), _are_lines),
    **dict.fromkeys(
        (
            "return_state",
            "continuous_actions",
            "world_rgb",
            "positions",
            "deterministic",
            "fast_reset",
            "bots",
        ),
        lambda value: isinstance(value, bool),
    ),
}


#: Fact -> whether a value can be one.
_FORMS: dict[str, Callable[[Any], bool]] = {
    "schema": lambda value: value == SCHEMA,
    "env": lambda value: value is None or is_line(value),
    "env_kwargs": lambda value: isinstance(value, dict),
    "fields": lambda value: (
        isinstance(value, dict)
        and all(name in _FIELDS and _FIELDS[name](value[name]) for name in value)
    ),
    "search": _are_lines,
    "missing": _are_lines,
    "options": lambda value: isinstance(value, dict),
    "reset_options": lambda value: value is None or isinstance(value, dict),
    "failure": lambda value: (
        isinstance(value, dict) and all(map(_is_of_failure, value.values()))
    ),
    "root_seed": is_root_seed,
    "env_id": is_count,
    "episode": is_count,
    "seed": lambda value: value is None or is_count(value),
    "num_steps": is_count,
    "observation": lambda value: value is None or is_line(value),
    "inputs": lambda value: isinstance(value, list) and all(map(_is_leaf, value)),
}


# ---- writer ------------------------------------------------------------------------------------
# Crash capsules: when an env has failed, write what is needed to run its episode again.
#
# Guarantees: nothing here raises, and nothing is written unless `ExecutorOptions.capsules` asks for it. What a capsule
# cannot have (a factory without a name, an argument that is no plain data) is listed in it as missing.

#: Packages whose versions are noted if they are installed.
_PACKAGES = (
    *(
        "envherd",
        "numpy",
        "torch",
        "torchrl",
        "gymnasium",
        "dm-meltingpot",
        "dmlab2d",
        "dm-env",
        "dm-control",
    ),
    *("pettingzoo", "mujoco", "ale-py", "vmas", "envpool", "stable-baselines3"),
)
#: Options that change how an env runs, or when it is given up.
OPTIONS = (
    *("check_finite", "isolate_rng", "episode_statistics", "episode_seeds", "env_type"),
    *("step_timeout_s", "reset_timeout_s", "worker_threads"),
)
#: What a capsule may lack so that its episode cannot be run again.
FATAL = (
    _BIG_SEED := "its seed, which is above 2**63",
    _FIRST := "its first actions (Capsules.journal_bytes)",
    _PARTS := "the resets of single rows of the env",
    _SIDE := "its actions of variable shape or type",
)
_OUTPUT_LINES = 60


class CapsuleWriter:
    """Writes the capsules of one pool.

    Args:
        rules: of the options.
        pool: a `SerialPool`, or a `WorkerPool`; its slab has journals.

    Attributes:
        latest_root: returns an env's present root by key; None until the engine sets it.
    """

    def __init__(self, rules: Capsules, pool: Any) -> None:
        self._rules = rules
        self._pool = pool
        self._directory = Path(rules.directory).absolute()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                error.errno,
                f"capsules failed: expected a folder that exists or can be made, got {str(rules.directory)!r} "
                f"({error.strerror}). Pass another: ExecutorOptions(capsules=...).",
            ) from None
        self._reset_options: dict[int, dict[str, Any]] = {}
        self.latest_root: Callable[[int], Mapping[Key, np.ndarray]] | None = None

    def note(self, message: Prepare) -> None:
        """Keep the keyword arguments of an env's next reset."""
        if message.options:
            self._reset_options[message.env_id] = message.options

    def add_to(
        self,
        error: EnvherdError,
        worker_id: int,
        fault: Frame | None = None,
    ) -> EnvherdError:
        """Write the capsule of a failure in a step or reset; return the error, which then names the file.

        Args:
            error: the loss of a worker, or what envs have raised.
            worker_id: of the pool.
            fault: of the env; None for a loss.
        """
        context = error.context
        if fault is None:
            env_id = context.get("env_id")
            phase = context.get("phase")
            env_id = None if env_id is None else env_id - numbering.first_env_id
        else:
            env_id = fault["env_id"]
            phase = fault["phase"]
        # The journal is of steps and resets, and a loss that is declared again has its file already.
        if (
            (fault is None and "capsule" in context)
            or env_id is None
            or phase not in ("step", "reset")
        ):
            return error
        failure = {
            "error": type(error).__name__,
            "phase": phase,
            "type": None if fault is None else fault["type_name"],
            "message": error.message if fault is None else fault["message"],
            "exit_code": context.get("exit_code"),
            "stack": error.remote_traceback if fault is None else fault["traceback"],
        }
        try:
            path, sentence = self._write(env_id, worker_id, failure)
        except Exception as problem:  # a full disk must not hide the failure
            path = None
            sentence = f"Its capsule could not be written: {type(problem).__name__}: {problem}."
        return with_sentence(error, sentence, capsule=context.get("capsule") or path)

    def _write(
        self,
        env_id: int,
        worker_id: int,
        failure: dict[str, Any],
    ) -> tuple[str | None, str]:
        """Write a capsule; return its path, and a sentence that says so."""
        group_index, row = self._pool.slab.plan.place(env_id)
        group = self._pool.slab.groups[group_index]
        journal = Journal(group.journal, group.inputs, row)
        steps, episode, seed, flags = journal.facts.tolist()
        if not flags & JournalFlag.BEGUN:
            return None, "It has no capsule: the env was never reset."
        if len(list(self._directory.glob(f"*{SUFFIX}"))) >= self._rules.max_files:
            return (
                None,
                f"No capsule was written: {self._directory} has {self._rules.max_files} (Capsules.max_files).",
            )
        keys = [leaf.key for leaf in input_leaves(group.spec)]
        inputs = {
            key: _unrolled(rows, steps)
            for key, rows in zip(keys, journal.rows, strict=True)
        }
        root = (
            None if steps == 0 or self.latest_root is None else self.latest_root(env_id)
        )
        has_options = flags & JournalFlag.WITH_OPTIONS
        reset_options = (
            _as_plain(self._reset_options.get(env_id)) if has_options else None
        )
        call = self._pool.blueprint.call_of(env_id)
        env, missing = self._env_of(call)
        reasons = {
            # The journal has seeds as int64, and a negative number for one that does not fit.
            _BIG_SEED: flags & JournalFlag.SEEDED and seed < 0,
            "a seed (the env's generator had gone on)": not flags & JournalFlag.SEEDED,
            "the arguments of the reset (no plain data)": has_options
            and reset_options is None,
            _FIRST: steps > journal.num_rows,
            _PARTS: flags & JournalFlag.IN_PARTS,
            "what the program called, set or loaded during the episode": flags
            & JournalFlag.CHANGED,
            _SIDE: len(keys) < len(group.spec.action) + len(group.spec.state),
        }
        facts = {
            "failure": failure,
            **env,
            "missing": [
                *missing,
                *(what for what, is_missing in reasons.items() if is_missing),
            ],
            "env_id": self._pool.options.first_env_id + env_id,
            "episode": episode,
            "seed": seed if flags & JournalFlag.SEEDED and seed >= 0 else None,
            "reset_options": reset_options,
            "num_steps": steps,
            "root_seed": self._pool.root_seed_of(worker_id),
            "observation": None if root is None else digest(group.spec, root),
            "options": {name: getattr(self._pool.options, name) for name in OPTIONS},
            "family": group.spec.family,
            "versions": {"python": platform.python_version(), **_versions()},
            "output": "\n".join(
                self._pool.worker_output(worker_id).splitlines()[-_OUTPUT_LINES:]
            ),
            "written_at": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        pickled = None
        if self._rules.pickle:
            pickled = dumps((self._pool.pickled(call), call.sent.kwargs))
        path = self._save(
            Capsule(facts, inputs, pickled),
            f"env{facts['env_id']}-episode{episode}-step{steps}",
        )
        return str(
            path
        ), f"The episode is in {path}: `envherd replay {path}` runs it again."

    @staticmethod
    def _env_of(call: EnvCall) -> tuple[dict[str, Any], list[str]]:
        """Return the facts about how an env is built, and what is missing among them."""
        found = reference_of(call.factory)
        kwargs = _as_plain({**found.get("kwargs", {}), **call.sent.kwargs})
        fields = _as_plain(found.get("fields", {}))
        facts = {
            "env": found.get("env"),
            "env_kwargs": kwargs or {},
            "fields": fields or {},
            "search": own_folders(),
        }
        is_missing = {
            "a name of the env (its factory is not a function of a module)": facts[
                "env"
            ]
            is None,
            "the arguments of the env (no plain data)": kwargs is None,
            "the options of the factory (no plain data)": fields is None,
        }
        return facts, [what for what, applies in is_missing.items() if applies]

    def _save(self, capsule: Capsule, name: str) -> Path:
        for number in itertools.count(1):
            path = self._directory / (
                name + (f"-{number}" if number > 1 else "") + SUFFIX
            )
            with contextlib.suppress(FileExistsError):
                capsule.save(path)
                break
        return path


def digest(spec: EnvSpec, root: Mapping[Key, Any]) -> str:
    """Return a hash of the observation in an env's root.

    Times of episodes are left out, as are entries of infos, which an env that runs again does not have.
    """
    found = hashlib.blake2b(digest_size=16)
    for leaf in spec.observation:
        if not (leaf.is_side or leaf.key in spec.episode_keys or leaf.key[0] == "info"):
            found.update(np.ascontiguousarray(root[leaf.key]).tobytes())
    return found.hexdigest()


def _unrolled(rows: np.ndarray, steps: int) -> np.ndarray:
    """Return the kept inputs in the order of their steps."""
    return (
        rows[:steps].copy()
        if steps <= len(rows)
        else np.roll(rows, -(steps % len(rows)), axis=0)
    )


def _as_plain(value: Any) -> Any:
    """Return a value as JSON has it (tuples as lists), or None if JSON has no such value."""
    try:
        return _plain(value)
    except TypeError:
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(value)


def _versions() -> dict[str, str]:
    """Return the versions of the packages that envs come from."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
