"""Infos as rows of the slab: an info whose values have fixed types and shapes is written there, and read by columns.

A `Schema` has the entries of an info in their order, with the exact type, dtype and shape of each value. A worker
learns the schemas of an env from its infos and reports each once. From then on it writes an info as the schema's id
(a word of the slab) and the values (the env's row of the info area, one for steps and one for resets).

Guarantees: an info that was written is read as it was: the same keys in the same order, and values of the same types,
in their own memory. An info that does not fit (other types, long texts, integers beyond 64 bits, too many bytes) is not
written; the worker sends it as a message. Equal schemas have equal ids in all workers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from envherd.shm.slab import INFO_BYTES, Slab
from envherd.workers import native
from envherd.workers.reply import NewSchema

#: Schemas that a worker tries to learn for one env.
MOST_SCHEMAS = 16
#: Limits of a schema.
_MOST_FIELDS, _DEEPEST = 1000, 8
#: Bytes of a text in UTF-8. Its length comes before it.
_TEXT_BYTES = 120
_ALIGNMENT = 8
_LEAST, _LARGEST = -(2**63), 2**63 - 1

#: Records -> a value of each.
Reader = Callable[[np.ndarray], list[Any]]


class Kind(IntEnum):
    """The exact type of a value; subclasses do not count. `info_rows.c` has the same list."""

    DICT = 0
    LIST = 1
    TUPLE = 2
    NONE = 3
    BOOL = 4
    INT = 5
    FLOAT = 6
    TEXT = 7
    SCALAR = 8
    ARRAY = 9


_KINDS = {
    dict: Kind.DICT,
    list: Kind.LIST,
    tuple: Kind.TUPLE,
    type(None): Kind.NONE,
    bool: Kind.BOOL,
    int: Kind.INT,
    float: Kind.FLOAT,
    str: Kind.TEXT,
    np.ndarray: Kind.ARRAY,
}
#: By identity: the hash of a class may be code of the user's.
_KIND_OF_TYPE = {id(own): kind for own, kind in _KINDS.items()}
_DTYPES = {Kind.NONE: "", Kind.BOOL: "|b1", Kind.INT: "<i8", Kind.FLOAT: "<f8", Kind.TEXT: "|u1"}


def _kind_of(value: Any) -> Kind | None:
    own = type(value)
    return Kind.SCALAR if issubclass(own, np.generic) else _KIND_OF_TYPE.get(id(own))


class DoesNotFit(Exception):
    """No schema describes an info."""


class Field(NamedTuple):
    """A value, or a container with its items.

    Attributes:
        kind: see `Kind`.
        place: offset of the value in a row, bytes.
        keys: of a dict.
        items: of a container.
        dtype, shape: of the stored value.
    """

    kind: int
    place: int
    keys: tuple[str, ...] = ()
    items: tuple[Field, ...] = ()
    dtype: str = ""
    shape: tuple[int, ...] = ()

    @classmethod
    def from_plain(cls, parts: Sequence[Any]) -> Field:
        """Return the field that a message holds."""
        kind, place, keys, items, dtype, shape = parts
        return cls(kind, place, tuple(keys), tuple(map(cls.from_plain, items)), dtype, tuple(shape))

    def like(self) -> Any:
        """Return a value of the stored type and shape."""
        blank = np.zeros(self.shape, self.dtype or "u1")
        return blank[()] if self.kind == Kind.SCALAR else blank


class _Description:
    """Finds the fields of one info, and a place for each."""

    nbytes = num_fields = 0

    def field_of(self, value: Any, depth: int = 0) -> Field:
        """Return the field of a value.

        Raises:
            DoesNotFit: it, or an item of it, is of another type, or there is too much of it.
        """
        kind = _kind_of(value)
        self.num_fields += 1
        if kind is None or depth == _DEEPEST or self.num_fields > _MOST_FIELDS:
            raise DoesNotFit
        place = self.nbytes
        if kind <= Kind.TUPLE:
            keys = tuple(value) if kind == Kind.DICT else ()
            if any(key.__class__ is not str for key in keys):
                raise DoesNotFit
            items = value.values() if kind == Kind.DICT else value
            return Field(kind, place, keys, tuple(self.field_of(item, depth + 1) for item in items))
        if kind >= Kind.SCALAR and (value.dtype.kind not in "biufc" or value.nbytes > INFO_BYTES):
            raise DoesNotFit
        dtype, shape = (value.dtype.str, value.shape) if kind >= Kind.SCALAR else (_DTYPES[kind], ())
        if kind == Kind.TEXT:
            shape = (8 + _TEXT_BYTES,)
        field = Field(kind, place, (), (), dtype, shape)
        if dtype:
            self.nbytes += max(1, -(-field.like().nbytes // _ALIGNMENT)) * _ALIGNMENT
        if self.nbytes > INFO_BYTES or not (kind < Kind.SCALAR or _is_like(value, field)):
            raise DoesNotFit
        return field


class Schema:
    """The fields of an info.

    Attributes:
        root: the info itself, a dict.
        nbytes: of a row.
        id: a positive int64.
    """

    def __init__(self, root: Field, nbytes: int) -> None:
        self.root, self.nbytes = root, nbytes
        digest = hashlib.blake2b(json.dumps([root, nbytes]).encode(), digest_size=8).digest()
        self.id = int.from_bytes(digest, "little") >> 1 or 1
        self._records: dict[int, np.dtype] = {}
        self._read = compile_reader(root)

    @classmethod
    def of(cls, info: Any) -> Schema:
        """Return the schema of an info.

        Raises:
            DoesNotFit: it has none.
        """
        description = _Description()
        root = description.field_of(info)
        if root.kind != Kind.DICT:
            raise DoesNotFit
        return cls(root, description.nbytes)

    def in_c(self) -> Any:
        """Return an object with the same `id` and `write` in C; this one without the extension."""
        module = native.load()
        return self if module is None else module.Schema(self.id, self.nbytes, _facts(self.root))

    def write(self, info: Any, to: np.ndarray) -> bool:
        """Write an info to a row, uint8 `[nbytes]` or longer.

        Returns:
            False if the info has another schema, or a value does not fit; the row may be partly written.
        """
        return _write(self.root, info, to)

    def records(self, rows: np.ndarray) -> np.ndarray:
        """Return rows, uint8 `[k, width]` and contiguous, as records `[k]` (VIEW), whose items are named by places."""
        width = rows.shape[1]
        if width not in self._records:
            fields = {str(field.place): field for field in _stored(self.root)}
            formats = [(field.dtype, field.shape) for field in fields.values()]
            layout = {"names": [*fields], "formats": formats, "offsets": [*map(int, fields)], "itemsize": width}
            self._records[width] = np.dtype(layout)  # type: ignore[call-overload]  # numpy's types lack it
        return np.ndarray(len(rows), self._records[width], rows)

    def infos(self, records: np.ndarray) -> list[dict[str, Any]]:
        """Return the infos of records, with values in their own memory."""
        return self._read(records)


def _facts(field: Field) -> tuple[Any, ...]:
    """Return a field as the `Schema` in C takes it."""
    return field.kind, field.place, field.keys, tuple(map(_facts, field.items)), field.like()


def _write(field: Field, value: Any, to: np.ndarray) -> bool:
    kind = _kind_of(value)
    if kind is None or kind != field.kind:
        return False
    if kind <= Kind.TUPLE:
        if len(value) != len(field.items) or (kind == Kind.DICT and not _has_keys(value, field.keys)):
            return False
        items = value.values() if kind == Kind.DICT else value
        return all(map(_write, field.items, items, [to] * len(field.items)))
    if kind == Kind.TEXT:
        value = _encoded(value)
    if value is None or not field.dtype:
        return kind == Kind.NONE
    if kind >= Kind.SCALAR and not _is_like(value, field):
        return False
    if kind == Kind.INT and not _LEAST <= value <= _LARGEST:
        return False
    shape = field.shape if kind != Kind.TEXT else value.shape
    np.ndarray(shape, field.dtype, to, field.place)[...] = value
    return True


def _is_like(value: Any, field: Field) -> bool:
    """Return whether a numpy value has the type, dtype and shape that a field's values are read with."""
    dtype = value.dtype
    is_read_alike = dtype.char == np.dtype(field.dtype).char and value.__class__ in {np.ndarray, dtype.type}
    return is_read_alike and (dtype.str, value.shape) == (field.dtype, field.shape)


