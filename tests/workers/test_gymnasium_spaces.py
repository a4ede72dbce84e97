"""Every Gymnasium space: its keys, shapes, dtypes and domains; values survive both conversions."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envherd.shm.specs import (
    Binary,
    Box,
    Discrete,
    LeafSpec,
    MultiDiscrete,
    Unbounded,
)
from envherd.workers import plain
from envherd.workers.adapters.common.tree import RESERVED_NAMES
from envherd.workers.adapters.gymnasium.adapter import GymnasiumAdapter
from envherd.workers.errors import SpecError
from tests.envs.gymnasium_envs import Custom, Echo
from tests.extras import needs
from tests.gymnasium_versions import discrete
from tests.workers.adapter_values import drawn, stored


def box(low, high, dtype):
    """Return the domain with these bounds."""
    return Box(np.asarray(low, dtype), np.asarray(high, dtype))


SIDE = LeafSpec(("observation",), dtype="", is_side=True)
ROWS = np.array([[2, 3], [4, 5]])

INT32 = discrete(5, np.int32)
OBSERVATIONS: dict[str, tuple[Any, ...]] = {
    "box": (
        spaces.Box(-1, 1, (3, 2), np.float32),
        (3, 2),
        "float32",
        box(-1, 1, "float32"),
    ),
    "scalar box": (spaces.Box(-1, 1, ()), (1,), "float32", box(-1, 1, "float32")),
    "image": (
        spaces.Box(0, 255, (4, 4, 3), np.uint8),
        (4, 4, 3),
        "uint8",
        box(0, 255, "uint8"),
    ),
    "unbounded": (
        spaces.Box(-np.inf, np.inf, (2,), np.float64),
        (2,),
        "float64",
        Unbounded(),
    ),
    "half bounded": (
        spaces.Box(np.array([0, -np.inf]), np.array([1, np.inf]), dtype=np.float64),
        (2,),
        "float64",
        box([0, -np.inf], [1, np.inf], "float64"),
    ),
    "bool box": (spaces.Box(0, 1, (2,), bool), (2,), "bool", Binary()),
    "discrete": (spaces.Discrete(5), (), "int64", Discrete(5)),
    "discrete of int32": (INT32, (), INT32.dtype.name, Discrete(5)),
    "discrete from -2": (
        spaces.Discrete(5, start=-2),
        (),
        "int64",
        box(-2, 2, "int64"),
    ),
    "multi discrete": (
        spaces.MultiDiscrete([2, 3]),
        (2,),
        "int64",
        MultiDiscrete((2, 3)),
    ),
    "multi discrete 2d": (
        spaces.MultiDiscrete(ROWS),
        (2, 2),
        "int64",
        MultiDiscrete(((2, 3), (4, 5))),
    ),
    "multi discrete from 1": (
        spaces.MultiDiscrete(ROWS, start=ROWS),
        (2, 2),
        "int64",
        box(ROWS, 2 * ROWS - 1, "int64"),
    ),
    "multi binary": (spaces.MultiBinary(4), (4,), "int8", Binary()),
    "multi binary 2d": (spaces.MultiBinary([2, 3]), (2, 3), "int8", Binary()),
}


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_observation_spec(name):
    space, shape, dtype, domain = OBSERVATIONS[name]
    assert GymnasiumAdapter(Echo(space)).spec.observation == (
        LeafSpec(("observation",), shape, dtype, domain),
    )


ACTIONS: dict[str, tuple[Any, ...]] = {
    "discrete from 3": (discrete(2, np.int32, start=3), (), "int64", Discrete(2, 3)),
    "discrete from -7": (
        discrete(400, np.int32, start=-7),
        (),
        "int64",
        Discrete(400, -7),
    ),
    "many discrete": (
        spaces.Discrete(100_000, start=1),
        (),
        "int64",
        Discrete(100_000, 1),
    ),
    "multi discrete": (
        spaces.MultiDiscrete([2, 3], dtype=np.int32),
        (2,),
        "int64",
        MultiDiscrete((2, 3)),
    ),
    "multi discrete from 1": (
        spaces.MultiDiscrete(ROWS, start=ROWS),
        (2, 2),
        "int64",
        MultiDiscrete(((2, 3), (4, 5)), ((2, 3), (4, 5))),
    ),
    "multi binary": (spaces.MultiBinary([2, 3]), (2, 3), "int8", Binary()),
    "scalar box": (
        spaces.Box(-2, 1, (), np.float64),
        (1,),
        "float64",
        box(-2, 1, "float64"),
    ),
    "box": (
        spaces.Box(-2, 1, (2,), np.float16),
        (2,),
        "float16",
        box(-2, 1, "float16"),
    ),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_action_spec(name):
    space, shape, dtype, domain = ACTIONS[name]
    assert GymnasiumAdapter(Echo(space)).spec.action == (
        LeafSpec(("action",), shape, dtype, domain),
    )


@pytest.mark.parametrize("name", ACTIONS)
def test_env_gets_legal_actions_with_start_added(name):
    space, *_, domain = ACTIONS[name]
    env = Echo(space)
    adapter, rng = GymnasiumAdapter(env), np.random.default_rng(0)
    start = np.asarray(getattr(domain, "start", 0) or 0)
    for _ in range(20):
        action = drawn(adapter.spec.action[0], rng)
        (observation,), *_ = adapter.step([action])
        assert space.contains(env.action)
        assert type(env.action) is type(space.sample())
        np.testing.assert_array_equal(
            stored(adapter.spec.observation, [observation])["observation",],
            action + start,
        )


def everything() -> spaces.Dict:
    """Return a space with every other space inside, some of them nested."""
    deep = spaces.Tuple(
        (
            spaces.Discrete(3, start=1),
            spaces.Dict(bits=spaces.MultiBinary(3), scalar=spaces.Box(0, 1, ())),
        )
    )
    return spaces.Dict(
        choice=spaces.OneOf((spaces.Discrete(3), spaces.Box(0, 1, (2,)))),
        custom=Custom(),
        deep=deep,
        graph=spaces.Graph(spaces.Box(-1, 1, (3,)), spaces.Discrete(4)),
        image=spaces.Box(0, 255, (5, 5, 3), np.uint8),
        many=spaces.MultiDiscrete([2, 3, 4], start=[1, 0, 2]),
        sequence=spaces.Sequence(spaces.Tuple((spaces.Discrete(2), spaces.Text(4)))),
        stacked=spaces.Sequence(spaces.Box(0, 1, (2,)), stack=True),
        text=spaces.Text(6),
    )


def test_every_space_survives_as_observation_and_action():
    space = everything()
    env = Echo(space)
    adapter = GymnasiumAdapter(env)
    starts = {("deep", "0"): 1, ("many",): np.array([1, 0, 2])}
    for seed in range(10):
        first = stored(adapter.spec.observation, adapter.reset(seed))
        sent = plain.decode(plain.encode(list(first.values())))
        action = [
            v - starts.get(leaf.key, 0)
            for leaf, v in zip(adapter.spec.observation, sent, strict=True)
            if not leaf.is_side
        ]
        by_key = dict(
            zip(
                (leaf.key for leaf in adapter.spec.observation if not leaf.is_side),
                action,
                strict=True,
            )
        )
        given = [
            by_key.get(leaf.key, first[leaf.key]) for leaf in adapter.spec.observation
        ]
        observation, *_ = adapter.step(plain.decode(plain.encode(given)))
        assert space.contains(env.action)
        np.testing.assert_equal(stored(adapter.spec.observation, observation), first)


def side_value(space: spaces.Space, value: Any) -> Any:
    """Return the adapter's value of an observation after encoding for the parent."""
    env = Echo(space)
    adapter = GymnasiumAdapter(env)
    assert adapter.spec.observation == (SIDE,)
    (given,), *_ = adapter.step([value])
    return plain.decode(plain.encode(given))


