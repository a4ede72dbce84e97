"""Infos as rows of the slab: an info whose values have fixed types and shapes is written there, and read by columns.

A `Schema` has the entries of an info in their order, with the exact type, dtype and shape of each value. A worker
learns the schemas of an env from its infos and reports each once. From then on it writes an info as the schema's id
(a word of the slab) and the values (the env's row of the info area, one for steps and one for resets).

Guarantees: an info that was written is read as it was: the same keys in the same order, and values of the same types,
in their own memory. An info that does not fit (other types, long texts, integers beyond 64 bits, too many bytes) is not
written; the worker sends it as a message. Equal schemas have equal ids in all workers.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import cached_property
from itertools import starmap
from typing import Any, NamedTuple

import numpy as np

from envherd.shm.slab import INFO_BYTES, Slab
from envherd.workers import native
from envherd.workers.reply import NewSchema

#: The rows of an env, in this order.
SECTIONS = ("next", "root")
#: Schemas that a worker tries to learn for one env.
MOST_SCHEMAS = 16
#: Limits of a schema.
_MOST_FIELDS = 1000
_DEEPEST = 8
#: Bytes of a text in UTF-8, and of its length, which comes before it.
TEXT_BYTES = 120
_LENGTH_BYTES = 8
_ALIGNMENT = 8
_NUMBERS = "biufc"
_INTEGERS = range(-(2**63), 2**63)

#: Records -> a value of each.
Reader = Callable[[np.ndarray], list[Any]]

#: The exact type of a value; subclasses do not count. C has the same list, in `constants.h`.
Kind = IntEnum("Kind", "DICT LIST TUPLE NONE BOOL INT FLOAT TEXT SCALAR ARRAY", start=0)
_TYPES = (dict, list, tuple, type(None), bool, int, float, str, np.generic, np.ndarray)
#: By identity: the hash of a class may be code of the user's.
_KINDS = dict.fromkeys(map(id, np.sctypeDict.values()), Kind.SCALAR) | dict(
    zip(map(id, _TYPES), Kind, strict=True)
)
_DTYPES = {
    Kind.NONE: "",
    Kind.BOOL: "|b1",
    Kind.INT: "<i8",
    Kind.FLOAT: "<f8",
    Kind.TEXT: "|u1",
}


class DoesNotFit(Exception):
    """No schema describes an info."""


class SchemaField(NamedTuple):
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
    items: "tuple[SchemaField, ...]" = ()
    dtype: str = ""
    shape: tuple[int, ...] = ()

    @classmethod
    def from_plain(cls, parts: Sequence[Any]) -> "SchemaField":
        """Return the field that a message holds; refuse objects, which would be read as addresses.

        Raises:
            ValueError: values of the dtype are no numbers.
        """
        kind, place, keys, items, dtype, shape = parts
        if dtype and np.dtype(dtype).kind not in _NUMBERS:
            raise ValueError(
                f"reading a schema failed: expected a numeric dtype, got {dtype}."
            )
        return cls(
            int(kind),
            int(place),
            tuple(map(str, keys)),
            tuple(map(cls.from_plain, items)),
            dtype,
            tuple(shape),
        )

    def facts(self) -> tuple[Any, ...]:
        """Return the field as the `Schema` in C takes it, with a value of the stored type and shape."""
        like = np.zeros(self.shape, self.dtype or "u1")
        value = like[()] if self.kind == Kind.SCALAR else like
        return (
            self.kind,
            self.place,
            self.keys,
            tuple(item.facts() for item in self.items),
            value,
        )

    def stored(self) -> "Iterator[SchemaField]":
        """Return the fields below this one that have a place."""
        if self.dtype:
            yield self
        for item in self.items:
            yield from item.stored()

    def write(self, value: Any, to: np.ndarray) -> None:
        """Write a value that has been described by this field."""
        if self.items:
            values = value.values() if self.kind == Kind.DICT else value
            for item, own in zip(self.items, values, strict=True):
                item.write(own, to)
        if self.kind == Kind.TEXT:
            value = _encoded(value)
        if self.dtype:
            shape = value.shape if self.kind == Kind.TEXT else self.shape
            np.ndarray(shape, self.dtype, to, self.place)[...] = value


class _Description:
    """Finds the fields of one info, and a place for each."""

    nbytes = num_fields = 0

    def field_of(self, value: Any, depth: int = 0) -> SchemaField:
        """Return the field of a value.

        Raises:
            DoesNotFit: it, or an item of it, is of another type or too large, or there is too much of it.
        """
        kind = _KINDS.get(id(type(value)))
        self.num_fields += 1
        if kind is None or depth == _DEEPEST or self.num_fields > _MOST_FIELDS:
            raise DoesNotFit
        if kind <= Kind.TUPLE:
            keys = tuple(value) if kind == Kind.DICT else ()
            if any(type(key) is not str for key in keys):
                raise DoesNotFit
            items = value.values() if kind == Kind.DICT else value
            return SchemaField(
                kind,
                0,
                keys,
                tuple(self.field_of(item, depth + 1) for item in items),
            )
        dtype = _DTYPES.get(kind, "")
        shape: tuple[int, ...] = ()
        if kind >= Kind.SCALAR:
            dtype = _numeric_dtype(value)
            shape = value.shape
        elif kind == Kind.TEXT:
            shape = (_LENGTH_BYTES + TEXT_BYTES,)
            _encoded(value)
        elif kind == Kind.INT and value not in _INTEGERS:
            raise DoesNotFit
        place = self.nbytes
        num_bytes = np.dtype(dtype).itemsize * int(np.prod(shape)) if dtype else 0
        self.nbytes += -(-max(num_bytes, bool(dtype)) // _ALIGNMENT) * _ALIGNMENT
        if self.nbytes > INFO_BYTES:
            raise DoesNotFit
        return SchemaField(kind, place, (), (), dtype, shape)


def _numeric_dtype(value: Any) -> str:
    """Return the dtype of a numpy value, by which its values are read with the same type."""
    dtype = value.dtype
    is_known = dtype.kind in _NUMBERS and np.dtype(dtype.str).char == dtype.char
    if not is_known or type(value) not in {np.ndarray, dtype.type}:
        raise DoesNotFit
    return str(dtype.str)


def _encoded(text: str) -> np.ndarray:
    """Return a text with its length; `DoesNotFit` if it is too long, `UnicodeEncodeError` if it has no encoding."""
    data = text.encode()
    if len(data) > TEXT_BYTES:
        raise DoesNotFit
    return np.frombuffer(len(data).to_bytes(_LENGTH_BYTES, "little") + data, np.uint8)


def _decoded(data: bytes) -> str:
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    return data[_LENGTH_BYTES : _LENGTH_BYTES + length].decode(errors="replace")


class Schema:
    """The fields of an info.

    Attributes:
        root: the info itself, a dict.
        nbytes: of a row.
        id: a positive int64.
    """

    def __init__(self, root: SchemaField, nbytes: int) -> None:
        self.root = root
        self.nbytes = nbytes
        # From the content, so that the caller can compare ids of all workers.
        digest = hashlib.blake2b(
            # As in `plain`, so that lone surrogates are no character.
            json.dumps([root, nbytes], ensure_ascii=False).encode(
                errors="surrogatepass"
            ),
            digest_size=8,
        ).digest()
        self.id = int.from_bytes(digest, "little") >> 1 or 1
        fields = {str(field.place): field for field in root.stored()}
        # As short as it can be: a copy of some records has no bytes of other infos.
        self._record = np.dtype(
            {
                "names": [*fields],
                "formats": [(one.dtype, one.shape) for one in fields.values()],
                "offsets": [*map(int, fields)],
                "itemsize": nbytes,
            }
        )

    @cached_property
    def infos(self) -> Reader:
        """Records -> infos, with values in their own memory; compiled at the first use."""
        return compile_reader(self.root)

    @classmethod
    def of(cls, info: dict[Any, Any]) -> "Schema":
        """Return the schema of an info.

        Raises:
            DoesNotFit: it has none.
            UnicodeEncodeError: it has none, as a text in it has no encoding.
        """
        description = _Description()
        root = description.field_of(info)
        return cls(root, description.nbytes)

    def in_c(self) -> Any:
        """Return an object with the same `write` in C; this one without the extension."""
        module = native.load()
        return (
            self
            if module is None
            else module.Schema(self.id, self.nbytes, self.root.facts())
        )

    def write(self, info: dict[Any, Any], to: np.ndarray) -> int:
        """Write an info to a row, uint8 `[nbytes]` or longer.

        Returns:
            The schema's id; 0 if the info has another schema, or none. In C the row may be partly written then.
        """
        try:
            if _Description().field_of(info) != self.root:
                return 0
        except (DoesNotFit, UnicodeEncodeError):
            return 0
        self.root.write(info, to)
        return self.id

    def records(self, rows: np.ndarray) -> np.ndarray:
        """Return rows, uint8 `[k, width]` and contiguous, as records `[k]` (VIEW), whose items are named by places."""
        return np.ndarray(len(rows), self._record, rows, 0, rows.strides[:1])


def compile_reader(field: SchemaField) -> Reader:
    """Return the function that returns the value of a field in each of some records, in its own memory."""
    stored = list(field.stored())
    names = [str(one.place) for one in stored]
    types = {f"type_{one.place}": np.dtype(one.dtype).type for one in stored}
    arguments = ", ".join(f"value_{name}" for name in names)
    # Keys come into it as literals, and places are integers: no text of a worker is code.
    make = eval(f"lambda {arguments}: {_expression(field)}", types)
    if any(one.kind in (Kind.TEXT, Kind.ARRAY) for one in stored):
        columns = [_column_reader(one) for one in stored]
        return lambda records: list(map(make, *(read(records) for read in columns)))

    if not names:
        return lambda records: [make() for _ in range(len(records))]

    def read(records: np.ndarray) -> list[Any]:
        if len(names) < len(records.dtype.names or ()):
            records = records[names]
        # One call of numpy converts all values, in a third of the time of a call for each field.
        return list(starmap(make, records.tolist()))

    return read


def _expression(field: SchemaField) -> str:
    """Return the expression of a field's value, from `value_PLACE` of each stored field as numpy's `tolist` has it."""
    items = [_expression(item) for item in field.items]
    if field.kind == Kind.DICT:
        pairs = zip(field.keys, items, strict=True)
        return "{" + ", ".join(f"{key!r}: {item}" for key, item in pairs) + "}"
    forms: dict[int, str] = {
        Kind.LIST: f"[{', '.join(items)}]",
        Kind.TUPLE: f"({''.join(f'{item}, ' for item in items)})",
        Kind.NONE: "None",
        Kind.SCALAR: f"type_{field.place}(value_{field.place})",
    }
    return forms.get(field.kind, f"value_{field.place}")


def _column_reader(field: SchemaField) -> Reader:
    """Return the function that returns the values of a stored field, arrays in their own memory."""
    name = str(field.place)
    if field.kind == Kind.TEXT:
        return lambda records: [_decoded(text.tobytes()) for text in records[name]]
    if field.kind == Kind.ARRAY:
        return lambda records: [
            records[name][i, ...].copy() for i in range(len(records))
        ]
    return lambda records: records[name].tolist()


class InfoWriter:
    """Writes the infos of one env to the slab.

    Args:
        slab: with rows for infos.
        env_id: of the env.
        report: called with a message for each new schema.

    Attributes:
        schemas: those known so far, in C if that is there; `step.c` reads the list.
        rows: of its step and its reset, uint8 `[2, INFO_BYTES]` (VIEW).
    """

    def __init__(
        self,
        slab: Slab,
        env_id: int,
        report: Callable[[dict[str, Any]], None],
    ) -> None:
        assert slab.infos is not None
        self.schemas: list[Any] = []
        self.rows = slab.infos[env_id]
        self._ids = slab.words["info_ids"].reshape(-1, 2)[env_id]
        self._env_id = env_id
        self._report = report
        self._num_tried = 0

    def clear(self, section: str) -> None:
        """Note that the latest command has no info in a row."""
        self._ids[SECTIONS.index(section)] = 0

    def write(self, section: str, info: Any) -> bool:
        """Write an info; return False if it must be sent as a message."""
        self.clear(section)
        if type(info) is not dict or not info:
            return type(info) is dict
        index = SECTIONS.index(section)
        try:
            # Most envs have one schema for all steps, so the first one fits.
            written = (schema.write(info, self.rows[index]) for schema in self.schemas)
            found = next(filter(None, written), 0)
            if not found and self._num_tried < MOST_SCHEMAS:
                self._learn(info)
        # It has no schema, or a thread of the env has changed it meanwhile.
        except Exception:
            return False
        self._ids[index] = found
        return bool(found)

    def _learn(self, info: dict[Any, Any]) -> None:
        """Learn the schema of an info, for those that follow; `DoesNotFit` if it has none."""
        self._num_tried += 1
        schema = Schema.of(info)
        self._report(NewSchema(self._env_id, schema.root, schema.nbytes).to_plain())
        self.schemas.append(schema.in_c())