def _has_keys(value: Mapping[Any, Any], keys: tuple[str, ...]) -> bool:
    return all(own.__class__ is str and own == key for own, key in zip(value, keys, strict=True))


def _encoded(text: str) -> np.ndarray | None:
    """Return a text with its length; None if it is too long, or has no encoding."""
    try:
        data = text.encode()
    except UnicodeEncodeError:
        return None
    return np.frombuffer(len(data).to_bytes(8, "little") + data, np.uint8) if len(data) <= _TEXT_BYTES else None


def _stored(field: Field) -> Iterable[Field]:
    if field.dtype:
        yield field
    for item in field.items:
        yield from _stored(item)


def compile_reader(field: Field) -> Reader:
    """Return the function that returns the value of a field in each of some records, in its own memory."""
    kind, name = field.kind, str(field.place)
    if kind <= Kind.TUPLE:
        return _container_reader(field)
    if kind == Kind.NONE:
        return lambda records: [None] * len(records)
    if kind == Kind.TEXT:
        return lambda records: [_decoded(text.tobytes()) for text in records[name]]
    if kind == Kind.ARRAY:
        return lambda records: [records[name][i, ...].copy() for i in range(len(records))]
    if kind == Kind.SCALAR:
        return lambda records: list(records[name])
    return lambda records: records[name].tolist()


