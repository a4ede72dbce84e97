"""The loops in C and in Python are equivalent: rows, words, messages and actions, bit for bit."""

from __future__ import annotations

# ruff: noqa: FBT003 - flags among the values of a step
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envherd.workers import native
from envherd.workers.adapters.base import Adapter
from envherd.workers.adapters.gymnasium.adapter import GymnasiumAdapter
from envherd.workers.block.compiling import step_facts
from envherd.workers.messages import Prepare
from envherd.workers.options import BlockOptions
from envherd.workers.process.native_loop import NativeLoop
from envherd.workers.protocol import RESET, STEP, STEP_RESET, Flag
from envherd.workers.testing import CountingEnv
from envherd.workers.testing.envs import PlainAdapter
from tests.scale import IS_FULL, scaled
from tests.workers.native_sides import NUM_COLUMNS, TARGET, Scripted, Side, compare, fingerprint, sides

pytestmark = pytest.mark.skipif(native.load() is None, reason=f"the C extension is not there: {native.describe()}")

FLOATS = spaces.Box(-2.0, 2.0, (3,), np.float32)
OBSERVATIONS: dict[str, Any] = {
    **{
        dtype: spaces.Box(0, 100, (2, 3), np.dtype(dtype))
        for dtype in ("float32", "float64", "float16", "uint8", "int8", "int16", "int32", "int64", "uint16")
    },
    "one float": spaces.Box(-1, 1, (1,), np.float32),
    "one double": spaces.Box(-1, 1, (1,), np.float64),
    "no dimension": spaces.Box(-1, 1, (), np.float32),
    "nothing in it": spaces.Box(-1, 1, (0, 3), np.float32),
    "index": spaces.Discrete(9),
    "index from 3": spaces.Discrete(9, start=3),
    "small index": spaces.Discrete(9, dtype=np.int8),
    "indices": spaces.MultiDiscrete([3, 4, 5]),
    "bits": spaces.MultiBinary((2, 2)),
    "bools": spaces.Box(0, 1, (3,), bool),
    "dict": spaces.Dict(a=FLOATS, b=spaces.Discrete(4), c=spaces.Box(0, 255, (2, 2), np.uint8)),
    "dict of one": spaces.Dict(a=FLOATS),
    "nested": spaces.Dict(a=spaces.Tuple((FLOATS, spaces.Discrete(2))), b=spaces.Dict(c=spaces.MultiBinary(3))),
    "tuple": spaces.Tuple((FLOATS, spaces.Discrete(3, start=1))),
    "text": spaces.Dict(a=FLOATS, b=spaces.Text(4)),
}
ACTIONS: dict[str, Any] = {
    "index": spaces.Discrete(5),
    "index from -2": spaces.Discrete(5, start=-2),
    "int32 index": spaces.Discrete(5, dtype=np.int32),
    "many": spaces.Discrete(1000),
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "double box": spaces.Box(-1, 1, (2, 2), np.float64),
    "no dimension": spaces.Box(-1, 1, (), np.float32),
    "indices": spaces.MultiDiscrete([3, 4]),
    "indices from 1": spaces.MultiDiscrete([3, 4], start=[1, 1]),
    "int32 indices": spaces.MultiDiscrete([3, 4], dtype=np.int32),
    "bits": spaces.MultiBinary(3),
    "dict": spaces.Dict(a=FLOATS, b=spaces.Discrete(4), c=spaces.MultiDiscrete([2, 2])),
    "dict of one": spaces.Dict(a=spaces.Discrete(4)),
    "tuple": spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2))),
}


class Sub(np.ndarray):
    """An array that is not exactly one."""


class Truth:
    """True, but no bool."""

    def __bool__(self) -> bool:
        return True


class SubFloat(float):
    """A float that is not exactly one."""


class SubTuple(tuple[Any, ...]):
    """A tuple that is not exactly one."""


class SubDict(dict[str, Any]):
    """No exact dict."""


class Leave(BaseException):
    """No `Exception`."""


def raising(error: BaseException) -> Callable[[Any], Any]:
    def step(_result: Any) -> Any:
        raise type(error)(*error.args)  # a new instance, because an exception keeps the tracebacks of all its raises

    return step


