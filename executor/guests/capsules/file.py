"""The file of a crash capsule: facts as JSON, and the bytes of the actions, in a zip archive that is not compressed.

Guarantees: reading a capsule runs no code. Nothing is unpickled or imported; types and sizes are checked, and whatever
is not a complete capsule raises one error. A file is never replaced.
"""

import io
import json
import math
import os
import re
import stat
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from envherd.workers.errors import EnvherdError

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