def _container_reader(field: Field) -> Reader:
    readers, keys = [compile_reader(item) for item in field.items], field.keys
    make: dict[int, Callable[[Any], Any]] = {
        Kind.DICT: lambda row: dict(zip(keys, row)),  # noqa: B905  # of equal length by construction
        Kind.LIST: list,
        Kind.TUPLE: tuple,
    }
    make_one = make[field.kind]

    def read(records: np.ndarray) -> list[Any]:
        columns = [read(records) for read in readers]
        return [*map(make_one, zip(*columns) if columns else [()] * len(records))]  # noqa: B905

    return read


def _decoded(data: bytes) -> str:
    return data[8 : 8 + int.from_bytes(data[:8], "little")].decode(errors="replace")


class InfoWriter:
    """Writes the infos of one env to the slab.

    Args:
        slab: with rows for infos.
        env_id: of the env.
        report: called with a message for each new schema.

    Attributes:
        schemas: those known so far, in C if that is there; `step.c` reads the list.
        rows: section -> the env's row, uint8 `[INFO_BYTES]` (VIEW).
    """

    def __init__(self, slab: Slab, env_id: int, report: Callable[[dict[str, Any]], None]) -> None:
        assert slab.infos is not None
        self.schemas: list[Any] = []
        self.rows = {"next": slab.infos[0, env_id], "root": slab.infos[1, env_id]}
        self._env_id, self._report = env_id, report
        self._words = {section: slab.words[f"info_{section}"] for section in self.rows}
        self._known: dict[int, Schema] = {}
        self._num_tried = 0

    def clear(self, section: str) -> None:
        """Note that the latest command has no info in a row."""
        self._words[section][self._env_id] = 0

    def write(self, section: str, info: Any) -> bool:
        """Write an info; return False if it must be sent as a message."""
        self.clear(section)
        if type(info) is not dict:
            return False
        for schema in self.schemas if info else ():
            if schema.write(info, self.rows[section]):
                self._words[section][self._env_id] = schema.id
                return True
        if info:
            self._learn(info)
        return not info

    def _learn(self, info: dict[Any, Any]) -> None:
        """Learn the schema of an info, for those that follow."""
        self._num_tried += 1
        if self._num_tried > MOST_SCHEMAS:
            return
        try:
            schema = Schema.of(info)
        except Exception:  # `DoesNotFit`, or what the class of a value raises
            return
        if schema.id not in self._known:
            self._known[schema.id] = schema
            self._report(NewSchema(self._env_id, schema.root, schema.nbytes).to_plain())
            self.schemas.append(schema.in_c())

    def read(self, section: str) -> dict[str, Any] | None:
        """Return the info in a row; None if there is none."""
        schema = self._known.get(int(self._words[section][self._env_id]))
        return None if schema is None else schema.infos(schema.records(self.rows[section][None]))[0]
