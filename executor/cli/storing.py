"""A rollout on disk: a memory-mapped TensorDict, written step by step, so that memory does not grow.

data = tensordict.TensorDict.load_memmap(DIR, allow_pickle=False)  # [N, T], as `ParallelEnv.rollout` gives it
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensor_collection

SCHEMA = "envherd.stored/1"
#: The file besides those of the TensorDict.
_FACTS = "envherd.json"


class StoreError(RuntimeError):
    """The directory cannot be used for a rollout, or the disk is too small for it."""


class RolloutStore:
    """Takes one batch `[N]` after another and leaves `[N, T]` in a directory.

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
        """Store a step; batch `[N]` with action and `next`, copied.

        Raises:
            StoreError: with the first step: the disk has no room for `num_steps` of them.
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
        """Make what is on disk complete, and as long as what was stored.

        Args:
            facts: how to run it again; see `load_rollout`.
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
        # Checked before, because a full disk under a memory map kills the process.
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
    """Tell whether nothing is lost that was not written here: only what looks like a stored TensorDict goes."""
    if not directory.exists():
        return True
    if not directory.is_dir():
        return False
    mark = directory / "meta.json"
    is_stored = mark.is_file() and "tensordict." in mark.read_text(errors="replace")
    return is_stored or not any(directory.iterdir())


def has_odd_leaves(td: TensorDictBase) -> bool:
    """Tell whether a batch has leaves that have no fixed place on disk: text, objects, differing shapes."""
    if isinstance(td, LazyStackedTensorDict) or not isinstance(td, TensorDict):
        return True
    return any(is_tensor_collection(value) and has_odd_leaves(value) for value in td.values())
