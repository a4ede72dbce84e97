"""The episodes of an evaluation, and the JSON file from which a run that was killed continues.

Guarantees: the file is replaced as a whole, so it is complete JSON at any instant, also after SIGKILL. It holds no
times, and its records are in the order of tasks and episodes, so that equal episodes make equal bytes.
Programs that write to one file add to each other's records. If two replace it in the same microseconds, the file lacks
the latest records of one of them until it writes again.
"""

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from envherd.executor.guests.saving import is_count
from envherd.executor.processes.error_messages import log
from envherd.workers.errors import EnvherdError

SCHEMA = "envherd.evaluation-run/1"
#: Least seconds between two writes while episodes end: a write of 400 episodes takes 5 ms.
_BETWEEN_WRITES_S = 1.0
_LARGEST_TEXT = 1 << 28  # bytes; an evaluation of a million episodes has 200 MB


class DamagedFile(EnvherdError, ValueError):
    """A file of text is not what it should be."""


@dataclass(frozen=True, kw_only=True)
class EpisodeRecord:
    """One episode of an evaluation.

    Attributes:
        episode: its number in its task, from 0.
        seed: of its reset.
        length: in steps.
        returns: of each agent; of a failed episode, until the failure.
        success: what the env reported in its last step, or what `success=` returned; None without either.
        success_once: whether the env reported success in any step; None if it reports none.
        error: of an episode that failed: what the env or its worker raised. None for an episode that has ended.
        video: path of its video, or None.
    """

    episode: int
    seed: int
    length: int = 0
    returns: tuple[float, ...] = ()
    success: bool | None = None
    success_once: bool | None = None
    error: str | None = None
    video: str | None = None


@dataclass(frozen=True, kw_only=True)
class Cast:
    """Who plays in a task.

    Attributes:
        env: name of the env.
        players: their names; "agent" in an env of one agent.
        roles: one per agent.
        is_focal: one per agent.
    """

    env: str
    players: tuple[str, ...] = ("agent",)
    roles: tuple[str, ...] = ("default",)
    is_focal: tuple[bool, ...] = (True,)


@dataclass
class TaskRecords:
    """The episodes of a task so far.

    Attributes:
        cast: None until an env of the task has been built.
        episodes: by number.
    """

    cast: Cast | None = None
    episodes: dict[int, EpisodeRecord] = field(default_factory=dict)


