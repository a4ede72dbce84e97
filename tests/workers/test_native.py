"""The step of a plain env in C and in Python: the same bytes, the same objects passed to the env, the same errors."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from envherd.shm.slab import Slab, Storage, plan_slab, plan_storage
from envherd.workers import native
from envherd.workers.adapters.base import Adapter
from envherd.workers.adapters.gymnasium.adapter import GymnasiumAdapter
from envherd.workers.block.block import Block
from envherd.workers.block.compiling import compile_native
from envherd.workers.options import BlockOptions
from envherd.workers.protocol import RING, STEP, STEP_RESET, pack
from envherd.workers.testing import CountingEnv
from envherd.workers.testing.envs import PlainAdapter

pytestmark = pytest.mark.skipif(native.load() is None, reason="the C extension was not built, or is switched off")

STORAGE, NUM_COLUMNS = 1, 4
DTYPES = ("float32", "float64", "float16", "uint8", "int8", "int16", "int32", "int64", "bool")


class Subclass(np.ndarray):
    """An array whose exact type is not ndarray."""


class Scripted(gymnasium.Env):
    """Returns or raises scripted results, and keeps its actions."""

    def __init__(self, dtype: str, shape: tuple[int, ...], action: spaces.Space[Any]) -> None:
        top = 1 if dtype == "bool" else 100
        self.observation_space: spaces.Space[Any] = spaces.Box(0, top, shape, np.dtype(dtype))
        self.first = np.zeros(shape, dtype)
        self.action_space = action
        self.result: Any = None
        self.seen: list[Any] = []
        self.info_of_reset: dict[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.first.copy(), self.info_of_reset

    def step(self, action: Any) -> Any:
        self.seen.append(action)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


class Side:
    """A block of one env, driven in C or in Python."""

    def __init__(self, adapter: Adapter, *, in_c: bool, **options: Any) -> None:
        self.adapter = adapter
        plan = plan_slab([adapter.spec] * 2, num_workers=1, num_ring=NUM_COLUMNS)
        self.slab = Slab(plan, np.zeros(plan.nbytes, np.uint8))
        layout = plan_storage(plan, NUM_COLUMNS)
        self.storage_bytes = np.zeros(layout.nbytes, np.uint8)
        self.reports: list[dict[str, Any]] = []
        self.block = Block(0, {1: adapter}, 0, self.reports.append, BlockOptions(**options))
        self.block.attach(self.slab)
        self.block.attach_storage(STORAGE, Storage(layout, self.storage_bytes))
        self.slot = self.block.slots[1]
        if not in_c:
            for sink in self.slot.sinks.values():
                sink.step = python_step(self, sink)
        self.slot.unwatched.clear()  # otherwise the first step and reset would compile it again
        self.block.execute(1, pack(3, RING, 0))
        if in_c:
            for sink in self.slot.sinks.values():
                self.block._compile(self.slot, sink)
                assert is_native(sink.step)

    def execute(self, op: int, target: int, column: int) -> int:
        return self.block.execute(1, pack(op, target, column))

    def state(self) -> tuple[Any, ...]:
        """Return all state that a step may change."""
        slot = self.slot
        errors = [(report.get("type"), report.get("message")) for report in self.reports]
        flags = (slot.last_done, slot.has_ended, slot.must_reset, slot.prepared, slot.phase)
        return self.slab.buffer.tobytes(), self.storage_bytes.tobytes(), flags, [type(f) for f in flags], errors


def python_step(side: Side, sink: Any) -> Any:
    from envherd.workers.block.slot import compile_step

    return compile_step(side.slot, sink, side.block._words, side.adapter.step)


def is_native(step: Any) -> bool:
    return type(getattr(step, "__self__", None)) is native.load().Step


def same(one: Any, other: Any) -> bool:
    """Whether two actions are the same objects to an env: type, dtype, bytes."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    return one == other


def pair(make_adapter: Callable[[], Adapter], **options: Any) -> tuple[Side, Side]:
    return Side(make_adapter(), in_c=True, **options), Side(make_adapter(), in_c=False, **options)


SHAPES = st.sampled_from([(3,), (1,), (2, 3), (2, 1, 2)])
ACTIONS = {
    "discrete": lambda: spaces.Discrete(5),
    "started": lambda: spaces.Discrete(300, start=-7),
    "box": lambda: spaces.Box(-1, 1, (2,), np.float32),
    "multi": lambda: spaces.MultiDiscrete([3, 4]),
}


