"""A rollout on disk: a memory-mapped TensorDict, written step by step, so that memory does not grow.

Batches with text, objects or differing shapes are the exception: they stay in memory until `finish` writes them.

data = tensordict.TensorDict.load_memmap(DIR, allow_pickle=False)  # [N, T], with the keys of `ParallelEnv.rollout`

Guarantees: no file is replaced or removed. Loading a rollout runs no code: nothing is unpickled, imported or called.
"""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
)

from envherd.executor.guests.capsules.file import (
    Form,
    is_count,
    is_line,
    is_root_seed,
    text_of,
)

SCHEMA = "envherd.stored/1"
#: The file in the directory that is not part of the TensorDict.
_FACTS = "envherd.json"


class StoreError(RuntimeError):
    """The directory has other files or no rollout, or the rollout does not fit on the disk."""


class RolloutStore:
    """Writes batches `[N]`, one per step, to a directory as one batch `[N, T]`.

    Args:
        directory: created if it does not exist.
        num_steps: T, unless `finish` is called earlier.

    Raises:
        StoreError: the directory is not empty.
    """

    def __init__(self, directory: Path, num_steps: int) -> None:
        self.directory = directory
        self.num_steps = num_steps
        self.num_stored = 0
        self._on_disk: TensorDictBase | None = None
        self._in_memory: list[TensorDictBase] = []
        found = next(directory.iterdir(), None) if directory.is_dir() else directory
        if found is not None and os.path.lexists(found):
            raise StoreError(
                f"writing {directory} failed: expected a new or empty directory, got {found}. Remove it, or choose "
                f"another directory."
            )

    def add(self, td: TensorDictBase) -> None:
        """Store the batch `[N]` of a step, with action and `next`; it is copied.

        Raises:
            StoreError: at the first step, if the disk has no room for `num_steps` such batches.
        """
        if self.num_stored == 0:
            # Checked first, because writing to a memory map on a full disk kills the process.
            size = td.bytes() * self.num_steps
            free = shutil.disk_usage(self.directory.parent).free
            if size > free:
                raise StoreError(
                    f"writing {self.directory} failed: expected room for {size / 1e9:,.1f} GB, got {free / 1e9:,.1f} "
                    f"GB. Collect fewer steps or envs, or name a directory on another disk."
                )
            if not has_odd_leaves(td):
                shape = (td.shape[0], self.num_steps, *td.shape[1:])
                self._on_disk = (
                    td.unsqueeze(1).expand(shape).memmap_like(self.directory)
                )
        if self._on_disk is None:
            self._in_memory.append(td.clone())
        else:
            self._on_disk[:, self.num_stored].update_(td)
        self.num_stored += 1

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Complete the files; cut them to the number of stored steps, at least one.

        Args:
            facts: needed to run it again; see `load_rollout`.
        """
        if self._on_disk is None:
            LazyStackedTensorDict.maybe_dense_stack(self._in_memory, 1).memmap(
                self.directory
            )
        elif self.num_stored < self.num_steps:
            with tempfile.TemporaryDirectory(
                prefix=".shorter-",
                dir=self.directory,
            ) as shorter:
                self._on_disk[:, : self.num_stored].contiguous().memmap(shorter)
                for path in Path(shorter).rglob("*"):
                    if path.is_file():
                        os.replace(path, self.directory / path.relative_to(shorter))
        (self.directory / _FACTS).write_text(
            json.dumps({"schema": SCHEMA, **facts}, indent=2) + "\n"
        )


def load_rollout(directory: Path) -> tuple[TensorDictBase, dict[str, Any]]:
    """Return a stored rollout `[N, T]` and the facts to run it again.

    Returns:
        The batch (memory-mapped), and a dict with `env` (a name, which may stand for any code), `env_kwargs`,
        `max_steps` and `seed`. Their types are checked; their meaning is not.

    Raises:
        StoreError: the directory holds no rollout, one that was not completed, or one that another version wrote.
    """
    try:
        facts = json.loads(text_of(directory / _FACTS))
    except (OSError, ValueError) as error:
        got = str(error)
        if not directory.is_dir():
            got = "a file" if directory.exists() else "no such folder"
        elif not (directory / _FACTS).exists():
            got = f"a folder without {_FACTS}"
        raise StoreError(
            f"reading {directory} failed: expected the folder of a stored rollout, got {got}. "
            f"`envherd rollout ENV --out DIR` writes one."
        ) from None
    facts = facts if isinstance(facts, dict) else {}
    for name, form in _FORMS.items():
        if not form.is_valid(facts.get(name)):
            raise StoreError(
                f"reading {directory / _FACTS} failed: expected {name} as {form.expected}, got {facts.get(name)!r}."
            )
    try:
        _refuse_growth(directory)
        return TensorDict.load_memmap(directory, allow_pickle=False), facts
    except Exception as error:  # the files may hold anything
        raise StoreError(
            f"reading {directory} failed: expected a memory-mapped TensorDict without pickles, got "
            f"{type(error).__name__}: {error}"
        ) from error


def _refuse_growth(directory: Path) -> None:
    """Refuse leaves that are larger than their files, and links: a memory map would write to the file to make it grow.

    Raises:
        Exception: of any type.
    """
    for path in directory.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path.name!r}, which is no file or folder")
    for path in directory.rglob("meta.json"):
        sizes = {
            file.name: file.stat().st_size for file in path.parent.glob("*.memmap")
        }
        for key, leaf in json.loads(text_of(path)).items():
            if isinstance(leaf, dict) and leaf.get("dtype") is not None:
                names = {
                    f"{key}.memmap",
                    f"{quote(key, safe=_UNQUOTED)}.memmap",
                } & sizes.keys()
                size = (
                    math.prod(leaf["shape"])
                    * getattr(torch, leaf["dtype"].removeprefix("torch.")).itemsize
                )
                # A leaf without elements may have no file.
                is_alone = len(names) == 1 or not (names or size)
                if (
                    leaf.get("is_nested")
                    or not is_alone
                    or not all(0 <= size <= sizes[name] for name in names)
                ):
                    raise ValueError(
                        f"{size} bytes of {key!r}, whose files have {[sizes[name] for name in names]}"
                    )


#: Characters that TensorDict keeps in the names of files.
_UNQUOTED = "".join(map(chr, range(33, 127))).translate(
    str.maketrans("", "", '/<>:"|?*\\%')
)
#: Fact -> what it must be.
_FORMS = {
    "schema": Form(SCHEMA, lambda value: value == SCHEMA),
    "env": Form("a printable text", is_line),
    "env_kwargs": Form("an object", lambda value: isinstance(value, dict)),
    "max_steps": Form(
        "an integer of at least 1 or null",
        lambda value: value is None or is_count(value, 1),
    ),
    "seed": Form("an integer of at least 0", is_root_seed),
}


def has_odd_leaves(td: TensorDictBase) -> bool:
    """Return whether a batch has leaves without a fixed size on disk: text, objects, differing shapes."""
    if isinstance(td, LazyStackedTensorDict) or not isinstance(td, TensorDict):
        return True
    return any(
        is_tensor_collection(value) and has_odd_leaves(value) for value in td.values()
    )