def with_observation(change: Callable[[np.ndarray], Any]) -> Callable[[Any], Any]:
    """Change the observation where it is an array, or each of its entries."""

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: changed(item) for key, item in value.items()}
        if isinstance(value, tuple):
            return tuple(map(changed, value))
        return change(value) if isinstance(value, np.ndarray) else value

    return lambda result: (changed(result[0]), *result[1:])


def put(index: int, value: Any) -> Callable[[Any], Any]:
    return lambda result: (*result[:index], value, *result[index + 1 :])


#: Possible results and actions of an env, plain or not.
RESULTS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda result: result,
    "terminated": put(2, True),
    "truncated": put(3, True),
    "both": lambda result: (*result[:2], True, True, {}),
    "end without info": lambda result: (*result[:2], True, False, {}),
    "list": list,
    "tuple of its own": SubTuple,
    "generator": iter,
    "four": lambda result: result[:4],
    "six": lambda result: (*result, 1),
    "nothing": lambda result: None,
    "no tuple": lambda result: 3,
    "info none": put(4, None),
    "no info": put(4, {}),
    "no info of its own": put(4, SubDict()),
    "info that cannot be packed": put(4, {"lock": threading.Lock()}),
    "another dtype": with_observation(lambda array: array.astype(np.float64)),
    "a smaller dtype": with_observation(lambda array: array.astype(np.float16)),
    "swapped bytes": with_observation(lambda array: array.astype(array.dtype.newbyteorder())),
    "complex": with_observation(lambda array: array.astype(complex)),
    "objects": with_observation(lambda array: array.astype(object)),
    "times": with_observation(lambda array: np.zeros(array.shape, "M8[s]")),
    "another shape": with_observation(lambda array: array[np.newaxis]),
    "shorter": with_observation(lambda array: array[:1]),
    "flat": with_observation(lambda array: array.reshape(-1)),
    "Fortran": with_observation(np.asfortranarray),
    "strided": with_observation(lambda array: np.repeat(array, 2, axis=-1)[..., ::2] if array.ndim else array),
    "reversed": with_observation(lambda array: array[::-1].copy()[::-1] if array.ndim else array),
    "read-only": with_observation(lambda array: np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)),
    "subclass": with_observation(lambda array: array.view(Sub)),
    "masked": with_observation(np.ma.masked_array),
    "nested list": with_observation(lambda array: array.tolist()),
    "memoryview": with_observation(lambda array: array.copy().data),
    "array of nothing": with_observation(lambda array: np.array(None)),
    "observation none": put(0, None),
    "observation int": put(0, 2),
    "observation numpy int": put(0, np.int64(2)),
    "observation int32": put(0, np.int32(2)),
    "observation bool": put(0, True),
    "observation float": put(0, 0.25),
    "observation numpy float": put(0, np.float64(0.25)),
    "observation huge": put(0, 2**70),
    "an entry more": lambda result: ({**result[0], "more": 1}, *result[1:]) if isinstance(result[0], dict) else result,
    "an entry less": lambda result: (
        dict(list(result[0].items())[1:]) if isinstance(result[0], dict) else result[0],
        *result[1:],
    ),
    "dict of its own": lambda result: (
        type("D", (dict,), {})(result[0]) if isinstance(result[0], dict) else result[0],
        *result[1:],
    ),
    **{
        f"reward {value!r}": put(1, value)
        for value in (
            *(1, True, 0.1, 1e300, float("nan"), float("-inf"), None, "1", 2**70, 10**400, 1j),
            *(np.float64(0.1), np.float32(0.1), np.float16(0.1), np.int64(3), np.int32(3), np.uint8(3), np.bool_(1)),
            *(SubFloat(2.5), [1.0]),
        )
    },
    "reward array": put(1, np.array(0.1)),
    "reward of one": put(1, np.array([0.1], np.float32)),
    "rewards": put(1, np.array([0.1, 0.2], np.float32)),
    **{f"terminated {value!r}": put(2, value) for value in (1, 0, None, np.bool_(1), np.bool_(0), "x", 1.0)},
    **{f"truncated {value!r}": put(3, value) for value in (1, None, np.bool_(1))},
    "terminated array": put(2, np.array(True)),
    "terminated of one": put(2, np.array([True])),
    "truth": put(2, Truth()),
    "raises": raising(ValueError("no")),
    "raises an interrupt": raising(KeyboardInterrupt()),
    "raises what is no exception": raising(Leave("x")),
    "exits": raising(SystemExit(3)),
    "stops": raising(StopIteration(1)),
}


