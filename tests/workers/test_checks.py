"""Writers store fitting values, cast within a kind, and refuse others with both shapes in the message."""

import numpy as np
import pytest

from envherd.shm.specs import LeafSpec
from envherd.workers.errors import SpecError
from envherd.workers.writers import writer_for


def written(leaf, value, **options):
    array = np.zeros((2, *leaf.shape), leaf.dtype)
    writer_for(leaf, array, **options)(1, value)
    assert not array[0].any()
    return array[1]


FITS = [
    ((3,), "float32", np.ones(3, np.float32), [1, 1, 1]),
    ((3,), "float32", np.ones(3), [1, 1, 1]),
    ((3,), "float32", [1, 2, 3], [1, 2, 3]),
    ((3,), "uint8", [1, 2, 255], [1, 2, 255]),
    ((2, 2), "int64", np.ones((2, 2), np.int32), [[1, 1], [1, 1]]),
    ((), "int64", 5, 5),
    ((), "int64", np.int32(5), 5),
    ((2,), "int32", np.array([-(2**31), 2**31 - 1]), [-(2**31), 2**31 - 1]),
    ((), "float32", 1, 1.0),
    ((), "bool", np.True_, True),
    ((1,), "float32", 2.5, [2.5]),
    ((1,), "float32", np.float64(2.5), [2.5]),
    ((1,), "float32", np.array([2.5], np.float32), [2.5]),
    ((1,), "float64", np.array(2.5), [2.5]),
]

REFUSED = [
    (
        (3,),
        "float32",
        np.ones(4, np.float32),
        r"expected float32 \(3,\), got float32 \(4,\)",
    ),
    ((4,), "float32", 5.0, r"got float64 \(\)"),
    ((4,), "float32", None, "got None"),
    ((3,), "uint8", np.ones(3, np.float32), r"got float32 \(3,\)"),
    ((3,), "uint8", [1, 2, 256], r"expected uint8 \(3,\), got int64"),
    ((3,), "uint8", [-1, 2, 3], "got int64"),
    ((2,), "int32", np.array([1, 2**31]), "with values from 1 to 2147483648"),
    ((), "uint8", 300, "with values from 300 to 300"),
    ((), "int64", np.uint64(2**63), "got uint64"),
    ((2,), "float32", [[1], [2, 3]], "got something ragged"),
    ((2,), "float32", ["a", "b"], "got list of dtype"),
    ((), "int64", 1.5, r"got float64 \(\)"),
    ((), "int64", None, "got None"),
    ((1,), "float32", None, "got None"),
    ((1,), "float32", "x", "got str of dtype"),
    ((1,), "float32", np.ones(2), r"got float64 \(2,\)"),
]


@pytest.mark.parametrize(("shape", "dtype", "value", "stored"), FITS)
def test_writer_stores_values_that_fit(shape, dtype, value, stored):
    assert written(LeafSpec(("x",), shape, dtype), value).tolist() == stored


@pytest.mark.parametrize(("shape", "dtype", "value", "message"), REFUSED)
def test_writer_refuses_values_that_do_not_fit(shape, dtype, value, message):
    leaf = LeafSpec(("obs", "x"), shape, dtype)
    with pytest.raises(SpecError, match=r"writing obs/x failed: .*" + message):
        written(leaf, value)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("shape", "where"),
    [((1,), r"\."), ((3,), r" at \(2,\)\."), ((2, 2), r" at \(1, 1\)\.")],
)
def test_nan_and_infinity_are_refused_when_asked_for(shape, where, value):
    leaf = LeafSpec(("x",), shape, "float32")
    filled = np.zeros(shape, np.float32)
    filled.flat[-1] = value
    written(leaf, filled)
    with pytest.raises(
        SpecError,
        match=rf"writing x failed: expected finite values .*, got {value}{where}",
    ):
        written(leaf, filled, check_finite=True)


def test_the_value_is_copied():
    leaf, value = LeafSpec(("x",), (2,), "float32"), np.ones(2, np.float32)
    array = np.zeros((1, 2), np.float32)
    writer_for(leaf, array)(0, value)
    value[:] = 7
    assert array.tolist() == [[1, 1]]