GRAPH = spaces.Graph(spaces.Box(-1, 1, (3,)), spaces.Discrete(4))
INSTANCE = GRAPH.sample(num_nodes=4, num_edges=2)
STACKED = np.ones((3, 2), np.float32)


@pytest.mark.parametrize(
    ("space", "given", "expected"),
    [
        (spaces.Text(5), np.str_("abc"), "abc"),
        (GRAPH, INSTANCE, INSTANCE._asdict()),
        (
            GRAPH,
            spaces.GraphInstance(INSTANCE.nodes, None, None),
            {"nodes": INSTANCE.nodes, "edges": None, "edge_links": None},
        ),
        (spaces.Sequence(spaces.Discrete(9)), (np.int64(3), np.int64(4)), (3, 4)),
        (spaces.Sequence(spaces.Box(0, 1, (2,)), stack=True), STACKED, STACKED),
        (
            spaces.OneOf((spaces.Discrete(3), spaces.Text(3))),
            (np.int64(1), "ab"),
            (1, "ab"),
        ),
    ],
    ids=["text", "graph", "nodes alone", "sequence", "stack", "one of"],
)
def test_values_of_the_side_channel_are_plain(space, given, expected):
    found = side_value(space, given)
    assert type(found) is type(expected)
    np.testing.assert_equal(found, expected)