@st.composite
def observations(draw: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """Usually a value of the space, otherwise a similar one."""
    values = draw(npst.arrays(dtype, shape, elements=st.integers(0, 1)))
    odd = {
        "right": lambda: values,
        "fortran": lambda: np.asfortranarray(values),
        "strided": lambda: np.repeat(values, 2, axis=-1)[..., ::2],
        "read-only": lambda: np.frombuffer(values.tobytes(), dtype).reshape(shape),
        "big-endian": lambda: values.astype(np.dtype(dtype).newbyteorder(">")),
        "subclass": lambda: values.view(Subclass),
        "dtype": lambda: values.astype(draw(st.sampled_from(DTYPES))),
        "longer": lambda: np.concatenate([values, values]),
        "flat": lambda: values.reshape(-1),
        "more dimensions": lambda: values[None],
        "rows": lambda: tuple(values),
        "rows from anywhere": lambda: tuple(np.repeat(values, 2, axis=0)[::2]),
        "rows, and one of another dtype": lambda: (*values[:-1], values[-1].astype("float32")),
        "rows, one too many": lambda: (*values, values[0]),
        "list": values.tolist,
        "scalar": lambda: values.reshape(-1)[0],
        "number": lambda: 1,
        "float": lambda: 0.5,
        "none": lambda: None,
        "object": lambda: values.astype(object),
        "date": lambda: np.zeros(shape, "datetime64[s]"),
        "memoryview": lambda: np.ascontiguousarray(values).data,
        "text": lambda: "text",
        "dict": lambda: {"observation": values},
    }
    return odd[draw(st.one_of(st.just("right"), st.sampled_from(sorted(odd))))]()


FLOATS = st.one_of(st.floats(), st.floats(width=32))
REWARDS = st.one_of(
    FLOATS,
    FLOATS.map(np.float64),
    FLOATS.map(np.array),
    st.sampled_from([np.float32(0.5), 3, True, None, "1", np.array([0.5]), np.array([1.0, 2.0]), 10**400, [1.0]]),
)
FLAGS = st.one_of(
    st.booleans(),
    st.sampled_from(
        [np.True_, np.False_, np.asarray(1, bool), np.array([False]), 0, 1, np.array([1]), 1.0, np.int8(0)]
    ),
    st.sampled_from([None, 2, "no"]),
)


@st.composite
def results(draw: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    plain = draw(observations(dtype, shape)), draw(REWARDS), draw(FLAGS), draw(FLAGS), draw(st.sampled_from([{}, None]))
    form = draw(st.sampled_from(["tuple"] * 8 + ["list", "four", "six", "none", "raise"]))
    return {
        "tuple": plain,
        "list": list(plain),
        "four": plain[:4],
        "six": (*plain, 0),
        "none": None,
        "raise": ValueError("of the env"),
    }[form]


@settings(max_examples=300, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), shape=SHAPES, action=st.sampled_from(sorted(ACTIONS)))
def test_whatever_an_env_returns_is_stored_alike(data, dtype, shape, action):
    sides = pair(lambda: GymnasiumAdapter(Scripted(dtype, shape, ACTIONS[action]())))
    for _ in range(3):
        result = data.draw(results(dtype, shape))
        indices = data.draw(st.lists(st.integers(0, 299 if action == "started" else 2), min_size=2, max_size=2))
        op = data.draw(st.sampled_from([STEP, STEP_RESET]))
        target = data.draw(st.sampled_from([RING, STORAGE]))
        column = data.draw(st.integers(0, NUM_COLUMNS - 1))
        statuses = []
        for side in sides:
            side.adapter.env.result = result
            for array in side.slab.groups[0].inputs.values():
                array[1] = np.resize(indices, array[1].shape)
            statuses.append(side.execute(op, target, column))
        assert statuses[0] == statuses[1]
        assert sides[0].state() == sides[1].state()
        infos = [side.adapter.info for side in sides]
        assert infos[0] == infos[1]
        assert type(infos[0]) is type(infos[1])
        seen = [side.adapter.env.seen for side in sides]
        assert len(seen[0]) == len(seen[1]), "an env was stepped twice, or not at all"
        assert all(same(one, other) for one, other in zip(*seen, strict=True))


def pick(data: Any, choices: list[Any]) -> Any:
    """Draw one of values that need not be hashable."""
    return choices[data.draw(st.integers(0, len(choices) - 1))]


class Raw:
    """A plain adapter whose env returns scripted values, without a library's format."""

    def __init__(self) -> None:
        self.inner = CountingEnv(5)
        self.spec = self.inner.spec
        self.result: Any = None
        self.seen: list[Any] = []

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.reset(*args, **kwargs)

    def step(self, action: list[Any]) -> Any:
        self.seen.append(action)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@settings(max_examples=200, deadline=None)
@given(data=st.data(), target=st.sampled_from([RING, STORAGE]), op=st.sampled_from([STEP, STEP_RESET]))
def test_whatever_an_adapter_returns_is_stored_alike(data, target, op):
    observation, reward = data.draw(observations("int64", (3,))), data.draw(REWARDS)
    lists = [[observation], [observation], [], [observation] * 2, (observation,), observation]
    rewards = [[reward], [reward], [], [reward] * 2, (reward,)]
    flags = data.draw(FLAGS), data.draw(FLAGS)
    values = (pick(data, lists), pick(data, rewards), *flags)
    result = pick(data, [values, values, list(values), values[:3], ValueError("of the adapter")])
    sides = pair(lambda: PlainAdapter(Raw()))
    for side in sides:
        side.adapter.env.result = result
    assert len({side.execute(op, target, 1) for side in sides}) == 1
    assert sides[0].state() == sides[1].state()
    assert [type(action) for action in sides[0].adapter.env.seen[0]] == [int]


# ---- which envs -------------------------------------------------------------------------------------


class Derived(GymnasiumAdapter):
    """May do anything in its step."""


def cartpole() -> Adapter:
    return GymnasiumAdapter(gymnasium.make("CartPole-v1"))


@pytest.mark.parametrize(
    "adapter",
    [cartpole(), PlainAdapter(CountingEnv(5)), Derived(gymnasium.make("CartPole-v1"))],
    ids=["direct", "plain", "derived"],
)
def test_plain_envs_are_stepped_in_c(adapter):
    assert is_native(Side(adapter, in_c=True).slot.sinks[RING].step)


def box_env(space: spaces.Space[Any]) -> Adapter:
    env = Scripted("float32", (3,), spaces.Discrete(2))
    env.observation_space = space
    env.reset = lambda **_: (space.sample(), {})  # type: ignore[method-assign]
    return GymnasiumAdapter(env)


@pytest.mark.parametrize(
    ("space", "options"),
    [
        (spaces.Discrete(4, dtype=np.int8), {}),
        (spaces.Dict(a=spaces.Discrete(4), b=spaces.Discrete(4, dtype=np.int8)), {}),
        (spaces.Text(4), {}),
        (spaces.Box(0, 1, (0, 2)), {}),
        (spaces.Box(-1, 1, (3,)), {"check_finite": True}),
    ],
)
def test_what_is_not_plain_stays_in_python(space, options):
    side = Side(box_env(space), in_c=False, **options)
    assert compile_native(side.slot, side.slot.sinks[RING], side.block._words, side.adapter.step) is None


def test_an_env_and_a_step_that_are_replaced_are_used_from_then_on():
    side = Side(cartpole(), in_c=True)
    side.adapter.env = Scripted("float32", (4,), spaces.Discrete(2))
    side.adapter.env.result = np.full(4, 3, np.float32), 1.5, False, False, {"of": "another"}
    assert side.execute(STEP, RING, 0) == 0
    columns = side.slot.sinks[RING].arrays
    assert columns["next", "observation"][0].tolist() == [3.0] * 4
    side.adapter.env.step = lambda action: (np.full(4, 5, np.float32), 2.5, False, False, {})
    assert side.execute(STEP, RING, 1) == 0
    assert columns["next", "observation"][1].tolist() == [5.0] * 4
    assert columns["next", "reward"][:2, 0].tolist() == [1.5, 2.5]
    assert side.adapter.info == {}


@pytest.mark.parametrize("column", [-1, NUM_COLUMNS, 2**80, -(2**80), 1.5, "0"])
def test_a_column_that_is_not_there_is_refused_before_the_env_is_stepped(column):
    side = Side(GymnasiumAdapter(Scripted("float32", (3,), spaces.Discrete(2))), in_c=True)
    with pytest.raises((IndexError, TypeError)):
        side.slot.sinks[RING].step(column)
    assert side.adapter.env.seen == []


def test_arrays_that_do_not_fit_are_refused():
    side = Side(cartpole(), in_c=True)
    sink = side.slot.sinks[STORAGE]
    for key, wrong in [
        (("next", "reward"), np.zeros((NUM_COLUMNS - 1, 1), np.float32)),
        (("next", "truncated"), np.zeros((NUM_COLUMNS, 1), np.int16)),
        (("next", "done"), np.zeros((NUM_COLUMNS - 1, 1), bool)),
        (("next", "observation"), np.zeros((NUM_COLUMNS, 8), np.float32)[:, ::2]),
        (("root", "observation"), np.zeros((NUM_COLUMNS, 5), np.float32)),
    ]:
        kept = sink.arrays
        sink.arrays = {**kept, key: wrong}
        with pytest.raises(ValueError, match="compiling a step failed"):
            compile_native(side.slot, sink, side.block._words, side.adapter.step)
        sink.arrays = kept
    assert is_native(compile_native(side.slot, sink, side.block._words, side.adapter.step).run)


# ---- memory -----------------------------------------------------------------------------------------


def test_a_step_frees_what_it_holds():
    def refs(things: list[Any]) -> list[int]:
        gc.collect()
        return [sys.getrefcount(thing) for thing in things]

    buffer = np.zeros(8)
    adapter = cartpole()
    Side(adapter, in_c=True)  # fills caches
    things = [adapter, adapter.env, native.load().Step, np.ndarray, buffer, None.__class__]
    before = refs(things)
    for _ in range(20):
        side = Side(adapter, in_c=True)
        side.execute(STEP, STORAGE, 0)
        side.block.detach_storage(STORAGE)
    del side
    assert refs(things) == before


def test_what_was_built_from_other_sources_is_not_used(monkeypatch):
    monkeypatch.setattr(native.load(), "sources", 0)
    native.find.cache_clear()
    try:
        assert native.load() is None
        assert native.describe().startswith("Python (the C extension was built from other sources; run: ")
    finally:
        monkeypatch.undo()
        native.find.cache_clear()
    assert native.describe() == "C"
