"""Batches of groups: frames of any size."""

from __future__ import annotations

import numpy as np
import pytest

from envherd.executor.batches import gather as gathering
from envherd.executor.batches.hand_out import GroupBatch, splitter
from envherd.shm.layout import lay_out
from envherd.shm.slab import Slab, plan_slab
from envherd.shm.specs import EnvSpec, LeafSpec


def test_frames_of_more_than_2_gib():
    image = LeafSpec(("pixels",), (1024, 1024, 3), "uint8")
    spec = EnvSpec(observation=(image,), action=(LeafSpec(("action",), (), "int64"),))
    plan = plan_slab([spec] * 700, 1, 2)
    slab = Slab(plan, np.zeros(plan.nbytes, np.uint8))  # no page of it is touched
    batch = GroupBatch(slab.groups[0], 2, None, has_interrupted=False)
    assert plan.groups[0].next_nbytes > 2**31
    _, leaves = batch.blank_next()
    assert [tuple(leaf.shape) for leaf in leaves] == [view.shape for view in batch.next_views(0)]


@pytest.mark.parametrize("largest", [gathering.LARGEST_RECORD, 0])
def test_a_buffer_is_split_into_its_fields(monkeypatch, largest):
    monkeypatch.setattr(gathering, "LARGEST_RECORD", largest)
    layout = lay_out([(("a",), (2, 3), "int16"), (("b",), (), "float64"), (("c",), (2, 0), "uint8")], 64)
    buffer = np.arange(layout.nbytes, dtype=np.uint8)
    fields = list(layout)
    for array, field in zip(splitter(fields, layout.nbytes)(buffer), fields, strict=True):
        assert (array.shape, array.dtype) == (field.shape, field.dtype)
        assert array.tobytes() == buffer[field.offset : field.offset + field.nbytes].tobytes()
