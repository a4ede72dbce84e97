"""TorchRL's specs as ours: encodings, dtypes, stacks, side leaves."""

from tests.extras import skip_without

skip_without("torchrl")

import numpy as np
import pytest
import torch
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Choice,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Unbounded,
)

from envherd.shm import specs
from envherd.workers.adapters.torchrl.adapter import TorchRLAdapter
from envherd.workers.adapters.torchrl.specs import Member, place_leaves
from envherd.workers.errors import SpecError
from tests.envs import torchrl_own
from tests.envs.torchrl_envs import SAME_DATA, Typed, UnlikeActions

STEPS = torch.tensor([0.0, 1.0])


def box(low, high, dtype) -> specs.Box:
    return specs.Box(np.array(low, dtype), np.array(high, dtype))


def leaf_of(spec, **more):
    (placed,) = place_leaves(Composite(x=spec, **more))
    return placed.spec


@pytest.mark.parametrize(
    ("spec", "shape", "dtype", "domain"),
    [
        (Unbounded((2, 3)), (2, 3), "float32", specs.Unbounded()),
        (Unbounded((1,), dtype=torch.int16), (1,), "int16", specs.Unbounded()),
        (Unbounded((1,), dtype=torch.bool), (1,), "bool", specs.Binary()),
        (Bounded(-1.0, 2.0, (3,)), (3,), "float32", box(-1, 2, np.float32)),
        (
            Bounded(0, 255, (8, 8, 3), dtype=torch.uint8),
            (8, 8, 3),
            "uint8",
            box(0, 255, np.uint8),
        ),
        (Bounded(STEPS, STEPS + 2), (2,), "float32", box([0, 1], [2, 3], np.float32)),
        (Bounded(0, 1, (0, 2)), (0, 2), "float32", specs.Unbounded()),
        (OneHot(4), (4,), "bool", specs.OneHot(4)),
        (OneHot(4, shape=(2, 4), dtype=torch.int64), (2, 4), "int64", specs.OneHot(4)),
        (Categorical(5), (), "int64", specs.Discrete(5)),
        (
            Categorical(5, shape=(2,), dtype=torch.int32),
            (2,),
            "int32",
            specs.Discrete(5),
        ),
        (Categorical(2, shape=(1,), dtype=torch.bool), (1,), "bool", specs.Binary()),
        (Categorical(-1), (), "int64", specs.Unbounded()),
        (MultiCategorical([3, 4]), (2,), "int64", specs.MultiDiscrete((3, 4))),
        (
            MultiCategorical([3, 4]).expand(2, 2),
            (2, 2),
            "int64",
            specs.MultiDiscrete(((3, 4), (3, 4))),
        ),
        (MultiOneHot([2, 3]), (5,), "bool", specs.Binary()),
        (Binary(3), (3,), "int8", specs.Binary()),
        (
            Choice([Bounded(0, 1, (2,)), Bounded(1, 2, (2,))]),
            (2,),
            "float32",
            specs.Unbounded(),
        ),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "is_in") else None,
)
def test_the_encoding_that_the_env_declares_is_kept(spec, shape, dtype, domain):
    assert leaf_of(spec) == specs.LeafSpec(("x",), shape, dtype, domain)


def test_bounds_that_are_the_same_everywhere_are_stored_once():
    domain = leaf_of(Bounded(0, 255, (64, 64, 3), dtype=torch.uint8)).domain
    assert (domain.low.shape, domain.high.shape) == ((), ())


