"""The caller's values are checked one by one before any is written; no process."""

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from envherd.executor.batches.actions import GroupIntake, check_for, reset_mask
from envherd.shm.slab import Slab, plan_slab
from envherd.shm.specs import (
    Binary,
    Box,
    Discrete,
    Domain,
    EnvSpec,
    LeafSpec,
    MultiDiscrete,
    OneHot,
    Unbounded,
)
from envherd.workers.errors import ActionError

NUM_ENVS = 3
UNIT = Box(np.full(2, -1.0), np.array([1.0, 2.0]))

#: domain, dtype -> legal values of one env, and values whose marked entries are illegal.
CASES: list[tuple[Domain, str, list[Any], list[tuple[Any, Any]]]] = [
    (Discrete(3), "int64", [0, 1, 2], [(3, True), (-1, True), (2**62, True)]),
    (Discrete(3), "uint8", [0, 2], [(3, True), (255, True)]),
    (
        MultiDiscrete((2, 3)),
        "int32",
        [[1, 2], [0, 0]],
        [([2, 2], [True, False]), ([1, 3], [False, True])],
    ),
    (
        UNIT,
        "float32",
        [[-1, -1], [1, 2]],
        [([-1.5, 0], [True, False]), ([1, 2.5], [False, True])],
    ),
    (
        UNIT,
        "float64",
        [[0, 1.5]],
        [([np.nan, 0], [True, False]), ([np.inf, -np.inf], [True, True])],
    ),
    (
        Binary(),
        "int8",
        [[0, 1], [1, 1]],
        [([0, 2], [False, True]), ([-1, 1], [True, False])],
    ),
    (Binary(), "bool", [[False, True]], []),
    (
        OneHot(3),
        "int64",
        [[0, 0, 1], [1, 0, 0]],
        [([0, 0, 0], [True] * 3), ([1, 0, 1], [True] * 3)],
    ),
    (
        Unbounded(),
        "float32",
        [[-1e30, 1e30]],
        [([np.nan, 0], [True, False]), ([0, np.inf], [False, True])],
    ),
    (Unbounded(), "int64", [-(2**62)], []),
]


def leaf_of(domain: Domain, dtype: str, value: Any) -> LeafSpec:
    return LeafSpec(("action",), np.shape(value), dtype, domain)


@pytest.mark.parametrize(("domain", "dtype", "legal", "illegal"), CASES)
def test_every_value_of_a_domain_is_legal_and_no_other(domain, dtype, legal, illegal):
    check = check_for(leaf_of(domain, dtype, legal[0]), "strict")
    for value in legal:
        assert check is None or check(np.array([legal[0], value], dtype)) is None
    for value, marks in illegal:
        assert check is not None
        found = check(np.array([legal[0], value], dtype))
        assert found is not None
        np.testing.assert_array_equal(found, [np.zeros_like(marks), marks])


@pytest.mark.parametrize(
    ("level", "is_nan_found", "is_outside_found"),
    [("strict", True, True), ("finite", True, False), ("off", False, False)],
)
def test_a_level_says_what_is_looked_for(level, is_nan_found, is_outside_found):
    for domain in (UNIT, Unbounded()):
        check = check_for(leaf_of(domain, "float32", [0, 0]), level)
        assert (
            check is not None and check(np.array([[np.nan, 0]], np.float32)) is not None
        ) == is_nan_found
    check = check_for(leaf_of(UNIT, "float32", [0, 0]), level)
    assert (
        check is not None and check(np.array([[5, 0]], np.float32)) is not None
    ) == is_outside_found
    check = check_for(leaf_of(Discrete(3), "int64", 0), level)
    assert (check is not None and check(np.array([3])) is not None) == (
        level != "off"
    ), "an index is no number"


def intake_of(
    *action: LeafSpec,
    state: tuple[LeafSpec, ...] = (),
    level: Any = "strict",
    num_envs: int = NUM_ENVS,
    present: Any = None,
) -> Any:
    """Return an intake, and the arrays of its slab."""
    spec = EnvSpec(
        observation=(LeafSpec(("observation",), (1,)),),
        action=action,
        state=state,
        family="plain",
    )
    plan = plan_slab([spec] * num_envs, num_workers=1, num_ring=2)
    slab = Slab(plan, np.zeros(plan.nbytes, np.uint8))
    return GroupIntake(slab.groups[0], "strict", present), slab.groups[0].inputs