_ONLY_STEPS = ("end", "reward", "terminated", "truncated", "both", "truth", "four", "six")
#: The same for a reset: of its two values.
RESETS = {name: change for name, change in RESULTS.items() if not name.startswith(_ONLY_STEPS)} | {
    "info none": put(1, None),
    "no info": put(1, {}),
    "no info of its own": put(1, SubDict()),
    "info that cannot be packed": put(1, {"lock": threading.Lock()}),
    "info of its own": lambda given: (given[0], SubDict(given[1])),
    "three": lambda given: (*given, 1),
    "observation alone": lambda given: given[0],
}


def adapters(
    observation: Any, action: Any, scripts: list[list[str]], resets: list[list[str]] | None = None, length: int = 5
) -> Callable[[], list[Adapter]]:
    """Return a function that makes an adapter for each script, with equal spaces."""
    all_resets: list[list[str]] = [[] for _ in scripts] if resets is None else resets

    def make() -> list[Adapter]:
        envs = [
            Scripted(observation, action, [RESULTS[name] for name in names], length, [RESETS[name] for name in others])
            for names, others in zip(scripts, all_resets, strict=True)
        ]
        return [GymnasiumAdapter(env) for env in envs]

    return make


def action_values(side: Side, env_id: int, seed: int) -> list[np.ndarray]:
    """Draw indices and numbers for the leaves of an action."""
    generator = np.random.default_rng(seed)
    values = []
    for leaf in side.adapters[env_id].spec.action:
        if np.dtype(leaf.dtype).kind in "iu":
            values.append(generator.integers(0, 2, leaf.shape).astype(leaf.dtype))
        else:
            values.append(generator.random(leaf.shape).astype(leaf.dtype))
    return values


def run_commands(both: tuple[Side, Side], commands: list[tuple[int, list[int], int, int, int]]) -> None:
    for seed, command in enumerate(commands):
        for side in both:
            for env_id in side.adapters:
                side.act(env_id, action_values(side, env_id, seed))
            side.command(*command)
        compare(both)
    seen = [[adapter.env.seen for adapter in side.adapters.values()] for side in both]
    assert seen[0] == seen[1]
    infos = [[adapter.info for adapter in side.adapters.values()] for side in both]
    assert infos[0] == infos[1]


COMMANDS = st.lists(
    st.tuples(
        st.sampled_from([STEP, STEP, STEP_RESET, STEP_RESET, RESET]),
        st.permutations([1, 2, 3]).flatmap(lambda ids: st.sampled_from([ids, ids[:1], ids[:2]])),
        st.sampled_from([0, TARGET]),
        st.integers(0, 2),
        st.sampled_from([0, int(Flag.EACH)]),
    ),
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=300 if IS_FULL else 60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(list(OBSERVATIONS)),
    st.sampled_from(list(ACTIONS)),
    st.lists(st.lists(st.sampled_from(list(RESULTS)), max_size=8), min_size=3, max_size=3),
    st.lists(st.lists(st.sampled_from(["plain", *RESETS]), max_size=4), min_size=3, max_size=3),
    COMMANDS,
    st.builds(BlockOptions, episode_seeds=st.booleans(), infos=st.sampled_from(["drop", "plain", "pickle"])),
)
def test_whatever_envs_return_and_parents_ask_both_ways_do_the_same(
    observation, action, scripts, resets, commands, options
):
    make = adapters(OBSERVATIONS[observation], ACTIONS[action], scripts, resets, length=3)
    both = sides(make, options)
    first = (RESET, [1, 2, 3], 0, 0, 0)
    run_commands(both, [first, *commands])