@pytest.mark.parametrize(
    ("spec", "tensor_dtype"),
    [
        (NonTensor(()), ""),
        (Unbounded((3, -1, 2)), "float32"),
        (Choice([NonTensor(())]), ""),
    ],
)
def test_leaves_without_fixed_shape_become_side_values(spec, tensor_dtype):
    (placed,) = place_leaves(Composite(x=spec))
    assert (placed.spec.is_side, placed.spec.dtype, placed.tensor_dtype) == (
        True,
        "",
        tensor_dtype,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_dtypes_that_numpy_lacks_are_refused(dtype):
    with pytest.raises(
        SpecError, match=rf"that numpy has too, got {dtype} \(added\). Append DTypeCast"
    ):
        TorchRLAdapter(Typed(Unbounded((2,), dtype=dtype)))


def test_rewards_without_a_fixed_shape_are_refused():
    with pytest.raises(
        SpecError,
        match="expected rewards and done flags of fixed shape, got reward: side channel",
    ):
        TorchRLAdapter(Typed(Unbounded((2,)), reward=Unbounded((-1, 1))))


def test_rows_of_unlike_specs_are_refused():
    rows = torch.stack([Composite(x=Unbounded((2,))), Composite(x=Unbounded((3,)))], 0)
    with pytest.raises(SpecError, match="expected rows of equal specs"):
        place_leaves(rows)


def test_agents_that_differ_come_apart_leaf_by_leaf():
    spec = TorchRLAdapter(SAME_DATA["unlike agents"]()).spec
    leaves = {leaf.key: leaf for leaf in spec.observation}
    assert leaves["lazy", "camera"].shape == (3, 7, 7, 3)  # equal for all agents
    assert [leaves["lazy", str(i), "vector"].shape for i in range(3)] == [
        (3,),
        (2,),
        (2,),
    ]
    assert ("lazy", "vector") not in leaves
    assert [(leaf.key, leaf.shape) for leaf in spec.action] == [
        (("lazy", str(i), "action"), (3 - (i > 0),)) for i in range(3)
    ]
    # `lazy` holds separate agents, so it has no batch of agents.
    assert spec.groups == ()
    assert [leaf.shape for leaf in spec.reward] == [(3, 1)]


def test_actions_that_differ_do_not_touch_observations_that_agree():
    adapter = TorchRLAdapter(UnlikeActions())
    assert [str(leaf) for leaf in adapter.spec.action] == [
        "agents/0/action: int64 (2,) in one-hot of 2",
        "agents/1/action: int64 (3,) in one-hot of 3",
    ]
    assert [leaf.shape for leaf in adapter.spec.observation] == [(1,), (2, 3)]
    assert adapter.spec.groups == ()


@pytest.mark.parametrize(
    ("members", "domain"),
    [
        ((Categorical(3), Categorical(5)), specs.MultiDiscrete((3, 5))),
        ((Categorical(3), Categorical(3)), specs.Discrete(3)),
        (
            (MultiCategorical([2, 3]), MultiCategorical([4, 3])),
            specs.MultiDiscrete(((2, 3), (4, 3))),
        ),
        (
            (Bounded(0, 1, (2,)), Bounded(0, 2, (2,))),
            box(0, [[1, 1], [2, 2]], np.float32),
        ),
        (
            (Bounded(0, 1, (2,)), Unbounded((2,))),
            box([[0, 0], [-np.inf, -np.inf]], [[1, 1], [np.inf, np.inf]], np.float32),
        ),
    ],
)
def test_members_of_equal_shape_stay_dense_with_a_domain_for_each(members, domain):
    extra = [Unbounded((1,)), Unbounded((2,))]  # keeps the stack heterogeneous
    stack = torch.stack(
        [Composite(x=x, extra=e) for x, e in zip(members, extra, strict=True)], 0
    )
    placed = {leaf.spec.key: leaf for leaf in place_leaves(Composite(agents=stack))}
    assert placed["agents", "x"].spec.domain == domain
    assert placed["agents", "x"].spec.shape == (2, *members[0].shape)
    assert placed["agents", "1", "extra"].path == ("agents", Member(1, 0), "extra")


def test_nested_tensordicts_with_their_own_batch_shape_are_groups():
    assert TorchRLAdapter(SAME_DATA["several groups, batch"]()).spec.groups == (
        (("nested_1",), (2, 3)),
        (("nested_2",), (2, 2)),
    )
    assert TorchRLAdapter(SAME_DATA["several done groups"]()).spec.groups == ()


def test_done_keys_beyond_the_three_at_the_root_follow_them():
    keys = [
        leaf.key
        for leaf in TorchRLAdapter(SAME_DATA["several done groups"]()).spec.done
    ]
    # The env had none before.
    at_root = [("env_done",)] if torchrl_own.VERSION >= (0, 13) else []
    nested = keys[3 + len(at_root) :]
    assert keys == [*specs.DONE_KEYS, *at_root, *nested]
    assert {key[-1] for key in nested} == {"done", "terminated"}
    assert {len(key) for key in nested} == {3}
