"""Running executors say that they are there, so that `envherd top` finds them.

One small file for each in a folder that is this user's alone (0700, files 0600): which process, and where in it
the slab's words are. What the workers do is not in it: that is read from the slab itself.

Guarantees: an executor runs the same where no file can be written; a file whose executor has gone, whatever
ended it, is not believed, and is removed by the next process that looks. A file is removed only if its name and
its contents are those of such a file, and its executor is known to have gone: the folder may hold other files.
Nothing is read from, or written to, a folder that belongs to somebody else.
Platforms: Linux.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import stat
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envherd.shm.segment import Segment
from envherd.shm.slab import SlabPlan

_log = logging.getLogger("envherd")
SCHEMA = "envherd.running/1"
#: Where to keep the files instead; empty for nowhere.
FOLDER_VARIABLE = "ENVHERD_RUNTIME_DIR"
#: Files from which on a new executor removes those of executors that have gone.
_MANY = 32
_OWN_NAME = re.compile(r"\d+-\d+\.json")


@dataclass(frozen=True, kw_only=True)
class Listing:
    """A running executor.

    Attributes:
        path: of its file.
        pid: process that made it.
        started_at: when that process began, in the kernel's ticks: pids are used again.
        made_at: seconds since the epoch.
        command: the command line of that process.
        env: family of its envs.
        blocks: env ids of each worker.
        fd: descriptor of the slab in that process.
        inode: of the slab, by which it is known.
        words: word -> (offset in bytes, length).
        nbytes: of the part of the slab that holds the words.
    """

    path: Path
    pid: int
    started_at: int
    made_at: float
    command: str
    env: str
    blocks: tuple[tuple[int, ...], ...]
    fd: int
    inode: int
    words: Mapping[str, tuple[int, int]]
    nbytes: int

    @property
    def num_envs(self) -> int:
        """How many envs there are; two workers have each, if they are reset ahead."""
        return len({env_id for block in self.blocks for env_id in block})

    @property
    def slab_path(self) -> str:
        """Return where the slab can be opened."""
        return f"/proc/{self.pid}/fd/{self.fd}"

    def is_alive(self) -> bool:
        """Return whether the executor is still there: its process, and its slab.

        Raises:
            OSError: that cannot be found out now, e.g. because this process may open no further file.
        """
        try:
            return start_of(self.pid) == self.started_at and os.stat(self.slab_path).st_ino == self.inode
        except (FileNotFoundError, ProcessLookupError):
            return False


def folder() -> Path | None:
    """Return the folder of the files, or None if there is to be none."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named is not None:
        return Path(named) if named else None
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and _is_own(Path(runtime)):
        return Path(runtime) / "envherd"
    return Path(tempfile.gettempdir()) / f"envherd-{os.getuid()}"


def announce(owner: Any, segment: Segment, plan: SlabPlan, blocks: Sequence[Sequence[int]], env: str) -> Any:
    """Write the file of an executor, and return what removes it; that also happens when `owner` is dropped.

    Never raises: an executor that cannot be listed is none the worse.
    """
    try:
        where = folder()
        if where is None or segment.fd < 0 or sys.platform != "linux":
            return _nothing
        if not _make_own(where):
            _log.debug("%s is not this user's own folder: the executor is not listed", where)
            return _nothing
        if sum(1 for _ in _own_files(where)) > _MANY:
            list(listings())
        path = where / f"{os.getpid()}-{os.fstat(segment.fd).st_ino}.json"
        _write_private(path, json.dumps(_contents(segment, plan, blocks, env)))
    except OSError as error:
        _log.debug("the executor is not listed: %s", error)
        return _nothing
    return weakref.finalize(owner, _remove, path, os.getpid())


def _contents(segment: Segment, plan: SlabPlan, blocks: Sequence[Sequence[int]], env: str) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "pid": os.getpid(),
        "started_at": start_of(os.getpid()),
        "namespace": _namespace(),
        "made_at": time.time(),
        "env": env,
        "blocks": [list(block) for block in blocks],
        "fd": segment.fd,
        "inode": os.fstat(segment.fd).st_ino,
        "words": {field.name[0]: [field.offset, field.shape[0]] for field in plan.words},
        "nbytes": plan.words.nbytes,
    }


def _write_private(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
        file.write(text)
    part.rename(path)


def listings() -> Iterator[Listing]:
    """Yield this user's running executors, the oldest first; files of those that have gone are removed."""
    found = []
    for listing, is_alive in _all():
        if is_alive:
            found.append(listing)
        else:
            with contextlib.suppress(OSError):
                listing.path.unlink()
    yield from sorted(found, key=lambda one: one.made_at)


def stale_files() -> list[Path]:
    """Return the files of executors that have gone, without removing them."""
    return [listing.path for listing, is_alive in _all() if not is_alive]


def _all() -> Iterator[tuple[Listing, bool]]:
    """Yield what is listed, and whether it is alive; leaves out that of which it cannot be found out."""
    where = folder()
    if where is None or not _is_own(where):
        return
    for path in _own_files(where):
        listing = _read(path)
        try:
            is_alive = listing is not None and listing.is_alive()
        except OSError:
            continue
        if listing is not None:
            yield listing, is_alive


def _own_files(where: Path) -> Iterator[Path]:
    return (path for path in where.glob("*.json") if _OWN_NAME.fullmatch(path.name))


def _read(path: Path) -> Listing | None:
    """Return what a file lists; None if it cannot be read here, or is of another schema or container."""
    try:
        plain = json.loads(path.read_text())
        if plain["schema"] != SCHEMA or plain["namespace"] != _namespace():  # in a container pids are others
            return None
        pid = int(plain["pid"])
        words = {name: (int(offset), int(length)) for name, (offset, length) in plain["words"].items()}
        return Listing(
            path=path,
            pid=pid,
            started_at=int(plain["started_at"]),
            made_at=float(plain["made_at"]),
            command=_command(pid),
            env=str(plain["env"]),
            blocks=tuple(tuple(map(int, block)) for block in plain["blocks"]),
            fd=int(plain["fd"]),
            inode=int(plain["inode"]),
            words=words,
            nbytes=int(plain["nbytes"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def start_of(pid: int) -> int:
    """Return when a process began, in ticks since the machine did; raises OSError if it has gone."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    return ""


def _make_own(where: Path) -> bool:
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    return _is_own(where)


def _is_own(where: Path) -> bool:
    """Return whether a folder is this user's, and nobody else may write to it; a link is not."""
    try:
        status = where.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked copy of the owner must not
        with contextlib.suppress(OSError):
            path.unlink()


def _nothing() -> None:
    """Remove nothing: there is no file."""
