"""An info that is written to a row is read as it was, in C and in Python; all others are refused alike."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from envherd.shm.slab import INFO_BYTES, Slab, plan_slab
from envherd.workers import info_rows, plain
from envherd.workers.info_rows import (
    MOST_SCHEMAS,
    DoesNotFit,
    InfoWriter,
    Schema,
    SchemaField,
)
from envherd.workers.testing import CountingEnv
from tests.scale import scaled

DTYPES = (
    "?",
    "i1",
    "u1",
    "i2",
    "u2",
    "i4",
    "u4",
    "i8",
    "u8",
    "f2",
    "f4",
    "f8",
    "F",
    "D",
    ">f8",
    ">i4",
)
SHAPES = ((), (1,), (3,), (2, 3), (0,), (0, 3), (2, 1, 2))


def _array(dtype: str, shape: tuple[int, ...], number: int) -> np.ndarray:
    values = np.arange(int(np.prod(shape))) + number % 50
    return (values % 2 if dtype == "?" else values).astype(dtype).reshape(shape)


ARRAYS = st.builds(
    _array, st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.integers(0, 99)
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(max_size=30).filter(lambda text: "\ud800" not in text),
    ARRAYS,
    ARRAYS.map(lambda array: array.T),
    ARRAYS.filter(lambda array: array.size).map(
        lambda array: array.astype(array.dtype.newbyteorder("=")).flat[0]
    ),
)
KEYS = st.text(max_size=4)
#: Values of infos, nested.
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, max_size=4),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=12,
)
INFOS = st.dictionaries(KEYS, VALUES, min_size=1, max_size=6)
#: What no row can hold.
ODD: tuple[Any, ...] = (
    object(),
    np.array(["text"]),
    np.str_("text"),
    np.datetime64("2020-01-01"),
    np.zeros(2, object),
    np.longlong(3),
    np.zeros(2, np.longlong),
    np.zeros(2).view(type("Mine", (np.ndarray,), {})),
    type("Number", (float,), {})(1.0),
    type("Raising", (np.float64,), {"dtype": property(lambda self: 1 / 0)})(1.0),
    type("Entries", (dict,), {})(a=1),
    {1: 2},
    {"deep": {"deep": {"deep": {"deep": {"deep": {"deep": {"deep": {"deep": {}}}}}}}}},
    [0] * 1001,
    np.zeros(INFO_BYTES + 1, np.uint8),
    b"bytes",
    1j,
)
#: What no row can hold, of types that one can.
LARGE = {
    "integer": (1, 2**63),
    "negative": (1, -(2**63) - 1),
    "text": ("a", "a" * 121),
    "no encoding": ("a", "\ud800"),
}


def _row() -> np.ndarray:
    return np.full(INFO_BYTES, 7, np.uint8)


def _writers(schema: Schema) -> list[Any]:
    return [schema, schema.in_c()]


def _content(value: Any) -> Any:
    """Return the types and bits of a value, and of its items in their order."""
    if isinstance(value, dict):
        return [(key, _content(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [_content(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value), value.dtype.str, value.shape, value.tobytes()
    return type(value), repr(value)


@settings(max_examples=scaled(150, 3000), deadline=None)
@given(st.lists(INFOS, min_size=1, max_size=3))
@example([{"'}, __import__('os').abort(), {'": 1}])
@pytest.mark.long
def test_infos_are_read_as_they_were(infos: list[dict[str, Any]]) -> None:
    for info in infos:
        schema = Schema.of(info)
        received = plain.decode(plain.encode(schema.root))
        assert Schema(SchemaField.from_plain(received), schema.nbytes).id == schema.id
        rows = [_row(), _row()]
        for writer, row in zip(_writers(schema), rows, strict=True):
            assert writer.write(info, row) == schema.id
        assert rows[0].tobytes() == rows[1].tobytes()
        assert (rows[0][schema.nbytes :] == 7).all()
        width = schema.nbytes + 64
        read = schema.infos(schema.records(np.stack(rows)[:, :width].copy()))
        assert _content(read) == _content([info, info])


@settings(max_examples=scaled(150, 3000), deadline=None)
@given(INFOS, INFOS)
@example(
    {"\U0001f600": 1}, {"\ud83d\ude00": 1}
)  # its surrogates, which JSON escapes alike
@pytest.mark.long
def test_infos_of_other_schemas_are_refused(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    schema, of_other = Schema.of(one), Schema.of(other)
    fits = [bool(writer.write(other, _row())) for writer in _writers(schema)]
    assert fits == [schema.id == of_other.id] * 2
    assert (schema.root == of_other.root) == fits[0]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: f"{type(odd).__name__}")
def test_values_of_other_types_are_refused(odd: Any) -> None:
    with pytest.raises(DoesNotFit):
        Schema.of({"fine": 1, "odd": odd})
    for like in (
        1,
        1.0,
        "text",
        np.zeros(2),
        np.float64(1),
        {"a": 1},
        None,
        [0],
        True,
        np.int64(3),
    ):
        for writer in _writers(Schema.of({"odd": like})):
            assert not writer.write({"odd": odd}, _row()), like


@pytest.mark.parametrize("name", LARGE)
def test_values_that_are_too_large_are_refused(name: str) -> None:
    small, large = LARGE[name]
    for writer in _writers(Schema.of({"value": small})):
        assert writer.write({"value": small}, _row())
        assert not writer.write({"value": large}, _row())


def test_other_keys_orders_and_objects_are_refused() -> None:
    for writer in _writers(Schema.of({"a": 1, "b": 2})):
        for other in (
            {"b": 2, "a": 1},
            {"a": 1},
            {"a": 1, "b": 2, "c": 3},
            {"a": 1, 2: 2},
            {"a": True, "b": 2},
        ):
            assert not writer.write(other, _row())
        assert writer.write({"ab"[0]: 1, "".join("b"): 2}, _row())


def test_a_worker_learns_some_schemas_and_reports_each_once() -> None:
    slab = Slab(
        plan := plan_slab([CountingEnv().spec] * 2, 1, 2, has_infos=True),
        np.zeros(plan.nbytes, np.uint8),
    )
    reports: list[Any] = []
    writer = InfoWriter(slab, 1, reports.append)
    infos = [{f"key {i}": i} for i in range(MOST_SCHEMAS + 2)]
    assert not any(writer.write("next", info) for info in infos)
    assert [writer.write("root", info) for info in infos] == [True] * MOST_SCHEMAS + [
        False
    ] * 2
    assert len(reports) == MOST_SCHEMAS
    assert slab.words["info_ids"].tolist() == [0] * 4
    assert writer.write("next", infos[3])
    assert writer.write("root", {})
    schema = Schema(SchemaField.from_plain(reports[3]["root"]), reports[3]["nbytes"])
    assert slab.words["info_ids"].tolist() == [0, 0, schema.id, 0]
    assert schema.infos(schema.records(slab.infos[1, :1])) == [infos[3]]  # type: ignore[index]


@pytest.mark.parametrize("known", [[], [Schema.of({"text": "a", "number": 1})]])
def test_info_changed_by_a_thread_is_sent_as_a_message(
    known: list[Schema], monkeypatch: pytest.MonkeyPatch
) -> None:
    slab = Slab(
        plan := plan_slab([CountingEnv().spec], 1, 2, has_infos=True),
        np.zeros(plan.nbytes, np.uint8),
    )
    writer, info = InfoWriter(slab, 0, print), {"text": "a", "number": 1}
    writer.schemas += known
    monkeypatch.setattr(info_rows, "_encoded", lambda text: info.clear())
    assert not writer.write("next", info)
    assert not slab.words["info_ids"].any()


HOSTILE = [
    *({"dtype": dtype} for dtype in ("|O", "O", "i4,O", "|S3", "<U3", "|V8", "<M8[s]")),
    {"place": "0=print('run')"},
]


@pytest.mark.parametrize("parts", HOSTILE, ids=str)
def test_a_message_with_objects_or_code_is_refused(parts: dict[str, Any]) -> None:
    """A worker could make values point anywhere, and the caller run its code."""
    root = Schema.of({"a": np.zeros(1)}).root
    item = root.items[0]._replace(**parts)
    received = plain.decode(plain.encode(root._replace(items=(item,))))
    with pytest.raises(ValueError, match=r"expected a numeric dtype|invalid literal"):
        SchemaField.from_plain(received)
