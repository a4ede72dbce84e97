"""The envs' latest infos: those in rows of the slab (`workers.info_rows`), and those that came as messages.

Guarantees: an env's infos are those of its latest command that has landed, also while another one is under way: rows
are copied when a command lands. They become objects when the caller reads them.
"""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from envherd.executor.processes.error_messages import numbering
from envherd.shm.slab import INFO_BYTES, Slab
from envherd.shm.specs import EnvSpec
from envherd.workers.info_rows import SECTIONS, Schema
from envherd.workers.infos import unpack
from envherd.workers.options import InfoPolicy

_LOG = logging.getLogger(__name__)

#: Bytes between the rows that are kept: without them all rows would be in the same sets of the processor's caches.
_SKEW = 64
#: Layouts of infos that are kept.
_MOST_LAYOUTS = 256
_NO_ROWS: dict[str, list[Any]] = {section: [] for section in SECTIONS}


class Part(NamedTuple):
    """Infos of one schema; or one info that came as a message.

    Attributes:
        env_ids: int64 `[k]`, ascending.
        schema: of the records; None for a message.
        records: of all envs, `[N]`, from `Schema.records` (VIEW); or the info (VIEW).
    """

    env_ids: np.ndarray
    schema: Schema | None
    records: Any

    def infos(self) -> list[dict[str, Any]]:
        """Return the info of each env; one that came as a message is a VIEW."""
        if self.schema is None:
            return [self.records]
        records = self.records
        if len(self.env_ids) == 1:
            # A slice takes a seventh of the time of an index of arrays.
            env_id = int(self.env_ids[0])
            records = records[env_id : env_id + 1]
        elif len(self.env_ids) < len(records):
            records = records[self.env_ids]
        return self.schema.infos(records)

    def of(self, is_wanted: np.ndarray) -> "Part | None":
        """Return the part of some envs, bool `[N]`; None if it has none of them."""
        chosen = self.env_ids[is_wanted[self.env_ids]]
        if not len(chosen):
            return None
        return self._replace(env_ids=chosen)


class _Layout(NamedTuple):
    """The rows that one command to all envs has written.

    Attributes:
        parts: of each section, in the order of the first env of each.
        copies: functions that copy the slab's rows to those that are kept.
    """

    parts: dict[str, list[Part]]
    copies: list[Callable[[], None]]


