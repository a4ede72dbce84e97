"""Rows gathered by their addresses equal rows indexed by two arrays."""

import numpy as np
import pytest

from envherd.executor.batches import hand_out
from envherd.executor.batches.hand_out import Gatherer
from envherd.executor.batches.memory import LARGEST_RECORD
from envherd.shm.layout import Field, lay_out, strided_view

FRAMES, ROWS = 4, 6
LEAVES = [
    (("image",), (5, 3), "uint8"),
    (("speed",), (), "float64"),
    (("nothing",), (0, 2), "float32"),
    (("done",), (1,), "bool"),
    (("over",), (1,), "bool"),
    (("wide",), (700,), "int16"),
]


@pytest.fixture
def drawn() -> tuple[np.ndarray, list[list[np.ndarray]]]:
    """A buffer of random bytes (bools are 0 or 1), and two sections of the same leaves in frames of it."""
    generator = np.random.default_rng(0)
    requests = [
        Field((section, *name), (ROWS, *shape), dtype)
        for section in "ab"
        for name, shape, dtype in LEAVES
    ]
    layout, base = lay_out(requests, 64), 192
    buffer = generator.integers(0, 2, base + FRAMES * layout.nbytes, np.uint8)
    fields = {field.name: field for field in layout}
    sections = [
        [
            strided_view(buffer, fields[section, *name], base, FRAMES, layout.nbytes)
            for name, _, _ in LEAVES
        ]
        for section in "ab"
    ]
    return buffer, sections


@pytest.mark.parametrize("largest_record", [LARGEST_RECORD, 14])
@pytest.mark.parametrize("count", [1, 3, ROWS, 0])
def test_rows_are_those_of_index_arrays(
    drawn: tuple[np.ndarray, list[list[np.ndarray]]],
    count: int,
    largest_record: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if a row is too large for a record, as an image is for one of 14 bytes."""
    monkeypatch.setattr(hand_out, "LARGEST_RECORD", largest_record)
    buffer, sections = drawn
    gatherer, generator = Gatherer(buffer, sections), np.random.default_rng(count)
    for _ in range(50):
        columns = generator.integers(0, FRAMES, count)
        rows = generator.permutation(ROWS)[:count]
        in_second = generator.random(count) < 0.5
        for chosen in (None, in_second):
            gathered = gatherer.gather(gatherer.places(columns, rows, chosen))
            for leaf, first, second in zip(gathered, *sections, strict=True):
                expected = first[columns, rows]
                if chosen is not None:
                    expected[chosen] = second[columns, rows][chosen]
                assert leaf.dtype == first.dtype
                assert leaf.shape == expected.shape
                np.testing.assert_array_equal(leaf, expected)


def test_gathered_rows_are_copies(
    drawn: tuple[np.ndarray, list[list[np.ndarray]]],
) -> None:
    buffer, sections = drawn
    gatherer = Gatherer(buffer, sections)
    gathered = gatherer.gather(gatherer.places(np.array([1, 2]), np.array([0, 5])))
    before = [leaf.copy() for leaf in gathered]
    buffer[:] = 7
    for leaf, kept in zip(gathered, before, strict=True):
        np.testing.assert_array_equal(leaf, kept)
        leaf[...] = 0  # and it can be written
    assert (buffer == 7).all()
