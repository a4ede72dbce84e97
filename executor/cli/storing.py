"""A rollout on disk: a memory-mapped TensorDict, written step by step, so that memory does not grow.

Batches with text, objects or differing shapes are the exception: they stay in memory until `finish` writes them.

data = tensordict.TensorDict.load_memmap(DIR, allow_pickle=False)  # [N, T], with the keys of `ParallelEnv.rollout`

Guarantees: only files that a `RolloutStore` has written are replaced or removed; `envherd.json` in the directory lists
them. Loading a rollout runs no code: nothing is unpickled, imported or called.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensor_collection

SCHEMA = "envherd.stored/1"
#: The file in the directory that is not part of the TensorDict.
_FACTS = "envherd.json"


class StoreError(RuntimeError):
    """The directory has other files or no rollout, or the rollout does not fit on the disk."""


class RolloutStore:
    """Writes batches `[N]`, one per step, to a directory as one batch `[N, T]`.

    Args:
        directory: created if it does not exist; an earlier rollout in it is replaced.
        num_steps: T, unless `finish` is called earlier.

    Raises:
        StoreError: the directory has other files.
    """

    def __init__(self, directory: Path, num_steps: int) -> None:
        self.directory = directory
        self.num_steps = num_steps
        self.num_stored = 0
        self._on_disk: TensorDictBase | None = None
        self._in_memory: list[TensorDictBase] = []
        self._earlier = self._files_of_earlier()
        self._others: set[str] = set()  # files that came into the directory after the check

    def _files_of_earlier(self) -> set[str]:
        """Return the files of the rollout to replace; refuse a directory that has any others."""
        if not self.directory.exists():
            return set()
        known: set[str] = set()
        if self.directory.is_dir():
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                facts = _read_facts(self.directory)
                known = {_FACTS, *facts["files"]} if facts.get("schema") == SCHEMA else set()
            others = sorted(_files_in(self.directory) - known)
        else:
            others = [""]
        if others:
            raise StoreError(
                f"writing {self.directory} failed: expected a new or empty directory or an earlier rollout without "
                f"other files, got {self.directory / others[0]}, which `envherd rollout --out` has not written. Choose "
                f"another directory."
            )
        return known

    def add(self, td: TensorDictBase) -> None:
        """Store the batch `[N]` of a step, with action and `next`; it is copied.

        Raises:
            StoreError: at the first step, if the disk has no room for `num_steps` such batches.
        """
        if self.num_stored == 0:
            self._require_room(td.bytes() * self.num_steps)
            self._remove_earlier()
            if not has_odd_leaves(td):
                whole = td.unsqueeze(1).expand(td.shape[0], self.num_steps, *td.shape[1:])
                self._on_disk = whole.memmap_like(self.directory)
                self._write_facts({})  # if the process is killed, the files are known as envherd's
        if self._on_disk is None:
            self._in_memory.append(td.clone())
        else:
            self._on_disk[:, self.num_stored].update_(td)
        self.num_stored += 1

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Complete the files; cut them to the number of stored steps.

        Args:
            facts: needed to run it again; see `load_rollout`.
        """
        if self.num_stored == 0:
            return
        if self._on_disk is None:
            LazyStackedTensorDict.maybe_dense_stack(self._in_memory, 1).memmap(self.directory)
        elif self.num_stored < self.num_steps:
            shorter = Path(tempfile.mkdtemp(prefix=".shorter-", dir=self.directory))
            try:
                self._on_disk[:, : self.num_stored].contiguous().memmap(shorter)
                for name in _files_in(shorter):
                    os.replace(shorter / name, self.directory / name)
            finally:
                shutil.rmtree(shorter, ignore_errors=True)
        self._on_disk = None
        self._in_memory = []
        self._write_facts(facts)

    def _write_facts(self, facts: Mapping[str, Any]) -> None:
        files = sorted(_files_in(self.directory) - self._others - {_FACTS})
        text = json.dumps({"schema": SCHEMA, **facts, "files": files}, indent=2)
        (self.directory / _FACTS).write_text(text + "\n")

    def _require_room(self, size: int) -> None:
        # Checked first, because writing to a memory map on a full disk kills the process.
        free = shutil.disk_usage(self.directory.parent).free
        if size > free:
            raise StoreError(
                f"writing {self.directory} failed: expected room for {size / 1e9:,.1f} GB, got {free / 1e9:,.1f} GB. "
                f"Collect fewer steps or envs, or name a directory on another disk."
            )

    def _remove_earlier(self) -> None:
        """Remove the files of the earlier rollout, and their folders if these are then empty."""
        folders: set[Path] = set()
        for name in _files_in(self.directory) & self._earlier:
            (self.directory / name).unlink()
            folders.update(Path(name).parents)
        for folder in sorted(folders - {Path()}, key=lambda one: -len(one.parts)):
            with contextlib.suppress(OSError):
                (self.directory / folder).rmdir()
        self._others = _files_in(self.directory)


