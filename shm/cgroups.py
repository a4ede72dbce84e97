"""Control groups, v1 and v2: which ones a process belongs to, and how much memory they leave it.

Guarantees: all groups from the process's own up to the mount are read, and the tightest one decides. Page cache counts
as free: the kernel drops it when a process needs memory, and reading a data set fills a group with it. All functions
are pure over `root`: tests give them trees of files.
Does not know: limits above what a container can see of the hierarchy.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from envherd.shm.interrupts import ignoring_refusals

#: v1 says "no limit" by the largest multiple of the page size.
_NO_LIMIT = 2**60
#: Limits of either version. A process that exceeds the last one is slowed down, not killed.
_LIMITS = ("memory.max", "memory.limit_in_bytes", "memory.high")
_USES = ("memory.current", "memory.usage_in_bytes")
#: Page cache in memory.stat, of a group and those below it. v1 has separate entries for that total, with longer names.
_CACHES = (
    ("total_inactive_file", "inactive_file"),
    ("total_active_file", "active_file"),
)


@dataclass(frozen=True, kw_only=True)
class GroupMemory:
    """How much memory the control groups of a process leave it.

    Attributes:
        limit: bytes, of the tightest group; None without a limit.
        room: bytes left below that limit, page cache counted as free; None without a limit.
        used: bytes charged to that group (without a limit, to the process's own), without page cache.
    """

    limit: int | None = None
    room: int | None = None
    used: int | None = None


def read_memory(root: Path = Path("/")) -> GroupMemory:
    """Return how much memory the control groups of this process leave it.

    Args:
        root: folder that holds `proc` and `sys`.
    """
    uses = []
    limited = []
    for folder in group_folders(root, "memory"):
        used = _used(folder)
        uses.append(used)
        limits = [
            limit
            for name in _LIMITS
            if (limit := read_count(folder / name)) is not None
        ]
        if limits:
            limit = min(limits)
            charged = used or 0
            limited.append(
                GroupMemory(limit=limit, room=max(0, limit - charged), used=charged)
            )
    own_use = next((used for used in uses if used is not None), None)
    # Of equally tight groups, the one that is nearest to the process.
    return min(limited, key=attrgetter("room"), default=GroupMemory(used=own_use))


def group_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the process's groups that have a controller: its own first, then those above."""
    mounts = _mounts(root)
    paths = _paths(root)
    # Where v1 has the controller it does not work in the v2 hierarchy that may be mounted as well.
    names = [name for name in (controller, "") if name in mounts and name in paths]
    if not names:
        return
    mount = mounts[names[0]]
    top = root / mount.point.lstrip("/")
    path = PurePosixPath(paths[names[0]])
    # A group outside this namespace has none: only what is mounted can be seen.
    parts: tuple[str, ...] = ()
    if path.is_relative_to(mount.group):
        parts = path.relative_to(mount.group).parts
    if ".." in parts:
        parts = ()
    for count in range(len(parts), -1, -1):
        folder = top.joinpath(*parts[:count])
        if folder.is_dir():
            yield folder


class _Mount(NamedTuple):
    """A mounted hierarchy of groups: the group that is mounted, and where."""

    group: str
    point: str


def _paths(root: Path) -> dict[str, str]:
    """Return controller -> path of the process's group; v2's is under the empty name."""
    paths = {}
    for line in (read_word(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def _mounts(root: Path) -> dict[str, _Mount]:
    """Return controller -> its mount; v2's is under the empty name."""
    mounts = {}
    for line in (read_word(root / "proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        kind = right.split()
        if len(fields) < 5 or not kind:
            continue
        mount = _Mount(fields[3], fields[4])
        if kind[0] == "cgroup2":
            mounts[""] = mount
        elif kind[0] == "cgroup":
            for option in kind[-1].split(","):
                mounts.setdefault(option, mount)
    return mounts


def read_word(path: Path) -> str | None:
    """Return a file's text without the white space around it, or None if it cannot be read."""
    with ignoring_refusals():
        return path.read_text().strip()
    return None


def read_count(path: Path) -> int | None:
    """Return the number in a file; None if there is none, or if it says that there is no limit."""
    text = read_word(path)
    # "max" and "-1" are no limits.
    if text is None or not text.isdigit() or int(text) >= _NO_LIMIT:
        return None
    return int(text)


def _used(folder: Path) -> int | None:
    used = next(
        (count for name in _USES if (count := read_count(folder / name)) is not None),
        None,
    )
    if used is None:
        return None
    stat = dict(
        line.split()
        for line in (read_word(folder / "memory.stat") or "").splitlines()
        if " " in line
    )
    cache = sum(
        int(next((stat[name] for name in names if name in stat), 0))
        for names in _CACHES
    )
    return max(0, used - cache)
