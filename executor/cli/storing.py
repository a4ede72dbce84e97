"""A rollout on disk: a memory-mapped TensorDict, written step by step, so that memory does not grow.

Batches with text, objects or differing shapes are the exception: they stay in memory until `finish` writes them.

data = tensordict.TensorDict.load_memmap(DIR, allow_pickle=False)  # [N, T], with the keys of `ParallelEnv.rollout`
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
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
        if not _may_be_replaced(directory):
            raise StoreError(
                f"writing {directory} failed: expected a new or empty directory or an earlier rollout, got other "
                f"files. Choose another directory."
            )
        self.directory = directory
        self.num_steps = num_steps
        self.num_stored = 0
        self._on_disk: TensorDictBase | None = None
        self._in_memory: list[TensorDictBase] = []

    def add(self, td: TensorDictBase) -> None:
        """Store the batch `[N]` of a step, with action and `next`; it is copied.

        Raises:
            StoreError: at the first step, if the disk has no room for `num_steps` such batches.
        """
        if self.num_stored == 0:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            self._require_room(td.bytes() * self.num_steps)
            self._clear()
            if not has_odd_leaves(td):
                whole = td.unsqueeze(1).expand(td.shape[0], self.num_steps, *td.shape[1:])
                self._on_disk = whole.memmap_like(self.directory)
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
            shorter = self.directory.with_name(f".{self.directory.name}.shorter")
            try:
                self._on_disk[:, : self.num_stored].contiguous().memmap(shorter)
                self._clear()
                shorter.rename(self.directory)
            finally:
                shutil.rmtree(shorter, ignore_errors=True)
        self._on_disk = None
        self._in_memory = []
        (self.directory / _FACTS).write_text(json.dumps(dict(facts), indent=2) + "\n")

    def _require_room(self, size: int) -> None:
        # Checked first, because writing to a memory map on a full disk kills the process.
        free = shutil.disk_usage(self.directory.parent).free
        if size > free:
            raise StoreError(
                f"writing {self.directory} failed: expected room for {size / 1e9:,.1f} GB, got {free / 1e9:,.1f} GB. "
                f"Collect fewer steps or envs, or name a directory on another disk."
            )

    def _clear(self) -> None:
        if self.directory.exists():
            shutil.rmtree(self.directory)


def load_rollout(directory: Path) -> tuple[TensorDictBase, dict[str, Any]]:
    """Return a stored rollout `[N, T]` and the facts to run it again.

    Returns:
        The batch (memory-mapped), and a dict with `env`, `env_kwargs`, `max_steps`, `seed` and `options`.

    Raises:
        StoreError: the directory holds no rollout, or one that another version wrote.
    """
    try:
        facts = json.loads((directory / _FACTS).read_text())
        data = TensorDict.load_memmap(directory, allow_pickle=False)
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
    return data, facts


def _may_be_replaced(directory: Path) -> bool:
    """Return whether a directory is missing, empty or a stored TensorDict, so that no other files are lost."""
    if not directory.exists():
        return True
    if not directory.is_dir():
        return False
    mark = directory / "meta.json"
    is_stored = mark.is_file() and "tensordict." in mark.read_text(errors="replace")
    return is_stored or not any(directory.iterdir())


def has_odd_leaves(td: TensorDictBase) -> bool:
    """Return whether a batch has leaves without a fixed size on disk: text, objects, differing shapes."""
    if isinstance(td, LazyStackedTensorDict) or not isinstance(td, TensorDict):
        return True
    return any(is_tensor_collection(value) and has_odd_leaves(value) for value in td.values())