def load_rollout(directory: Path) -> tuple[TensorDictBase, dict[str, Any]]:
    """Return a stored rollout `[N, T]` and the facts to run it again.

    Returns:
        The batch (memory-mapped), and a dict with `env` (a name, which may stand for any code), `env_kwargs`,
        `max_steps`, `seed` and `options`. Their types are checked; their meaning is not.

    Raises:
        StoreError: the directory holds no rollout, one that was not completed, or one that another version wrote.
    """
    try:
        facts = _read_facts(directory)
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
    if facts.get("schema") != SCHEMA:
        raise StoreError(f"reading {directory} failed: expected {SCHEMA}, got {facts.get('schema')!r}.")
    if "env" not in facts:
        raise StoreError(
            f"reading {directory} failed: expected a complete rollout, got one whose process was killed while it wrote."
        )
    for name, (expected, is_valid) in _FORMS.items():
        if name not in facts or not is_valid(facts[name]):
            raise StoreError(
                f"reading {directory / _FACTS} failed: expected {name} as {expected}, got {facts.get(name)!r}."
            )
    try:
        return TensorDict.load_memmap(directory, allow_pickle=False), facts
    except Exception as error:  # the files may hold anything
        raise StoreError(
            f"reading {directory} failed: expected a memory-mapped TensorDict without pickles, got "
            f"{type(error).__name__}: {error}"
        ) from error


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


#: Fact -> its form, and what checks it.
_FORMS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "env": ("a printable text", lambda value: isinstance(value, str) and value.isprintable()),
    "env_kwargs": ("an object", lambda value: isinstance(value, dict)),
    "max_steps": ("an integer of at least 1 or null", lambda value: value is None or _is_count(value, 1)),
    "seed": ("an integer of at least 0", lambda value: _is_count(value, 0)),
    "options": ("an object", lambda value: isinstance(value, dict)),
}


def _read_facts(directory: Path) -> dict[str, Any]:
    """Return the facts in a directory.

    Raises:
        OSError, ValueError: there are none.
    """
    facts = json.loads((directory / _FACTS).read_text())
    if not isinstance(facts, dict):
        raise ValueError(f"expected an object in {_FACTS}, got {type(facts).__name__}")  # noqa: TRY004  # of the file
    return facts


def _files_in(directory: Path) -> set[str]:
    """Return the paths of all files and links below a directory, relative to it."""
    found: set[str] = set()
    for folder, folders, files in os.walk(directory):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        found.update(os.path.relpath(os.path.join(folder, name), directory) for name in (*files, *links))
    return found


def has_odd_leaves(td: TensorDictBase) -> bool:
    """Return whether a batch has leaves without a fixed size on disk: text, objects, differing shapes."""
    if isinstance(td, LazyStackedTensorDict) or not isinstance(td, TensorDict):
        return True
    return any(is_tensor_collection(value) and has_odd_leaves(value) for value in td.values())
