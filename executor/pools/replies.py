"""Workers' reports besides their rows: faults, side values, infos, losses."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envherd.executor.processes.error_messages import Frame, log_notice
from envherd.workers.errors import EnvherdError
from envherd.workers.info_rows import Schema, SchemaField


@dataclass
class Outcome:
    """The reports that were not handed out yet.

    Attributes:
        faults: env id -> fault message (an exception of the env).
        side: env id -> side values message.
        infos: env id -> infos message.
        losses: worker id -> the error that describes its loss.
        schemas: id -> the schema, of infos in rows of the slab; these are never handed out.
        completing: envs whose next reports complete the answer of a step, whose reports are kept.
    """

    faults: dict[int, Frame] = field(default_factory=dict)
    side: dict[int, Frame] = field(default_factory=dict)
    infos: dict[int, Frame] = field(default_factory=dict)
    losses: dict[int, EnvherdError] = field(default_factory=dict)
    schemas: dict[int, Schema] = field(default_factory=dict)
    completing: set[int] = field(default_factory=set)

    def __bool__(self) -> bool:
        """Return whether anything happened."""
        return bool(self.faults or self.side or self.infos or self.losses)

    def hand_out(self, env_ids: np.ndarray) -> "Outcome":
        """Remove and return the reports of some envs, int `[k]`, and all losses."""
        given = Outcome(losses=self.losses)
        self.losses = {}
        wanted = set(env_ids.tolist())
        self.completing -= wanted
        for name in ("faults", "side", "infos"):
            reported = getattr(self, name)
            if reported.keys() <= wanted:
                setattr(given, name, reported)
                setattr(self, name, {})
            else:
                setattr(
                    given,
                    name,
                    {i: reported.pop(i) for i in wanted & reported.keys()},
                )
        return given

    def keep(self, reported: "Outcome", env_ids: set[int]) -> None:
        """Keep what the steps of some envs have reported; their next reports complete it."""
        self.side |= {i: frame for i, frame in reported.side.items() if i in env_ids}
        self.infos |= {i: frame for i, frame in reported.infos.items() if i in env_ids}
        self.completing |= env_ids

    def forget_rows(self, env_ids: np.ndarray) -> None:
        """Drop the side values and infos of rows that were never completed."""
        for env_id in env_ids.tolist():
            self.side.pop(env_id, None)
            self.infos.pop(env_id, None)

    def take(self, frame: Frame) -> None:
        """Keep a message that came with rows."""
        kinds = {"fault": self.faults, "side": self.side, "infos": self.infos}
        if frame["kind"] in kinds:
            reported = kinds[frame["kind"]]
            env_id = frame["env_id"]
            # Of a step that a reset completes, only the root is new.
            if env_id in self.completing and "next" in reported.get(env_id, ()):
                frame = {**frame, "next": reported[env_id]["next"]}
            reported[env_id] = frame
        elif frame["kind"] == "schema":
            schema = Schema(SchemaField.from_plain(frame["root"]), frame["nbytes"])
            # Each env reports it. The one that is known may have been compiled.
            self.schemas.setdefault(schema.id, schema)
        else:
            log_notice(frame)


def crossed(answer: Mapping[str, Any]) -> Any:
    """Return the value of an answer from a worker."""
    if "pickled" in answer:
        return pickle.loads(answer["pickled"])  # only with infos="pickle"
    return answer["plain"]