FORMS: list[tuple[Domain, str, tuple[int, ...]]] = [
    (Discrete(90), "int64", ()),
    (Discrete(90), "int32", ()),
    (Discrete(90), "int64", (2,)),
    (MultiDiscrete((90, 90)), "int64", (2,)),
    (Box(np.full(2, -99.0), np.full(2, 99.0)), "float32", (2,)),
    (Unbounded(), "float64", (2, 2)),
]


@pytest.mark.parametrize("num_envs", [NUM_ENVS, 60])
@pytest.mark.parametrize("rows", [None, [2, 0]])
@pytest.mark.parametrize(("domain", "dtype", "shape"), FORMS)
def test_the_short_way_writes_what_the_long_way_writes(
    domain, dtype, shape, rows, num_envs
):
    count = num_envs if rows is None else len(rows)
    values = (
        np.arange(1, 1 + count * int(np.prod(shape)))
        .reshape(count, *shape)
        .astype(dtype)
        % 90
    )
    td, where = (
        TensorDict({"action": torch.from_numpy(values)}, [count]),
        rows and np.array(rows),
    )
    leaf = LeafSpec(("action",), shape, dtype, domain)
    (short, shorts), (long, longs) = (
        intake_of(leaf, num_envs=num_envs),
        intake_of(leaf, num_envs=num_envs),
    )
    expected = np.zeros((num_envs, *shape), dtype)
    expected[slice(None) if rows is None else rows] = values
    assert short.take(td, where)
    long.write(long.read(td, where), where)
    for inputs in (shorts, longs):
        np.testing.assert_array_equal(inputs["input", "action"], expected)


@pytest.mark.parametrize("rows", [None, np.array([2, 0, 1])])
@pytest.mark.parametrize(
    ("domain", "dtype", "legal", "illegal"), [case for case in CASES if case[3]]
)
def test_one_illegal_value_refuses_all_and_names_its_env(
    domain, dtype, legal, illegal, rows
):
    intake, inputs = intake_of(leaf_of(domain, dtype, legal[0]))
    for value, _ in illegal:
        values = np.array([legal[0], value, legal[0]], dtype)
        td = TensorDict({"action": torch.from_numpy(values)}, [NUM_ENVS])
        assert not intake.take(td, rows)
        with pytest.raises(ActionError, match=r"expected (?!any).* at \(1") as caught:
            intake.read(td, rows)
        assert caught.value.env_ids == (1 if rows is None else 0,)
        assert not inputs["input", "action"].any()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            torch.zeros(NUM_ENVS, 1, dtype=torch.int64),
            r"expected shape \(3,\), got shape \(3, 1\)",
        ),
        (
            torch.zeros(NUM_ENVS - 1, dtype=torch.int64),
            r"expected shape \(3,\), got shape \(2,\)",
        ),
        (torch.zeros(NUM_ENVS), "expected int64, got float32"),
        (torch.zeros(NUM_ENVS, dtype=torch.int64, device="meta"), "on the meta device"),
        (None, "expected a key"),
    ],
)
def test_other_shapes_kinds_and_keys_are_refused(given, message):
    intake, _ = intake_of(LeafSpec(("action",), (), "int64", Discrete(3)))
    td: Any = {} if given is None else {"action": given}
    td = TensorDict(td, [] if given is None else given.shape[:1])
    assert not intake.take(td)
    with pytest.raises(ActionError, match=message):
        intake.read(td, None)


@pytest.mark.parametrize(
    ("dtype", "given"),
    [
        ("int64", torch.tensor([0, 2, 1], dtype=torch.int32)),
        ("int16", torch.tensor([0, 2, 1])),
        ("float32", torch.tensor([0, 2, 1], dtype=torch.float64)),
        ("float32", torch.tensor([0.0, 2.0, 1.0], requires_grad=True)),
        ("float32", torch.tensor([0.0, 2.0, 1.0], dtype=torch.bfloat16)),
    ],
)
def test_values_of_the_same_kind_are_converted(dtype, given):
    intake, _ = intake_of(
        LeafSpec(
            ("action",), (), dtype, Discrete(3) if dtype != "float32" else Unbounded()
        )
    )
    td = TensorDict({"action": given}, [NUM_ENVS])
    assert not intake.take(td), "the short way is for what is there as the slab has it"
    (read,) = intake.read(td, None)
    assert (read.dtype, read.tolist()) == (dtype, [0, 2, 1])


