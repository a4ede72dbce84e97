"""Layouts are arithmetic: aligned, disjoint, the same everywhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envherd.shm.slab import (
    ALIGNMENT,
    Field,
    align,
    lay_out,
    strided_view,
    view,
)

DTYPES = st.sampled_from(["bool", "uint8", "int64", "float32", "float64"])
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
REQUESTS = st.lists(
    st.builds(Field, st.integers(0, 99).map(lambda i: (str(i),)), SHAPES, DTYPES),
    unique_by=lambda r: r.name,
)


@pytest.mark.parametrize(
    ("nbytes", "aligned"), [(0, 0), (1, 128), (128, 128), (129, 256)]
)
def test_align_rounds_up(nbytes, aligned):
    assert align(nbytes) == aligned


@given(REQUESTS, st.integers(0, 1000))
def test_fields_are_aligned_disjoint_and_inside(requests, start):
    layout = lay_out(requests, start)
    end = align(start)
    for field in layout:
        assert field.offset % ALIGNMENT == 0
        assert field.offset >= end
        end = field.offset + field.nbytes
    assert layout.nbytes >= end
    assert layout.nbytes % ALIGNMENT == 0


@given(REQUESTS)
def test_views_do_not_share_bytes(requests):
    layout = lay_out(requests)
    buffer = np.zeros(layout.nbytes, np.uint8)
    for number, field in enumerate(layout):
        view(buffer, field)[...] = number % 2
    for number, field in enumerate(layout):
        assert (view(buffer, field) == number % 2).all()


def test_fields_follow_each_other_with_their_offsets():
    layout = lay_out(
        [Field(("a",), (2,), "int64"), Field(("next", "b"), (3, 4), "float32")]
    )
    assert [*layout] == [
        Field(("a",), (2,), "int64", 0),
        Field(("next", "b"), (3, 4), "float32", 128),
    ]


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([Field(("a",), (), "bool")] * 2, "expected unique names"),
        ([Field(("a",), (2, -1), "bool")], "expected dimensions >= 0"),
    ],
)
def test_impossible_requests_are_refused(requests, message):
    with pytest.raises(ValueError, match=message):
        lay_out(requests)


def test_strided_view_repeats_a_field():
    layout = lay_out([Field(("a",), (2,), "int64")])
    buffer = np.zeros(3 * layout.nbytes, np.uint8)
    (field,) = layout
    columns = strided_view(buffer, field, 0, 3, layout.nbytes)
    columns[:] = [[1, 2], [3, 4], [5, 6]]
    for frame in range(3):
        assert view(buffer, field, frame * layout.nbytes).tolist() == [
            2 * frame + 1,
            2 * frame + 2,
        ]
