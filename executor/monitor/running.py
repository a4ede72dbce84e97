"""Find running executors by the nameplates of their slabs (`shm.nameplate`).

Guarantees: no registry is written, so executors that have ended leave nothing behind. Executors of other users and of
other containers are not found.
Platforms: Linux.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from envherd.executor.pools.slab_plate import LABEL, SCHEMA, namespace
from envherd.shm import nameplate
from envherd.shm.interrupts import ignoring_refusals
from envherd.shm.nameplate import Plate


@dataclass(frozen=True, kw_only=True)
class Listing:
    """A running executor.

    Attributes:
        pid: process that made it.
        made_at: seconds since the epoch.
        command: the command line of that process.
        env: family of its envs.
        blocks: env ids of each worker.
        slab_path: where the slab can be opened.
        inode: of the slab; identifies it.
        path: which calls are made in C; see `Statistics.path`. Empty if nobody has written it.
        words: word -> (offset in bytes, length).
        nbytes: of the part of the slab that holds the words.
    """

    pid: int
    made_at: float
    command: str
    env: str
    blocks: tuple[tuple[int, ...], ...]
    path: str
    slab_path: str
    inode: int
    words: Mapping[str, tuple[int, int]]
    nbytes: int

    @property
    def num_envs(self) -> int:
        """The number of envs; with resets ahead, two workers have each."""
        return len({env_id for block in self.blocks for env_id in block})


def listings() -> Iterator[Listing]:
    """Yield this user's running executors, the oldest first."""
    if sys.platform != "linux":
        return
    found = [listing for plate in nameplate.find(LABEL) if (listing := _read(plate)) is not None]
    yield from sorted(found, key=lambda one: one.made_at)


def _read(plate: Plate) -> Listing | None:
    """Return the listing in a nameplate; None if it is of another process, version or container."""
    content = plate.content
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError), ignoring_refusals():
        if content["schema"] != SCHEMA or content["pid"] != plate.pid or content["namespace"] != namespace():
            return None
        return Listing(
            pid=plate.pid,
            made_at=float(content["made_at"]),
            command=_command(plate.pid),
            env=str(content["env"]),
            blocks=tuple(tuple(map(int, block)) for block in content["blocks"]),
            path=str(content.get("path", "")).strip(),
            slab_path=plate.path,
            inode=plate.inode,
            words={name: (int(offset), int(length)) for name, (offset, length) in content["words"].items()},
            nbytes=int(content["nbytes"]),
        )
    return None


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
