"""Specs survive the conversion to plain data; `difference` names the first difference of two specs."""

import numpy as np
import pytest

from envherd.shm.specs import (
    DONE_KEYS,
    Binary,
    Box,
    Discrete,
    EnvSpec,
    LeafSpec,
    MultiDiscrete,
    OneHot,
    Unbounded,
    done_leaves,
)
from envherd.workers import plain

DOMAINS = [
    Unbounded(),
    Box(np.zeros(3), np.ones(3)),
    Discrete(4, 2),
    MultiDiscrete((2, 3), (0, 1)),
    Binary(),
    OneHot(5),
]


def make_spec(domain=None, **changes):
    leaf = LeafSpec(("observation",), (3,), "float32", domain or Unbounded())
    given = {
        "observation": (leaf,),
        "action": (LeafSpec(("action",), (), "int64", Discrete(2)),),
    }
    return EnvSpec(**{**given, **changes})


@pytest.mark.parametrize("domain", DOMAINS, ids=lambda d: type(d).__name__)
def test_specs_survive_the_crossing(domain):
    spec = make_spec(
        domain, groups=((("agents",), (7,)),), family="test", metadata={"names": ["a"]}
    )
    back = EnvSpec.from_plain(plain.decode(plain.encode(spec.to_plain())))
    assert back == spec
    assert back.metadata == {"names": ["a"]}
    assert back.difference(spec) == ""


def test_the_difference_names_the_leaf():
    difference = make_spec().difference(make_spec(Discrete(3)))
    assert "observation observation: float32 (3,) in any against" in difference


def test_metadata_do_not_make_specs_differ():
    assert make_spec(metadata={"a": 1}) == make_spec(metadata={"a": 2})


def test_done_leaves_are_root_first():
    leaves = done_leaves((4,), ((("agents",), (4, 2, 1)),))
    assert tuple(leaf.key for leaf in leaves[:3]) == DONE_KEYS
    assert [leaf.shape for leaf in leaves] == [(4, 1)] * 3 + [(4, 2, 1)] * 3
    assert leaves[3].key == ("agents", "done")


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (np.uint8(0), np.uint8(255), "[0, 255]"),
        (np.array([-1, 0]), np.array([5, 9]), "[-1, 9]"),
        (np.float32(-np.inf), np.float32(2), "[-inf, 2.0]"),
        (np.zeros(0), np.zeros(0), "[]"),
    ],
)
def test_box_names_its_bounds_of_any_dtype(low, high, text):
    assert str(Box(low, high)) == text