def test_nested_actions_of_the_side_channel_are_what_the_space_samples():
    space = spaces.OneOf(
        (
            spaces.Sequence(spaces.Graph(spaces.Box(0, 1, (2,)), None)),
            spaces.Dict(a=spaces.Tuple((spaces.Discrete(3, start=2), spaces.Text(3)))),
        )
    )
    env = Echo(space)
    adapter = GymnasiumAdapter(env)
    space.seed(0)
    seen = set()
    for _ in range(20):
        sample = space.sample()
        (value,), *_ = adapter.step([sample])
        adapter.step([plain.decode(plain.encode(value))])
        assert space.contains(env.action)
        np.testing.assert_equal(env.action, sample)
        seen.add(int(sample[0]))
    assert seen == {0, 1}


def test_side_values_are_copies():
    stacked = np.zeros((3, 2), np.float32)
    adapter = GymnasiumAdapter(
        Echo(spaces.Sequence(spaces.Box(0, 1, (2,)), stack=True))
    )
    (value,), *_ = adapter.step([stacked])
    stacked[:] = 1
    assert not value.any()


STATE = spaces.Dict(state=spaces.Discrete(2), image=spaces.Box(0, 1, (2,)))


@pytest.mark.parametrize(
    ("space", "observation", "action"),
    [
        (
            spaces.Dict(
                inner=spaces.Dict(
                    dict.fromkeys(sorted(RESERVED_NAMES), spaces.Discrete(2))
                )
            ),
            [("inner", name) for name in sorted(RESERVED_NAMES)],
            [("action", "inner", name) for name in sorted(RESERVED_NAMES)],
        ),
        (
            spaces.Tuple((spaces.Discrete(2), spaces.Dict(a=spaces.Discrete(3)))),
            [("observation", "0"), ("observation", "1", "a")],
            [("action", "0"), ("action", "1", "a")],
        ),
        (
            spaces.Dict(state=spaces.Discrete(2), observation=spaces.Discrete(3)),
            [("state",), ("observation",)],
            [("action", "state"), ("action", "observation")],
        ),
        (
            STATE,
            [("observation",), ("image",)],
            [("action", "state"), ("action", "image")],
        ),
    ],
    ids=["reserved names", "a tuple", "state and observation", "state"],
)
def test_keys_of_the_leaves(space, observation, action):
    spec = GymnasiumAdapter(Echo(space)).spec
    assert [leaf.key for leaf in spec.observation] == observation
    assert [leaf.key for leaf in spec.action] == action


def test_keys_that_are_no_strings():
    numbered: Any = {1: spaces.Discrete(2), 0: spaces.Discrete(2)}
    adapter = GymnasiumAdapter(Echo(spaces.Dict(numbered)))
    assert [leaf.key for leaf in adapter.spec.observation] == [("0",), ("1",)]
    assert adapter.step([1, 0])[0] == [1, 0]
    ambiguous: Any = {1: spaces.Discrete(2), "1": spaces.Discrete(2)}
    with pytest.raises(SpecError, match="got '1' for several"):
        GymnasiumAdapter(Echo(spaces.Dict(ambiguous)))


def test_root_state_is_called_observation():
    adapter = GymnasiumAdapter(Echo(STATE))
    assert adapter.spec.metadata["renamed"] == {"observation": "state"}
    assert stored(adapter.spec.observation, adapter.reset(0)).keys() == {
        ("observation",),
        ("image",),
    }


PARITY: dict[str, spaces.Space] = {
    "box": spaces.Box(-1, 1, (3,)),
    "scalar box": spaces.Box(-1, 1, ()),
    "discrete": spaces.Discrete(4),
    "multi discrete": spaces.MultiDiscrete([2, 3]),
    "multi binary": spaces.MultiBinary(4),
    "dict": spaces.Dict(
        a=spaces.Box(0, 255, (2, 2, 3), np.uint8), b=spaces.Dict(c=spaces.Discrete(3))
    ),
    "dict with observation": spaces.Dict(
        observation=spaces.Box(-1, 1, (2,)), goal=spaces.Box(-1, 1, (2,))
    ),
    "dict with state": spaces.Dict(
        state=spaces.Box(-1, 1, (2,)), pixels=spaces.Box(0, 255, (2, 2, 3), np.uint8)
    ),
}


@needs("torchrl")
@pytest.mark.slow
@pytest.mark.parametrize("name", PARITY)
def test_observations_are_those_of_torchrl(name):
    import torchrl.envs as torchrl_envs

    env = Echo(PARITY[name])
    env.action_space = spaces.Discrete(2)
    theirs = torchrl_envs.GymWrapper(env, categorical_action_encoding=True)
    ours = GymnasiumAdapter(Echo(PARITY[name])).spec
    expected = {
        key if isinstance(key, tuple) else (key,): (
            tuple(leaf.shape),
            str(leaf.dtype).removeprefix("torch."),
        )
        for key, leaf in theirs.observation_spec.items(
            include_nested=True, leaves_only=True
        )
    }
    assert {leaf.key: (leaf.shape, leaf.dtype) for leaf in ours.observation} == expected