@pytest.mark.slow
@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("target", [0, TARGET])
@pytest.mark.parametrize("infos", ["drop", "pickle"])
def test_every_result_of_every_space(observation, target, infos):
    """One env per kind of result: its first step is watched, C makes its second; its third follows an odd one."""
    names = list(RESULTS)
    scripts = [["plain", name, "plain"] for name in names]
    both = sides(adapters(OBSERVATIONS[observation], spaces.Discrete(5), scripts), BlockOptions(infos=infos))
    ids = list(range(1, len(names) + 1))
    columns = range(3)
    run_commands(
        both,
        [(RESET, ids, 0, 0, 0), *((STEP_RESET, ids, target, column, 0) for column in columns), (STEP, ids, 0, 1, 0)],
    )


@pytest.mark.slow
@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("target", [0, TARGET])
@pytest.mark.parametrize("infos", ["drop", "pickle"])
def test_every_reset_of_every_space(observation, target, infos):
    """One env per kind of result; C's first reset follows the end of its third step."""
    names = list(RESETS)
    scripts = [["plain", "no info", "end without info", "plain"] for _ in names]
    resets = [["plain", name] for name in names]
    both = sides(adapters(OBSERVATIONS[observation], spaces.Discrete(5), scripts, resets), BlockOptions(infos=infos))
    ids = list(range(1, len(names) + 1))
    columns = (0, 1, 2, 1, 2)
    run_commands(both, [(RESET, ids, 0, 0, 0), *((STEP_RESET, ids, target, column, 0) for column in columns)])


@pytest.mark.parametrize("target", [0, TARGET])
@pytest.mark.parametrize("has_seeds", [True, False])
def test_plain_resets_are_made_in_c(target, has_seeds):
    make = adapters(FLOATS, spaces.Discrete(5), [[], []], length=2)
    side = under_way(make, BlockOptions(episode_seeds=has_seeds))
    called = calls_in_python(side)
    columns = (0, 1, 0, NUM_COLUMNS - 1 if target else 2)
    for column in columns:
        side.command(STEP_RESET, [1, 2], target, column)
        side.serve()
    assert called == []
    assert side.words["resets"].tolist() == side.words["episode"].tolist() == [0, 3, 3]
    both = sides(make, BlockOptions(episode_seeds=has_seeds))
    run_commands(
        both, [(RESET, [1, 2], 0, 0, 0), *((STEP_RESET, [1, 2], target, column % 4, 0) for column in range(8))]
    )


