"""Batches of groups: frames of any size; rows gathered by their addresses equal rows indexed by two arrays."""

import numpy as np
import pytest
import torch

from envherd.executor.batches import hand_out
from envherd.executor.batches import memory as batch_memory
from envherd.executor.batches.hand_out import Gatherer, GroupBatch
from envherd.executor.batches.memory import LARGEST_RECORD, splitter
from envherd.shm.slab import Field, Slab, lay_out, plan_slab, strided_view
from envherd.shm.specs import EnvSpec, LeafSpec


def test_frames_of_more_than_2_gib():
    image = LeafSpec(("pixels",), (1024, 1024, 3), "uint8")
    spec = EnvSpec(observation=(image,), action=(LeafSpec(("action",), (), "int64"),))
    plan = plan_slab([spec] * 700, 1, 2)
    slab = Slab(plan, np.zeros(plan.nbytes, np.uint8))  # none of its pages is touched
    batch = GroupBatch(slab.groups[0], 2, None, has_interrupted=False)
    assert plan.groups[0].next_nbytes > 2**31
    _, leaves = batch.memory.take(0)
    assert [tuple(leaf.shape) for leaf in leaves] == [
        view.shape for view in batch.next_views(0)
    ]


@pytest.mark.parametrize("few", [0, 8])
@pytest.mark.parametrize("rows", [[0], [4], [0, 2, 3], [0, 1, 2, 3, 4]])
def test_mended_roots_equal_next_except_for_reset_rows(monkeypatch, few, rows):
    monkeypatch.setattr(hand_out, "_FEW_ROWS", few)
    leaves = (
        LeafSpec(("a",), (2, 3), "int16"),
        LeafSpec(("deep", "b"), (), "float64"),
        LeafSpec(("c",), (0,), "uint8"),
    )
    spec = EnvSpec(observation=leaves, action=(LeafSpec(("action",), (), "int64"),))
    plan = plan_slab(
        [EnvSpec(observation=leaves[:1], action=spec.action), *[spec] * 5], 1, 3
    )
    slab = Slab(
        plan, np.random.default_rng(0).integers(0, 2, plan.nbytes).astype(np.uint8)
    )
    group = slab.groups[1]
    batch = GroupBatch(group, 3, None, has_interrupted=False)
    kept = []
    for column in (0, 1, 2, 0, 1):
        roots = batch.mended_roots(column, np.array(rows))
        kept.append([root.clone() for root in roots])
        for key, root in zip(batch.root_keys, roots, strict=True):
            expected = group.columns["next", *key][column].copy()
            expected[rows] = group.columns["root", *key][column][rows]
            assert root.numpy().dtype == expected.dtype
            assert root.numpy().tobytes() == expected.tobytes()
        kept.append(roots)
    for own, roots in zip(kept[::2], kept[1::2], strict=True):
        assert all(
            torch.equal(one, other) for one, other in zip(own, roots, strict=True)
        ), "held roots never change"


@pytest.mark.parametrize("largest", [batch_memory.LARGEST_RECORD, 0])
def test_a_buffer_is_split_into_its_fields(monkeypatch, largest):
    monkeypatch.setattr(batch_memory, "LARGEST_RECORD", largest)
    layout = lay_out(
        [
            Field(("a",), (2, 3), "int16"),
            Field(("b",), (), "float64"),
            Field(("c",), (2, 0), "uint8"),
        ],
        64,
    )
    buffer = np.arange(layout.nbytes, dtype=np.uint8)
    fields = list(layout)
    for array, field in zip(
        splitter(fields, layout.nbytes)(buffer), fields, strict=True
    ):
        assert (array.shape, array.dtype) == (field.shape, field.dtype)
        assert (
            array.tobytes()
            == buffer[field.offset : field.offset + field.nbytes].tobytes()
        )


# ---- gathered rows ------------------------------------------------------------------------------

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
