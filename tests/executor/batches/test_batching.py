"""Batches of groups: frames of any size, and roots after resets."""

import numpy as np
import pytest
import torch

from envherd.executor.batches import memory as batch_memory
from envherd.executor.batches.hand_out import GroupBatch
from envherd.executor.batches.memory import splitter
from envherd.shm.slab import Field, Slab, lay_out, plan_slab
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


@pytest.mark.parametrize("rows", [[0], [4], [0, 2, 3], [0, 1, 2, 3, 4]])
def test_mended_roots_equal_next_except_for_reset_rows(rows):
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
