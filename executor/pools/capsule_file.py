"""The file of a crash capsule: facts as JSON, and the bytes of the actions, in a zip archive that is not compressed.

Guarantees: reading a capsule runs no code. Nothing is unpickled or imported; types and sizes are checked, and whatever
is not a complete capsule raises one error. A file is never replaced.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from envherd.workers.errors import EnvherdError

SCHEMA = "envherd.capsule/1"
SUFFIX = ".capsule"
_FACTS, _PICKLE = "capsule.json", "factory.pickle"
_KINDS = "biufc"  # of numpy dtypes: whatever the bytes are, they are numbers


class CapsuleError(EnvherdError, RuntimeError):
    """A file is no complete capsule, or one that cannot be run again."""


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
        leaves = [[list(key), list(array.shape), str(array.dtype)] for key, array in self.inputs.items()]
        text = json.dumps({"schema": SCHEMA, **self.facts, "inputs": leaves}, indent=2)
        memory = io.BytesIO()
        with zipfile.ZipFile(memory, "w") as archive:
            archive.writestr(_FACTS, text + "\n")
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
    try:
        with zipfile.ZipFile(path) as archive:
            facts = json.loads(archive.read(_FACTS))
            _check(facts, archive.infolist())
            inputs = {
                tuple(key): _array(archive.read(f"input{index}"), shape, dtype)
                for index, (key, shape, dtype) in enumerate(facts.pop("inputs"))
            }
            pickled = archive.read(_PICKLE) if _PICKLE in archive.namelist() else None
    except (zipfile.BadZipFile, ValueError, TypeError, KeyError, RecursionError, EOFError, OverflowError) as error:
        raise CapsuleError(
            f"reading {path} failed: expected a capsule, got a file that is none, or is damaged ({error}). "
            f"ExecutorOptions(capsules=DIR) writes them."
        ) from None
    return Capsule(facts, inputs, pickled)


def _array(data: bytes, shape: Sequence[int], dtype: str) -> np.ndarray:
    kind = np.dtype(dtype)
    if kind.kind not in _KINDS or len(data) != math.prod(shape) * kind.itemsize:
        raise ValueError(f"{len(data)} bytes for {dtype} {shape}")
    return np.frombuffer(data, kind).reshape(shape).copy()


def is_count(value: Any, least: int = 0) -> bool:
    """Return whether a value of a file is an integer of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_leaf(value: Any) -> bool:
    if not (isinstance(value, list) and len(value) == 3 and isinstance(value[2], str)):
        return False
    key, shape, _ = value
    return isinstance(key, list) and all(isinstance(part, str) for part in key) and all(map(is_count, shape))


def is_line(value: Any) -> bool:
    """Return whether a value of a file is a text that a terminal can show."""
    return isinstance(value, str) and value.isprintable()


#: Fact -> whether a value can be one.
_FORMS: dict[str, Callable[[Any], bool]] = {
    "schema": lambda value: value == SCHEMA,
    "env": lambda value: value is None or is_line(value),
    "env_kwargs": lambda value: isinstance(value, dict),
    "fields": lambda value: isinstance(value, dict),
    "search": lambda value: isinstance(value, list) and all(map(is_line, value)),
    "missing": lambda value: isinstance(value, list) and all(map(is_line, value)),
    "options": lambda value: isinstance(value, dict),
    "reset_options": lambda value: value is None or isinstance(value, dict),
    "failure": lambda value: isinstance(value, dict),
    "root_seed": is_count,
    "env_id": is_count,
    "episode": is_count,
    "seed": lambda value: value is None or is_count(value),
    "num_steps": is_count,
    "observation": lambda value: value is None or is_line(value),
    "inputs": lambda value: isinstance(value, list) and all(map(_is_leaf, value)),
}


def _check(facts: Any, members: Sequence[zipfile.ZipInfo]) -> None:
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):  # a small file may hold a huge one
        raise ValueError("members are compressed")
    for name, is_valid in _FORMS.items():
        if not isinstance(facts, Mapping) or name not in facts or not is_valid(facts[name]):
            raise ValueError(f"no valid {name!r}")