@pytest.mark.parametrize("target", [0, TARGET])
@pytest.mark.parametrize("has_seeds", [True, False])
def test_resets_that_are_commands_are_made_in_c(target, has_seeds):
    """For envs that have ended, and for others; not for a prepared reset, nor for the first one."""
    make = adapters(FLOATS, spaces.Discrete(5), [[], []], length=2)
    options = BlockOptions(episode_seeds=has_seeds)
    side = under_way(make, options)
    called, ends = calls_in_python(side), int(side.words["ends"].sum())
    commands = [(STEP, 0), (RESET, 1), (STEP, 1), (RESET, NUM_COLUMNS - 1 if target else 0), (RESET, 2)]
    for op, column in commands:
        side.command(op, [1, 2], target, column)
        side.serve()
    ends = int(side.words["ends"].sum()) - ends
    assert ends > 0
    assert len(called) == (ends if target else 0)  # in a storage Python writes the root after an end
    both = sides(make, options)
    run_commands(
        both,
        [
            (RESET, [1, 2], 0, 0, 0),
            *((STEP_RESET, [1, 2], target, column, 0) for column in range(3)),
            *((op, [1, 2], target, column, 0) for op, column in commands),
            (RESET, [2], target, 0, int(Flag.PREPARED)),
            (RESET, [1], target, 1, int(Flag.EACH)),
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("infos", ["drop", "pickle"])
def test_every_reset_that_is_a_command(observation, infos):
    scripts, resets = [["no info"] * 4 for _ in RESETS], [["plain", "plain", name] for name in RESETS]
    both = sides(adapters(OBSERVATIONS[observation], spaces.Discrete(5), scripts, resets), BlockOptions(infos=infos))
    ids = list(range(1, len(RESETS) + 1))
    ops = (RESET, STEP_RESET, STEP_RESET, RESET, RESET, STEP, RESET)
    run_commands(both, [(op, ids, 0, column % 3, 0) for column, op in enumerate(ops)])


@pytest.mark.parametrize("infos", ["plain", "pickle"])
def test_steps_and_resets_without_infos_are_made_in_c_where_infos_are_reported(infos):
    script = ["no info", "no info", "end without info", "no info", "no info", "end without info", "plain"]
    make = adapters(FLOATS, spaces.Discrete(5), [script], [["plain", "no info", "plain"]])
    side = under_way(make, BlockOptions(infos=infos))
    called = calls_in_python(side)
    reports = len(side.reports)
    for expected in ([], [], [], [], [1], [1, 1]):  # the second end's reset has an info, and so has the last step
        side.command(STEP_RESET, [1])
        side.serve()
        assert called == expected
        called[: len(called)] = expected
    assert len(side.reports) == reports + 2
    both = sides(make, BlockOptions(infos=infos))
    run_commands(both, [(RESET, [1], 0, 0, 0), *[(STEP_RESET, [1], 0, 0, 0)] * 12])


def test_a_new_root_seed_is_that_of_the_next_reset_in_c():
    both = sides(adapters(FLOATS, spaces.Discrete(5), [[]], length=2))
    for side in both:
        side.command(RESET, [1])
    compare(both)
    for root_seed in (3, 2**70, 0):
        for side in both:
            side.send(lambda side=side, root_seed=root_seed: side.block.seed(root_seed))
        for _ in range(4):
            for side in both:
                side.command(STEP_RESET, [1])
            compare(both)
    seeds = [[seen[1] for seen in side.adapters[1].env.seen if seen[0] == "reset"] for side in both]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == len(seeds[0]) == 7


def test_an_episode_of_more_than_32_bits_is_seeded_by_python():
    both = sides(adapters(FLOATS, spaces.Discrete(5), [[]], length=2))
    for side in both:
        side.command(RESET, [1])
        side.serve()
        side.words["episode"][1] = 2**32 - 2
    for _ in range(8):
        for side in both:
            side.command(STEP_RESET, [1])
        compare(both)
    assert both[0].adapters[1].env.seen == both[1].adapters[1].env.seen


@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_is_given_as_python_gives_it(action):
    both = sides(adapters(FLOATS, ACTIONS[action], [[], []]))
    run_commands(both, [(RESET, [1, 2], 0, 0, 0), *[(STEP, [1, 2], 0, 0, 0)] * 4])


def test_indices_beyond_those_that_are_ready_made():
    both = sides(adapters(FLOATS, spaces.Discrete(2**40, start=-(2**20)), [[]]))
    for side in both:
        side.command(RESET, [1])
    compare(both)
    for index in (0, 255, 256, 2**35, -1, -(2**63)):
        for side in both:
            side.act(1, [np.array(index)])
            side.command(STEP, [1])
        compare(both)
    assert both[0].adapters[1].env.seen == both[1].adapters[1].env.seen


def plain_adapters(number: int = 3, **options: Any) -> Callable[[], list[Adapter]]:
    return lambda: [PlainAdapter(CountingEnv(3, **options)) for _ in range(number)]


@pytest.mark.parametrize("options", [{}, {"size": 4}, {"reuses_buffers": True, "size": 2}])
def test_envs_behind_any_adapter(options):
    both = sides(plain_adapters(**options))
    commands = [(RESET, 0, 0), *((STEP_RESET, target, column % 3) for column in range(9) for target in (0, TARGET))]
    for op, target, column in commands:
        for side in both:
            side.command(op, [1, 2, 3], target, column)
        compare(both)


def calls_in_python(side: Side) -> list[int]:
    """Return a list that collects the ids of commands that `Block.execute` carries out, also in part."""
    called: list[int] = []
    execute = side.block.execute

    def noting(env_id: int, command: int, *begun: Any) -> int:
        called.append(env_id)
        return execute(env_id, command, *begun)

    side.block.execute = noting  # type: ignore[method-assign, assignment]
    assert isinstance(side.loop, NativeLoop)
    side.native = side.loop.make()
    return called


def under_way(make: Callable[[], list[Adapter]], options: BlockOptions | None = None) -> Side:
    """Return a side in C whose envs have been reset and stepped once."""
    side = Side(make(), is_native=True, options=options)
    for op in (RESET, STEP):
        side.command(op, list(side.adapters))
        side.serve()
    return side


@pytest.mark.parametrize(
    "observation", [name for name in OBSERVATIONS if name not in ("text", "small index", "nothing in it")]
)
@pytest.mark.parametrize("target", [0, TARGET])
def test_plain_steps_are_made_in_c(observation, target):
    side = under_way(adapters(OBSERVATIONS[observation], spaces.Discrete(5), [[], []]))
    called = calls_in_python(side)
    side.command(STEP, [1, 2], target, NUM_COLUMNS - 2)
    side.serve()
    assert called == []
    assert side.words["env_steps"].tolist() == [0, 2, 2]


NOT_PLAIN: dict[str, tuple[Any, BlockOptions | None]] = {
    "text": (adapters(OBSERVATIONS["text"], spaces.Discrete(5), [[]]), None),
    "int8": (adapters(OBSERVATIONS["small index"], spaces.Discrete(5), [[]]), None),
    "infos": (adapters(FLOATS, spaces.Discrete(5), [[]]), BlockOptions(infos="plain")),
    "an info that is no dict": (
        adapters(FLOATS, spaces.Discrete(5), [["no info", "no info of its own"]]),
        BlockOptions(infos="plain"),
    ),
    "generators of its own": (adapters(FLOATS, spaces.Discrete(5), [[]]), BlockOptions(isolate_rng=True)),
    "empty": (adapters(OBSERVATIONS["nothing in it"], spaces.Discrete(5), [[]]), None),
    "checked for NaN": (adapters(FLOATS, spaces.Discrete(5), [[]]), BlockOptions(check_finite=True)),
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_is_not_plain_is_left_to_python_from_the_beginning(name):
    make, options = NOT_PLAIN[name]
    side = under_way(make, options)
    called = calls_in_python(side)
    side.command(STEP, [1])
    side.serve()
    assert called == [1]
    both = sides(make, options)
    run_commands(both, [(RESET, [1], 0, 0, 0), *[(STEP_RESET, [1], 0, 0, 0)] * 12])


def test_a_method_that_replaces_the_envs_step_is_the_one_that_is_called():
    side = under_way(adapters(FLOATS, spaces.Discrete(5), [[]]))
    env = side.adapters[1].env
    before, env.step = env.step, lambda action: (np.full(3, 9, np.float32), 1.0, False, False, {})
    side.command(STEP, [1])
    side.serve()
    assert side.slab.groups[0].columns["next", "observation"][0, 1].tolist() == [9, 9, 9]
    env.step = before
    side.command(STEP, [1])
    side.serve()
    assert env.num_steps == 2


def test_an_env_that_a_message_replaces_is_the_one_that_is_stepped():
    side = under_way(adapters(FLOATS, spaces.Discrete(5), [[], []]))
    first, other = side.adapters[1].env, Scripted(FLOATS, spaces.Discrete(5), [])
    other.reset(seed=3)

    def replace() -> None:
        side.adapters[1].env = gymnasium.Wrapper(other)

    side.send(replace)
    side.command(STEP, [1, 2])
    side.serve()
    assert (first.num_steps, other.num_steps) == (1, 1)


def test_messages_are_read_before_the_steps_that_follow_them():
    both = sides(adapters(FLOATS, spaces.Discrete(5), [[], []]))
    run_commands(both, [(RESET, [1, 2], 0, 0, 0), (STEP, [1, 2], 0, 0, 0)])
    for side in both:
        side.send(lambda side=side: setattr(side.adapters[1].env, "length", 2))
        side.command(STEP_RESET, [1, 2])
    state = compare(both)
    assert state["resets"] == [0, 2, 1]


def test_seeds_and_options_that_were_sent_ahead_belong_to_their_reset():
    both = sides(adapters(FLOATS, spaces.Discrete(5), [[], []]))
    run_commands(both, [(RESET, [1, 2], 0, 0, 0), (STEP, [1, 2], 0, 0, 0)])
    for op, flags in ((STEP, 0), (RESET, int(Flag.PREPARED)), (STEP, 0)):
        for side in both:
            if op == RESET:
                side.send(
                    lambda side=side: side.block.prepare(
                        Prepare(env_id=1, seed=99, options={"options": {"a": 1}}, has_seed=True)
                    )
                )
            side.command(op, [1, 2], flags=flags)
        compare(both)
    assert both[0].adapters[1].env.seen == both[1].adapters[1].env.seen
    assert ("reset", 99, {"a": 1}) in both[1].adapters[1].env.seen


def test_a_storage_that_was_detached_is_no_longer_written_to():
    side = under_way(adapters(FLOATS, spaces.Discrete(5), [[]]))
    side.command(STEP, [1], TARGET)
    side.serve()
    before = side.storage_bytes.copy()
    references = weakref.ref(side.block.slots[1].sinks[TARGET])
    side.send(lambda: side.block.detach_storage(TARGET))
    side.command(STEP, [1], TARGET, 1)
    side.serve()
    assert (side.storage_bytes == before).all()
    assert side.words["status"][1] == 1
    gc.collect()
    assert references() is None


@pytest.mark.parametrize("ring_at", [0, 3, 5, 100])
def test_sends_are_answered_longest_waiting_first_and_rung_for_as_the_parent_asks(ring_at):
    both = sides(adapters(FLOATS, spaces.Discrete(5), [[], [], []]))
    run_commands(both, [(RESET, [1, 2, 3], 0, 0, 0), (STEP, [1, 2, 3], 0, 0, 0)])
    order: list[list[int]] = [[], []]
    for side, seen in zip(both, order, strict=True):
        for env_id, adapter in side.adapters.items():
            step = adapter.env.step
            adapter.env.step = lambda a, env_id=env_id, step=step, seen=seen: (seen.append(env_id), step(a))[1]
        side.words["ring_at"][1] = ring_at
        side.words["answered"][0] = 2
        side.command(STEP, [3, 1, 2], flags=int(Flag.EACH))
    compare(both)
    assert order == [[3, 1, 2]] * 2


def test_the_phase_says_which_env_is_stepped():
    seen: list[int] = []
    side = under_way(adapters(FLOATS, spaces.Discrete(5), [[], []]))
    for adapter in side.adapters.values():
        adapter.env.script = [lambda result: (seen.append(int(side.words["phase"][1])), result)[1]]
    side.command(STEP, [1, 2])
    side.serve()
    assert seen == [slot.phase_words[STEP] for slot in side.block.slots.values()]
    assert side.words["phase"][1] == 0


def test_the_phase_says_which_env_is_reset():
    seen: list[int] = []
    side = under_way(adapters(FLOATS, spaces.Discrete(5), [["plain", "truncated"]]))
    side.adapters[1].env.resets = [lambda given: (seen.append(int(side.words["phase"][1])), given)[1]]
    side.command(STEP_RESET, [1])
    side.serve()
    assert seen == [side.block.slots[1].phase_words[RESET]]
    assert side.words["phase"][1] == 0


def test_an_exception_of_pythons_own_part_ends_the_loop():
    side = under_way(plain_adapters(1))
    side.send(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        side.serve()


def test_actions_are_copies_that_the_env_may_keep():
    side = under_way(adapters(FLOATS, spaces.Box(-1, 1, (2,), np.float32), [[]]))
    kept: list[np.ndarray] = []
    env = side.adapters[1].env
    step = env.step
    env.step = lambda action: (kept.append(action), step(action))[1]
    for number in range(3):
        side.act(1, [np.full(2, number, np.float32)])
        side.command(STEP, [1])
        side.serve()
    assert [action.tolist() for action in kept] == [[0, 0], [1, 1], [2, 2]]


# ---- memory ----------------------------------------------------------------------------------------


def test_all_is_freed_with_the_loop():
    side = under_way(adapters(OBSERVATIONS["dict"], ACTIONS["dict"], [[], []]))
    side.command(STEP, [1, 2], TARGET)
    side.serve()
    dying = [weakref.ref(side.adapters[1]), weakref.ref(side.block), weakref.ref(side.loop), weakref.ref(side.slab)]
    buffer = weakref.ref(side.slab.buffer)
    del side
    gc.collect()
    assert [reference() for reference in (*dying, buffer)] == [None] * 5


def test_a_step_holds_the_memory_that_it_writes_to():
    side = under_way(plain_adapters(1))
    side.command(STEP, [1])
    side.serve()
    step = side.block.slots[1].sinks[0].native
    assert type(step).__name__ == "Step"
    array = weakref.ref(side.slab.buffer)
    del side
    gc.collect()
    assert array() is not None
    del step
    gc.collect()
    assert array() is None


@pytest.mark.slow
def test_nothing_leaks_whatever_envs_return():
    make = adapters(OBSERVATIONS["dict"], ACTIONS["dict"], [[] for _ in RESULTS])
    side = under_way(make)
    ids = list(side.adapters)
    process = psutil.Process()

    def turn() -> None:
        for (name, change), adapter in zip(RESULTS.items(), side.adapters.values(), strict=True):
            adapter.env.script = [change] if name != "generator" else []
            adapter.env.resets = [RESETS[name]] if name in RESETS and name != "generator" else []
            adapter.env.num_steps = 9 if adapter.env.resets else 0
            adapter.env.seen.clear()
        for op in (STEP_RESET, RESET, STEP):
            side.command(op, ids, TARGET if op == STEP else 0)
            side.serve()
        side.reports.clear()

    for _ in range(10):
        turn()
    gc.collect()
    objects, growths, num_turns = len(gc.get_objects()), [], scaled(16, full=40)
    for _ in range(3):
        before = process.memory_info().rss
        for _ in range(num_turns):
            turn()
        gc.collect()
        growths.append(process.memory_info().rss - before)
    assert len(gc.get_objects()) - objects < 100
    assert min(growths) < num_turns << 15, "a leak grows at every time; what else the process has does not"


@pytest.mark.slow
def test_nothing_leaks_in_a_hundred_thousand_plain_steps():
    side = under_way(plain_adapters(50))
    watched = [side.adapters[1], side.adapters[1].env, np.ndarray, side.block.slots[1]]

    def turns(number: int) -> None:
        for _ in range(number):
            side.command(STEP_RESET, list(side.adapters))
            side.serve()

    turns(200)
    gc.collect()
    references, blocks = [sys.getrefcount(item) for item in watched], sys.getallocatedblocks()
    turns(2000)
    gc.collect()
    assert [sys.getrefcount(item) for item in watched] == references
    assert sys.getallocatedblocks() - blocks < 1000, "100,000 steps were made"


@pytest.mark.parametrize("missing", ["observation", "words", "env_id", "readers", "done", "seed_pool"])
def test_facts_that_are_missing_are_refused(missing):
    side = Side(plain_adapters(1)(), is_native=True)
    slot = side.block.slots[1]
    facts = step_facts(slot, slot.sinks[0], side.loop._words, slot.adapter.step)
    module: Any = native.load()
    module.Step(facts)
    del facts[missing]
    with pytest.raises(KeyError, match=missing):
        module.Step(facts)


@pytest.mark.parametrize(
    "wrong",
    [
        {"env_id": 99},
        {"env_id": -1},
        {"num_columns": 7},
        {"done": []},
        {"observation": [np.zeros((3, 4, 4))[..., ::2]]},
        {"observation": [np.zeros(3).tobytes()]},
        {"reward": [3]},
        {"root": [np.zeros((3, 4), np.int64)]},
        {"root": []},
        {"index": np.zeros(2, np.int64)},
        {"index": np.zeros(1, np.int32)},
        {"seed_pool": np.zeros(4, np.uint32)},
        {"words": {name: np.zeros(2, np.int32) for name in ("env_steps", "ends", "episode", "resets")}},
        {"words": {name: np.zeros(1, np.int64) for name in ("env_steps", "ends", "episode", "resets")}},
    ],
)
def test_memory_that_does_not_fit_is_refused(wrong):
    side = Side(plain_adapters(1)(), is_native=True)
    slot = side.block.slots[1]
    facts = step_facts(slot, slot.sinks[0], side.loop._words, slot.adapter.step)
    module: Any = native.load()
    with pytest.raises((ValueError, TypeError, BufferError)):
        module.Step(facts | wrong)


def test_fingerprints_tell_types_and_bits():
    assert fingerprint(np.int64(1)) != fingerprint(1)
    assert fingerprint(np.zeros(2)) != fingerprint(np.full(2, -0.0))