@pytest.mark.parametrize("domain", [Discrete(3), Unbounded()])
def test_a_number_that_its_dtype_cannot_hold_is_illegal(domain):
    intake, _ = intake_of(LeafSpec(("action",), (), "int32", domain))
    with pytest.raises(ActionError, match=rf"got {2**32 + 1} at \(1,\) \(env 1\)"):
        intake.read(
            TensorDict({"action": torch.tensor([0, 2**32 + 1, 0])}, [NUM_ENVS]), None
        )


def test_missing_action_leaf_is_named_with_those_present():
    leaves = [
        LeafSpec(("action", name), (), "int64", Discrete(2))
        for name in ("heat", "mode")
    ]
    intake, _ = intake_of(*leaves)
    td = TensorDict({"observation": torch.zeros(NUM_ENVS)}, [NUM_ENVS])
    with pytest.raises(
        ActionError,
        match=r"action/heat expected a key .* got none among \['observation'\]",
    ):
        intake.read(td, None)
    td["action"] = TensorDict(
        {"mode": torch.zeros(NUM_ENVS, dtype=torch.int64)}, [NUM_ENVS]
    )
    with pytest.raises(
        ActionError,
        match=r"action/heat expected a key .* got none among \['action/mode'\]",
    ):
        intake.read(td, None)


def test_side_inputs_are_not_passed_over():
    note = LeafSpec(("note",), (), "", is_side=True)
    intake, _ = intake_of(LeafSpec(("action",), (), "int64", Discrete(2)), note)
    assert [leaf.key for leaf in intake.side_leaves] == [("note",)]
    assert not intake.take(TensorDict({"action": torch.tensor([0, 1, 0])}, [NUM_ENVS]))


def test_state_that_is_left_out_is_that_of_the_present_roots():
    state = LeafSpec(("hidden",), (1,), "float32")
    action = LeafSpec(("action",), (), "int64", Discrete(3))
    intake, _ = intake_of(action, state=(state,))
    td, rows = TensorDict({"action": torch.tensor([0, 1])}, [2]), np.array([2, 0])
    with pytest.raises(ActionError, match="expected a key"):
        intake.read(td, rows)
    intake, _ = intake_of(
        action,
        state=(state,),
        present=lambda key, which: (
            which[:, None].astype("float32") if key == ("hidden",) else None
        ),
    )
    assert [values.tolist() for values in intake.read(td, rows)] == [
        [0, 1],
        [[2.0], [0.0]],
    ]
    given = td.clone().set("hidden", torch.full((2, 1), np.nan))
    assert np.isnan(intake.read(given, rows)[1]).all(), (
        "state is the caller's own, and is not checked"
    )


TRUE, FALSE, MIXED = (
    torch.ones(2, 1, dtype=torch.bool),
    torch.zeros(2, 1, dtype=torch.bool),
    torch.tensor([False, True]),
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ({}, None),
        ({"_reset": MIXED}, [False, True]),
        ({"_reset": MIXED[:, None]}, [False, True]),
        ({"a": {"_reset": torch.stack([MIXED, MIXED]).T}}, [False, True]),
        (
            {"a": {"_reset": torch.tensor([[True, False], [False, False]])}},
            [True, False],
        ),
        ({"a": {"_reset": FALSE}, "b": {"_reset": MIXED}}, [False, True]),
        ({"_reset": FALSE, "a": {"_reset": TRUE}}, [False, False]),
        ({"next": {"_reset": TRUE}}, None),
    ],
)
def test_a_mask_at_the_root_wins_and_nested_ones_count_together(given, expected):
    mask = reset_mask(None if given is None else TensorDict(given, [2]), (2,))
    assert expected == (None if mask is None else mask.tolist())


def test_reset_mask_of_a_batch_env_has_one_bool_per_row():
    mask = torch.tensor([[True, False], [False, False]])
    for given in (mask, mask[..., None]):
        found = reset_mask(TensorDict({"_reset": given}, [2]), (2, 2))
        assert found is not None
        assert found.tolist() == mask.tolist()


@pytest.mark.parametrize(
    "mask",
    [
        torch.zeros(2),
        torch.zeros(2, dtype=torch.uint8),
        torch.zeros((), dtype=torch.bool),
    ],
)
def test_a_mask_that_is_none_is_refused(mask):
    with pytest.raises(
        ValueError, match=r"expected a bool mask of shape \(2,\) or \(2, 1\)"
    ):
        reset_mask(TensorDict({"_reset": mask}, []), (2,))