class InfoReader:
    """The latest infos of all envs; see the module.

    Args:
        policy: how messages are packed.
        slab: of the pool; None if all infos come as messages.
        schemas: id -> schema of rows; the pool adds to it.

    Attributes:
        has_rows: whether infos may be in rows.
        has_any: False only if no env has an info.
    """

    def __init__(
        self,
        policy: InfoPolicy,
        slab: Slab | None,
        schemas: Mapping[int, Schema],
    ) -> None:
        self._policy = policy
        self._schemas = schemas
        #: Section -> env id -> info that is in no row.
        self._others: dict[str, dict[int, dict[str, Any]]] = {
            section: {} for section in SECTIONS
        }
        self._large: set[int] = set()  # envs whose infos are too large
        self.has_rows = slab is not None and slab.infos is not None
        self.has_any = False
        if slab is not None and slab.infos is not None:
            self._words = slab.words["info_ids"]
            self._ids_now = self._words.reshape(-1, 2).T
            self._rows_now = slab.infos.swapaxes(0, 1)
            num_envs, num_sections, nbytes = slab.infos.shape
            self._rows = np.zeros(
                (num_sections, num_envs, nbytes + _SKEW),
                np.uint8,
            )  # only what is written takes memory
            self._id_words = np.zeros_like(self._words)
            self._ids = self._id_words.reshape(-1, 2).T
            self._layout_of = lru_cache(_MOST_LAYOUTS)(self._lay_out)
            #: Layout of `_id_words`; None if it has to be looked up.
            self._layout: _Layout | None = None
            #: The ids of the latest `take_all`; None if other infos have come since.
            self._taken: bytes | None = None

    # ---- of commands that land ---------------------------------------------------------------

    def take_all(self) -> None:
        """Replace all infos by those of a command to all envs, which has sent none as a message."""
        ids = self._words.tobytes()
        if self._layout is not None and ids == self._taken:
            # The usual case: each env has the schemas that it had, and none came as a message since.
            for copy_rows in self._layout.copies:
                copy_rows()
            return
        layout = self._layout_of(ids)
        # First: after an interrupt no row is read by another's schema.
        self._forget()
        self._id_words.fill(0)
        for copy_rows in layout.copies:
            copy_rows()
        self._ids[:] = self._ids_now
        for others in self._others.values():
            others.clear()
        self.has_any = bool(layout.copies)
        self._layout = layout
        self._taken = ids

    def _forget(self) -> None:
        """Note that `_id_words` change."""
        self._taken = None
        self._layout = None

    def take(
        self,
        messages: Mapping[int, Mapping[str, Any]],
        env_ids: np.ndarray,
    ) -> None:
        """Replace the infos of some envs by those of their latest command.

        Args:
            messages: env id -> infos message, for envs that have sent one.
            env_ids: of the command, int64 `[k]`.
        """
        self.has_any = True
        if self.has_rows:
            nbytes = max(
                (schema.nbytes for schema in self._schemas.values()),
                default=0,
            )
            self._forget()
            self._ids[:, env_ids] = 0
            self._rows[:, env_ids, :nbytes] = self._rows_now[:, env_ids, :nbytes]
            self._ids[:, env_ids] = self._ids_now[:, env_ids]
        for section, others in self._others.items():
            if not (others or messages):
                continue
            for env_id in env_ids.tolist():
                others.pop(env_id, None)
                packed = messages.get(env_id, {}).get(section)
                if packed is not None:
                    others[env_id] = unpack(packed, self._policy)
                    self._note_size(env_id, len(packed))

    def _note_size(self, env_id: int, num_bytes: int) -> None:
        """Log once for each env that an info is too large for its row."""
        if self.has_rows and num_bytes > INFO_BYTES and env_id not in self._large:
            self._large.add(env_id)
            _LOG.warning(
                "env %d: an info of %d bytes is larger than the %d bytes of its row in shared memory, and is sent as a "
                "message, which takes longer. Return less, or make it part of the observation. This is logged once.",
                numbering.first_env_id + env_id,
                num_bytes,
                INFO_BYTES,
            )

    def lose(self, env_ids: np.ndarray) -> None:
        """Drop the infos in rows of envs, int64 `[k]`, whose worker was lost, perhaps after their answer."""
        if self.has_rows:
            self._ids_now[:, env_ids] = 0

    def own(self, section: str) -> dict[int, dict[str, Any]]:
        """Return the same as `read`, in separate memory."""
        infos = self.read(section)
        return infos | {
            env_id: copy.deepcopy(infos[env_id]) for env_id in self._others[section]
        }

    def put(
        self,
        section: str,
        infos: Mapping[int, dict[str, Any]],
        env_ids: Sequence[int],
    ) -> None:
        """Replace infos of some envs by others, env id -> info; those that are missing have none."""
        self.has_any = True
        for env_id in env_ids:
            self._others[section].pop(env_id, None)
            if self.has_rows:
                self._forget()
                self._ids[SECTIONS.index(section), env_id] = 0
            if env_id in infos:
                self._others[section][env_id] = infos[env_id]

    def copy(self, source: int, targets: Sequence[int]) -> None:
        """Make the infos of an env also those of others."""
        for section in SECTIONS:
            infos = self.own(section)
            self.put(
                section,
                {i: copy.deepcopy(infos[source]) for i in targets if source in infos},
                targets,
            )

    # ---- read --------------------------------------------------------------------------------

    def rows(self) -> Mapping[str, list[Part]]:
        """Return the parts of each section that are in rows; the same object as long as the schemas are the same."""
        if not (self.has_rows and self.has_any):
            return _NO_ROWS
        if self._layout is None:
            self._layout = self._layout_of(self._id_words.tobytes())
        return self._layout.parts

    def has_messages(self) -> bool:
        """Return whether an env has an info that is in no row."""
        return any(self._others.values())

    def parts(self, section: str) -> list[Part]:
        """Return the infos of a section by schema, in the order of the first env of each; none of envs without one."""
        rows = self.rows()[section]
        if self._others[section]:
            others = [
                Part(np.array([env_id]), None, info)
                for env_id, info in self._others[section].items()
            ]
            rows = sorted([*rows, *others], key=first_env)
        return rows

    def _lay_out(self, ids: bytes) -> _Layout:
        """Return the layout of infos by the ids of their schemas."""
        layout = _Layout({}, [])
        by_section = np.frombuffer(ids, np.int64).reshape(-1, 2).T
        for section, own, rows, now in zip(
            SECTIONS,
            by_section,
            self._rows,
            self._rows_now,
            strict=True,
        ):
            schemas = [self._schemas[i] for i in dict.fromkeys(own.tolist()) if i]
            layout.parts[section] = [
                Part(np.flatnonzero(own == schema.id), schema, schema.records(rows))
                for schema in schemas
            ]
            if schemas:
                nbytes = max(schema.nbytes for schema in schemas)
                layout.copies.append(
                    # In a third of the time of `np.copyto`.
                    partial(rows[:, :nbytes].__setitem__, ..., now[:, :nbytes])
                )
        return layout

    def read(
        self,
        section: str,
        is_wanted: np.ndarray | None = None,
    ) -> dict[int, dict[str, Any]]:
        """Return env id -> info, of some envs (bool `[N]`) or of all. Envs without one are missing.

        An info that came as a message is a VIEW.
        """
        found: dict[int, dict[str, Any]] = {}
        for part in self.parts(section):
            own = part if is_wanted is None else part.of(is_wanted)
            if own is not None:
                found.update(zip(own.env_ids.tolist(), own.infos(), strict=True))
        return found


