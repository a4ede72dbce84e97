"""The envs' latest infos: those in rows of the slab (see `workers.info_rows`), and those that came as messages.

Guarantees: an env's infos are those of its latest command that has landed, also while another one is under way: rows
are copied when a command lands. They become objects when the caller reads them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from envherd.shm.slab import Slab
from envherd.workers.info_rows import Schema
from envherd.workers.infos import unpack
from envherd.workers.options import InfoPolicy

_SECTIONS = ("next", "root")
#: Bytes that are copied of each row are a multiple of this.
_STEP_BYTES = 64


class Part(NamedTuple):
    """Infos of one schema; or one info that came as a message.

    Attributes:
        env_ids: int64 `[k]`, ascending.
        schema: of the records; None for a message.
        records: `[k]`, see `Schema.records` (VIEW); or the info (VIEW).
    """

    env_ids: np.ndarray
    schema: Schema | None
    records: Any

    def infos(self) -> list[dict[str, Any]]:
        """Return the info of each env; one that came as a message is a VIEW."""
        return [self.records] if self.schema is None else self.schema.infos(self.records)

    def of(self, is_wanted: np.ndarray) -> Part | None:
        """Return the part of some envs, bool `[N]`; None if it has none of them."""
        chosen = is_wanted[self.env_ids]
        if chosen.all() or self.schema is None:
            return self if chosen.any() else None
        return Part(self.env_ids[chosen], self.schema, self.records[chosen]) if chosen.any() else None


class _Rows:
    """Copies of the rows of one section; `ids` are those of the envs' schemas, int64 `[N]`, 0 for none."""

    def __init__(self, slab: Slab, section: str) -> None:
        assert slab.infos is not None
        self._all = slab.infos[_SECTIONS.index(section)]
        self._words = slab.words[f"info_{section}"]
        self.ids = np.zeros_like(self._words)
        self.none = self.ids.tobytes()
        self._source = self._all[:, :0]
        self.data = self._source.copy()

    def widen(self, width: int) -> None:
        """Copy that many bytes of each row from now on."""
        before, self._source = self.data, self._all[:, :width]
        self.data = np.zeros(self._source.shape, np.uint8)
        self.data[:, : before.shape[1]] = before

    def lose(self, env_ids: np.ndarray) -> None:
        """Drop the infos of envs of a lost worker."""
        self._words[env_ids] = 0

    def take_all(self) -> None:
        if self._words.tobytes() != self.none:
            np.copyto(self.data, self._source)
        np.copyto(self.ids, self._words)

    def take(self, env_ids: np.ndarray) -> None:
        self.data[env_ids] = self._source[env_ids]
        self.ids[env_ids] = self._words[env_ids]


class InfoReader:
    """The latest infos of all envs; see the module.

    Args:
        policy: how messages are packed.
        slab: of the pool; None if all infos come as messages.
        schemas: id -> schema of rows; the pool adds to it.

    Attributes:
        has_rows: whether infos are expected at all, unless they all come as messages.
    """

    def __init__(self, policy: InfoPolicy, slab: Slab | None, schemas: Mapping[int, Schema]) -> None:
        self._policy, self._schemas = policy, schemas
        self._num_known = 0
        #: Section -> env id -> info that is in no row.
        self._others: dict[str, dict[int, dict[str, Any]]] = {section: {} for section in _SECTIONS}
        self._rows: dict[str, _Rows] = {}
        if slab is not None and slab.infos is not None:
            self._rows = {section: _Rows(slab, section) for section in _SECTIONS}
        self.has_rows = bool(self._rows)

    # ---- of commands that land ---------------------------------------------------------------

    def take_all(self) -> None:
        """Replace all infos by those of a command to all envs, which has sent none as a message."""
        self._widen()
        for rows in self._rows.values():
            rows.take_all()
        for others in self._others.values():
            if others:
                others.clear()

    def take(self, messages: Mapping[int, Mapping[str, Any]], env_ids: np.ndarray) -> None:
        """Replace the infos of some envs by those of their latest command.

        Args:
            messages: env id -> infos message, for envs that have sent one.
            env_ids: of the command, int64 `[k]`.
        """
        self._widen()
        for rows in self._rows.values():
            rows.take(env_ids)
        for section, others in self._others.items():
            for env_id in env_ids.tolist() if others or messages else ():
                others.pop(env_id, None)
                packed = messages[env_id][section] if env_id in messages else None
                if packed is not None:
                    others[env_id] = unpack(packed, self._policy)

    def lose(self, env_ids: np.ndarray) -> None:
        """Drop the infos in rows of envs, int64 `[k]`, whose worker was lost, perhaps after their answer."""
        for rows in self._rows.values():
            rows.lose(env_ids)

    def _widen(self) -> None:
        if len(self._schemas) != self._num_known:
            self._num_known = len(self._schemas)
            width = -(-max(schema.nbytes for schema in self._schemas.values()) // _STEP_BYTES) * _STEP_BYTES
            for rows in self._rows.values():
                rows.widen(width)

    def own(self, section: str) -> dict[int, dict[str, Any]]:
        """Return the same as `read`, in memory of its own."""
        infos = self.read(section)
        return infos | {env_id: copy.deepcopy(infos[env_id]) for env_id in self._others[section]}

    def put(self, section: str, infos: Mapping[int, dict[str, Any]], env_ids: Sequence[int]) -> None:
        """Replace infos of some envs by others, env id -> info; those that are missing have none."""
        for env_id in env_ids:
            self._others[section].pop(env_id, None)
            if self._rows:
                self._rows[section].ids[env_id] = 0
            if env_id in infos:
                self._others[section][env_id] = infos[env_id]

    def copy(self, source: int, targets: Sequence[int]) -> None:
        """Make the infos of an env also those of others."""
        for section in _SECTIONS:
            infos = self.own(section)
            self.put(section, {i: copy.deepcopy(infos[source]) for i in targets if source in infos}, targets)

    # ---- read --------------------------------------------------------------------------------

    def parts(self, section: str) -> list[Part]:
        """Return the infos of a section by schema, in the order of the first env of each; none of envs without one."""
        parts = [Part(np.array([env_id]), None, info) for env_id, info in self._others[section].items()]
        rows = self._rows.get(section)
        if rows is None or rows.ids.tobytes() == rows.none:
            return parts
        ids = rows.ids.tolist()
        if ids.count(ids[0]) == len(ids):
            schema = self._schemas[ids[0]]
            return [Part(np.arange(len(ids)), schema, schema.records(rows.data))]
        for schema_id in {*ids} - {0}:
            schema, env_ids = self._schemas[schema_id], np.flatnonzero(rows.ids == schema_id)
            parts.append(Part(env_ids, schema, schema.records(rows.data[env_ids])))
        return sorted(parts, key=first_env)

    def read(self, section: str) -> dict[int, dict[str, Any]]:
        """Return env id -> info; one that came as a message is a VIEW. Envs without one are missing."""
        found: dict[int, dict[str, Any]] = {}
        for part in self.parts(section):
            found.update(zip(part.env_ids.tolist(), part.infos(), strict=True))
        return found


def first_env(part: Part) -> int:
    """Return the lowest env id of a part."""
    return int(part.env_ids[0])
