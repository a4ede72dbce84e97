"""Two checks of actions, numpy's and torch's, and the sampler agree on what is legal, over random leaves and values."""

from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from envherd.executor.batches.actions import check_for
from envherd.executor.guests.simulator.rows import is_legal
from envherd.executor.options import ActionCheck
from envherd.shm.specs import (
    Binary,
    Box,
    Discrete,
    Domain,
    LeafSpec,
    MultiDiscrete,
    OneHot,
    Unbounded,
)
from envherd.workers.random_values import drawer

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "float32", "float64")
# Torch has no comparison of other unsigned integers.
COMPARED = ("int8", "int16", "int32", "int64", "uint8")
SHAPES = st.sampled_from([(), (1,), (3,), (2, 3)])


def bounds(dtype: str, shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    """Return boxes whose bounds are one for all values or one each, some infinite, of the leaf's dtype or float64."""
    if dtype in INTEGERS:
        limits = np.iinfo(dtype)
        ends, kinds = st.sampled_from([limits.min, 0, 1, 5, limits.max]), [dtype]
    else:
        ends, kinds = (
            st.sampled_from([-np.inf, -7.0, -0.1, 0.0, 0.1, 3.0, np.inf]),
            [dtype, "float64"],
        )

    def box(pairs: list[tuple[Any, Any]], kind: str) -> Box:
        low, high = (
            np.array([end(pair) for pair in pairs], kind) for end in (min, max)
        )
        return (
            Box(low.reshape(shape), high.reshape(shape))
            if len(pairs) > 1 or shape
            else Box(low[0], high[0])
        )

    num_values = int(np.prod(shape, dtype=int))
    pair = st.tuples(ends, ends).filter(
        lambda two: min(two) != np.inf and max(two) != -np.inf
    )
    return st.builds(
        box,
        st.lists(pair, min_size=num_values, max_size=num_values),
        st.sampled_from(kinds),
    )


@st.composite
def leaves(draw: Any) -> LeafSpec:
    """Return a leaf of any domain, dtype and shape."""
    shape, dtype = draw(SHAPES), draw(st.sampled_from((*INTEGERS, *FLOATS, "bool")))
    domains: list[st.SearchStrategy[Domain]] = [st.just(Unbounded())]
    if dtype != "bool":
        domains.append(bounds(dtype, shape))
    if dtype in (*INTEGERS, "bool"):
        domains.append(st.just(Binary()))
    if dtype in INTEGERS:
        domains.append(
            st.builds(
                Discrete, st.integers(1, 127) | st.just(int(np.iinfo(dtype).max) + 1)
            )
        )
        if shape:
            domains += [st.just(OneHot(shape[-1]))]
            nvec = st.lists(st.integers(1, 127), min_size=shape[-1], max_size=shape[-1])
            domains.append(
                st.builds(
                    lambda row: MultiDiscrete(np.broadcast_to(row, shape).tolist()),
                    nvec,
                )
            )
    return LeafSpec(("action",), shape, dtype, draw(st.one_of(domains)))


def telling(leaf: LeafSpec) -> np.ndarray:
    """Return values at and around every bound of a leaf, and values outside any domain, in its dtype."""
    dtype, domain = np.dtype(leaf.dtype), leaf.domain
    ends: list[Any] = [0, 1, 2]
    if isinstance(domain, Discrete):
        ends += [domain.n - 1, domain.n]
    if isinstance(domain, MultiDiscrete):
        ends += [
            end - past for end in np.ravel(domain.nvec).tolist() for past in (0, 1)
        ]
    if isinstance(domain, Box):
        ends += [*np.ravel(domain.low).tolist(), *np.ravel(domain.high).tolist()]
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        wanted = [
            limits.min,
            limits.max,
            *(end + off for end in ends for off in (-1, 0, 1)),
        ]
        return np.array(
            [one for one in wanted if limits.min <= one <= limits.max], dtype
        )
    if dtype.kind == "b":
        return np.array([False, True])
    with np.errstate(over="ignore"):
        near = np.array(ends, "float64").astype(dtype)
        below, above = (
            np.nextafter(near, dtype.type(end)) for end in (-np.inf, np.inf)
        )
        return np.concatenate(
            [near, below, above, np.array([np.nan, np.inf, -np.inf], dtype)]
        )


def batch_of(leaf: LeafSpec, seed: int) -> np.ndarray:
    """Return values at the bounds for two envs, drawn per value of the leaf or one for all."""
    rng, shape = np.random.default_rng(seed), (2, *leaf.shape)
    values = telling(leaf)
    return rng.choice(values, shape) if seed % 2 else np.full(shape, rng.choice(values))


@given(
    leaf=leaves(),
    level=st.sampled_from(get_args(ActionCheck)),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=500, deadline=None)
@pytest.mark.long
def test_torch_decides_as_numpy_does_or_leaves_it_to_numpy(leaf, level, seed):
    batch = batch_of(leaf, seed)
    check = check_for(leaf, level)
    is_expected = check is None or check(batch) is None
    is_found = is_legal(leaf, torch.from_numpy(batch), level)
    assert is_found == is_expected or not is_found
    if leaf.dtype in FLOATS or (
        leaf.dtype in COMPARED and isinstance(leaf.domain, (Discrete, MultiDiscrete))
    ):
        assert is_found == is_expected, "these are decided on the tensor's own device"


@given(leaf=leaves(), seed=st.integers(0, 2**32))
@settings(max_examples=500, deadline=None)
@pytest.mark.long
def test_drawn_actions_are_legal(leaf, seed):
    # Bounds of another dtype may lie between two values.
    assume(not isinstance(leaf.domain, Box) or leaf.domain.low.dtype == leaf.dtype)
    draw, check = drawer(leaf), check_for(leaf, "strict")
    assert draw is not None
    drawn = draw(np.random.default_rng(seed), (5, *leaf.shape))
    assert drawn.dtype == leaf.dtype
    assert check is None or check(drawn) is None


def test_a_bound_that_the_dtype_cannot_hold_is_not_rounded_for_torch():
    leaf = LeafSpec(("action",), (), "float32", Box(np.array(-np.inf), np.array(0.1)))
    above = np.full(2, 0.1, np.float32)
    assert float(above[0]) > 0.1
    check = check_for(leaf, "strict")
    assert check is not None
    assert check(above) is not None
    assert not is_legal(leaf, torch.from_numpy(above), "strict")


def test_uint64_indices_are_drawn_below_their_bounds():
    leaf = LeafSpec(("action",), (2, 2), "uint64", MultiDiscrete(((2, 100), (2, 100))))
    draw = drawer(leaf)
    assert draw is not None
    assert draw(np.random.default_rng(0), (500, 2, 2)).reshape(-1, 2).max(
        0
    ).tolist() == [1, 99]