class RecordFile(contextlib.AbstractContextManager["RecordFile"]):
    """The records of a run, by task, and the file that holds them, if there is one.

    Args:
        path: of the file; None keeps records in memory alone. If it exists, its records are read. A task of which no
            env could be built is tried again.
        settings: plain data that must be equal in all runs that write to the file.
        tasks: names of the tasks of this run. Records of other tasks stay in the file.

    Attributes:
        tasks: name -> records.

    Raises:
        DamagedFile, ValueError: the file is of something else; it is of other settings.
        OSError: the path cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        settings: Mapping[str, Any],
        tasks: Sequence[str],
    ) -> None:
        self._path = None if path is None else Path(path)
        self._settings = dict(settings)
        self.tasks = {name: TaskRecords() for name in tasks}
        self._written_at = 0.0
        # Not the process id: programs in two containers may have the same.
        self._mark = os.urandom(4).hex()
        # Of the file that this object has read or written.
        self._version: object = None
        # This reads a file that exists. A path that cannot be written is refused before an episode is played.
        self.write()
        if any(one.episodes for one in self.tasks.values()):
            log.warning("%s. They are not played again.", self._held())

    def __exit__(
        self,
        _type: object,
        error: BaseException | None,
        _traceback: object,
    ) -> None:
        """Write the file. An exception that has ended the block gets a note of what the file holds."""
        self.write()
        if error is not None and self._path is not None:
            error.add_note(f"{self._held()}. The same call plays the others.")

    def _held(self) -> str:
        """Return what the file holds, for messages."""
        count = sum(len(one.episodes) for one in self.tasks.values())
        return f"{self._path} holds the {count} episodes that were played"

    def add(self, task: str, record: EpisodeRecord) -> None:
        """Keep a record; write the file unless it was written less than a second ago."""
        self.tasks[task].episodes[record.episode] = record
        if time.monotonic() - self._written_at >= _BETWEEN_WRITES_S:
            self.write()

    def write(self, results: Mapping[str, Any] | None = None) -> None:
        """Replace the file.

        Args:
            results: of a run that is complete; None until then.
        """
        if self._path is None:
            return
        if self._path.exists() and _version(self._path) != self._version:
            self._read(self._path)  # another program has replaced it
        tasks = {
            name: {
                "cast": None if one.cast is None else asdict(one.cast),
                "episodes": [
                    asdict(one.episodes[number]) for number in sorted(one.episodes)
                ],
            }
            for name, one in self.tasks.items()
        }
        found = {
            "schema": SCHEMA,
            "settings": self._settings,
            "tasks": tasks,
            "results": results,
        }
        complete = self._path.with_name(f".{self._path.name}.{self._mark}")
        with complete.open("w") as file:
            json.dump(found, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        if self._path.exists() and _version(self._path) != self._version:
            self.write(results)  # another program has replaced it meanwhile
            return
        self._version = _version(complete)
        complete.replace(self._path)
        self._written_at = time.monotonic()

    def _read(self, path: Path) -> None:
        self._version = _version(path)
        try:
            settings, tasks = _read_run(text_of(path))
        except Exception as error:  # whatever the file holds
            raise DamagedFile(
                f"evaluate failed: expected the JSON of an evaluation in {path}, with schema {SCHEMA!r}, got "
                f"{type(error).__name__}: {error!s:.200}."
            ) from None
        for name, value in self._settings.items():
            if (before := settings.get(name, value)) != value:
                raise ValueError(
                    f"evaluate failed: expected {name} {before!r}, with which the episodes of {path} were played, got "
                    f"{value!r}. Pass another path, or remove the file."
                )
        self._settings = {**settings, **self._settings}
        for name, one in tasks.items():
            mine = self.tasks.setdefault(name, TaskRecords())
            mine.cast = mine.cast or one.cast
            mine.episodes = one.episodes | mine.episodes


def _read_run(text: str) -> tuple[dict[str, Any], dict[str, TaskRecords]]:
    """Return the settings and the tasks of a run in a file.

    Raises:
        Exception: of any type.
    """
    found = json.loads(text)
    if found["schema"] != SCHEMA:
        raise ValueError(f"schema {found['schema']!r:.80}")
    tasks = {
        name: _records_of(one)
        for name, one in found["tasks"].items()
        if one["cast"] is not None
    }
    return dict(found["settings"]), tasks


def _records_of(task: dict[str, Any]) -> TaskRecords:
    """Return the records of a task in a file.

    Raises:
        Exception: of any type.
    """
    plain: dict[str, Any] = {
        key: tuple(value) for key, value in task["cast"].items() if key != "env"
    }
    cast = Cast(env=task["cast"]["env"], **plain)
    records = [
        EpisodeRecord(**{**each, "returns": tuple(map(float, each["returns"]))})
        for each in task["episodes"]
    ]
    if not (
        len(cast.players) == len(cast.roles) == len(cast.is_focal) > 0
        and all(isinstance(name, str) for name in (*cast.players, *cast.roles))
        and all(isinstance(is_focal, bool) for is_focal in cast.is_focal)
        and all(
            is_count(one.episode)
            and is_count(one.length)
            and isinstance(one.error, str | None)
            and (one.error is not None or len(one.returns) == len(cast.players))
            and {one.success, one.success_once} <= {None, False, True}
            for one in records
        )
    ):
        raise ValueError("players or episodes of another form")
    return TaskRecords(cast, {record.episode: record for record in records})


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


def _version(path: Path) -> object:
    """Return what differs between a file and the one that replaces it; to be compared as a whole."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def fingerprint(policy: Any) -> Any:
    """Return plain data that differs if policies differ: a module's class and the hash of its tensors, else a name."""
    if policy is None:
        return "random actions"
    if isinstance(policy, Mapping):
        return {str(name): fingerprint(one) for name, one in policy.items()}
    if not isinstance(policy, nn.Module):
        named = getattr(policy, "func", policy)  # of a partial
        named = named if hasattr(named, "__qualname__") else type(named)
        return f"{named.__module__}.{named.__qualname__}"
    digest = hashlib.sha256()
    for name, value in policy.state_dict().items():
        digest.update(name.encode())
        if isinstance(value, torch.Tensor) and not is_lazy(value):
            digest.update(
                value.detach()
                .cpu()
                .contiguous()
                .flatten()
                .view(torch.uint8)
                .numpy()
                .tobytes()
            )
    return f"{type(policy).__module__}.{type(policy).__qualname__} {digest.hexdigest()[:16]}"
