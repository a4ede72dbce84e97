"""Plain data survive encoding; all other data are refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from envherd.workers.plain import NotPlain, decode, encode

KEYS = st.one_of(
    st.text(max_size=5),
    st.integers(),
    st.booleans(),
    st.none(),
    st.tuples(st.integers(), st.text(max_size=3)),
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=20),
    st.binary(max_size=20),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
    max_leaves=20,
)


def typed(value):
    """Return a value with its types, so that True is not 1."""
    if isinstance(value, (list, tuple)):
        return type(value), [typed(item) for item in value]
    if isinstance(value, dict):
        return dict, [(typed(k), typed(v)) for k, v in value.items()]
    return type(value), value


@given(VALUES)
@example({"\ud83d\ude00": "\ud83d\ude00"})  # no character: two lone surrogates
def test_encoded_values_decode_to_equal_ones(value):
    assert typed(decode(encode(value))) == typed(value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3)[:, ::2],
        np.zeros((0, 3), np.float32),
        np.array(3.5),
        np.array([True, False]),
        np.array(["a", "bcd"]),
        np.array([1 + 2j]),
        np.uint8(7),
        np.float64("nan"),
        np.str_(""),
        np.bytes_(b""),
        np.ndarray((2, 0), "U0"),
        np.ndarray((2, 3), "S0"),
        np.ndarray((), "U0"),
    ],
)
def test_arrays_and_scalars_keep_dtype_shape_and_kind(array):
    back = decode(encode({"x": [array]}))["x"][0]
    assert type(back) is type(array)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_arrays_are_fresh_and_writable():
    array = np.zeros(3)
    back = decode(encode(array))
    back[0] = 1
    assert not array.any()


def test_tensors_arrive_as_arrays():
    back = decode(encode(torch.ones(2, requires_grad=True)))
    assert isinstance(back, np.ndarray)
    assert back.tolist() == [1, 1]


def test_odd_floats():
    nan, inf = decode(encode([math.nan, -math.inf]))
    assert math.isnan(nan)
    assert inf == -math.inf


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, lambda: 0, np.array([object()]), ValueError("x"), range(3)],
)
def test_everything_else_is_refused_by_name(value):
    with pytest.raises(NotPlain, match=r"value\['a'\]\[1\] is a"):
        encode({"a": [0, value]})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda data: data[:-1], "decode failed"),
        (lambda data: data + b"x", "decode failed"),
        (lambda data: data.replace(b'"<i8"', b'"|O8"'), "numeric dtype"),
    ],
    ids=["too short", "too long", "objects"],
)
def test_a_wrong_length_or_dtype_is_an_error(change, expected):
    data = encode([np.arange(3)])
    with pytest.raises(ValueError, match=expected):
        decode(change(data))