def first_env(part: Part) -> int:
    """Return the lowest env id of a part."""
    return int(part.env_ids[0])


# ---- side data ---------------------------------------------------------------------------------
# The envs' data outside the slab: values of side-channel leaves, and infos.


class SideData:
    """Side values and infos of each env's latest rows.

    Attributes:
        has_values: whether any env has side-channel leaves among its observation.
        next, root: env id -> one value per leaf of the observation (None for leaves in the slab), of the latest step
            and of the latest reset.
        infos: "next" and "root": the envs' infos of the step and of the reset of their latest command.
    """

    def __init__(self, specs: Sequence[EnvSpec], infos: InfoReader) -> None:
        self.has_values = any(
            leaf.is_side for spec in specs for leaf in spec.observation
        )
        # An env that was never reset has None for each leaf, just as its numbers are 0.
        blank: dict[int, list[Any]] = {
            i: [None] * len(spec.observation) for i, spec in enumerate(specs)
        }
        self.next = dict(blank)
        self.root = dict(blank)
        self.infos = infos

    def note_values(self, frames: Mapping[int, Mapping[str, Any]]) -> None:
        """Keep the side-channel values that came with the latest rows."""
        for env_id, frame in frames.items():
            # Otherwise a new instance that has made no step.
            if any(value is not None for value in frame["next"]):
                self.next[env_id] = frame["next"]
            self.root[env_id] = frame["root"]

    def latest(self, in_root: np.ndarray) -> dict[int, list[Any]]:
        """Return the values of each env's present root; a fresh dict.

        Args:
            in_root: bool `[N]`, of `Positions`.
        """
        return {
            i: self.root[i] if is_root else self.next[i]
            for i, is_root in enumerate(in_root.tolist())
        }
