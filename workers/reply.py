"""The messages that a worker sends the parent besides its rows: dicts, one class for each kind."""

import traceback
from dataclasses import dataclass
from typing import Any, ClassVar

_MAX_TEXT = 16_000  # characters kept of a message or of (the end of) a traceback


class Reply:
    """One of these messages."""

    kind: ClassVar[str]

    def to_plain(self) -> dict[str, Any]:
        """Return the message."""
        return {"kind": self.kind, **vars(self)}


@dataclass(frozen=True)
class Fault(Reply):
    """An exception that an env (or its factory) raised, as text."""

    kind = "fault"
    env_id: int
    phase: str
    type_name: str
    message: str
    traceback: str
    type_module: str = ""

    @classmethod
    def from_exception(cls, env_id: int, phase: str, error: BaseException) -> "Fault":
        """Describe an exception, even if its message or traceback cannot be printed."""
        try:
            message = " ".join([str(error), *getattr(error, "__notes__", ())])
        except Exception:
            message = "<its message cannot be printed>"
        try:
            text = "".join(traceback.format_exception(error))
        except Exception:
            text = "".join(traceback.format_tb(error.__traceback__))
        kind = type(error)
        return cls(
            env_id,
            phase,
            kind.__qualname__,
            message[:_MAX_TEXT],
            text[-_MAX_TEXT:],
            kind.__module__,
        )


@dataclass(frozen=True)
class SideValues(Reply):
    """The values of the side-channel leaves after a command, aligned with `spec.observation`."""

    kind = "side"
    env_id: int
    next: list[Any]
    root: list[Any]


@dataclass(frozen=True)
class InfosReply(Reply):
    """An env's infos of a command's step and reset, packed by `workers.infos`; None where there is none."""

    kind = "infos"
    env_id: int
    next: bytes | None
    root: bytes | None


@dataclass(frozen=True)
class Notice(Reply):
    """An env drew from global generators, which `ExecutorOptions.isolate_rng` would isolate."""

    kind = "notice"
    env_id: int
    phase: str
    generators: list[str]


@dataclass(frozen=True)
class LeftOut(Reply):
    """Entries of an env's info that could not be passed on, as name -> reason; each is reported once."""

    kind = "left_out"
    env_id: int
    entries: dict[str, str]


@dataclass(frozen=True)
class NewSchema(Reply):
    """The fields of infos that an env will have in rows of the slab; see `workers.info_rows.Schema`."""

    kind = "schema"
    env_id: int
    root: Any
    nbytes: int
