"""The worker in C does what the worker in Python does: rows, words, messages and actions, bit for bit.

`native_sides.run` compares them after every command of a program. The tables here are the programs.
"""

import gc

# ruff: noqa: FBT003 - flags among the values of a step
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Collection
from typing import Any, NamedTuple
from unittest.mock import PropertyMock, patch

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
from envherd.workers.block.slot import step_facts
from envherd.workers.messages import Prepare
from envherd.workers.options import BlockOptions, FactoryCall
from envherd.workers.protocol import RESET, STEP, STEP_RESET, Flag
from envherd.workers.testing import CountingEnv
from envherd.workers.testing.envs import PlainAdapter
from tests.oracles.native_sides import (
    NUM_COLUMNS,
    TARGET,
    WAYS,
    Scripted,
    Side,
    fingerprint,
    run,
)
from tests.scale import IS_FULL, scaled

pytestmark = pytest.mark.skipif(
    native.load() is None, reason=f"the C extension is not there: {native.why_not()}"
)

EACH, PREPARED = int(Flag.EACH), int(Flag.PREPARED)

# ---- spaces ------------------------------------------------------------------------------------------

FLOATS = spaces.Box(-2.0, 2.0, (3,), np.float32)
INDEX = spaces.Discrete(5)
OBSERVATIONS: dict[str, Any] = {
    **{
        dtype: spaces.Box(0, 100, (2, 3), np.dtype(dtype))
        for dtype in (
            "float32",
            "float64",
            "float16",
            "uint8",
            "int8",
            "int16",
            "int32",
            "int64",
            "uint16",
        )
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
    "dict": spaces.Dict(
        a=FLOATS, b=spaces.Discrete(4), c=spaces.Box(0, 255, (2, 2), np.uint8)
    ),
    "dict of one": spaces.Dict(a=FLOATS),
    "dict with a small index": spaces.Dict(
        a=spaces.Discrete(4), b=spaces.Discrete(4, dtype=np.int8)
    ),
    "nested": spaces.Dict(
        a=spaces.Tuple((FLOATS, spaces.Discrete(2))),
        b=spaces.Dict(c=spaces.MultiBinary(3)),
    ),
    "tuple": spaces.Tuple((FLOATS, spaces.Discrete(3, start=1))),
    "text": spaces.Dict(a=FLOATS, b=spaces.Text(4)),
}
#: Observations that C does not store.
NOT_STORED = ("text", "small index", "dict with a small index", "nothing in it")
ACTIONS: dict[str, Any] = {
    "index": INDEX,
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

# ---- what envs return --------------------------------------------------------------------------------


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
        # A new instance, because an exception keeps the tracebacks of all its raises.
        raise type(error)(*error.args)

    return step


def with_observation(
    change: Callable[[np.ndarray], Any], *, of_items: bool = False
) -> Callable[[Any], Any]:
    """Change the observation where it is an array (`of_items`: that has items), or each of its entries."""

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: changed(item) for key, item in value.items()}
        if isinstance(value, tuple):
            return tuple(map(changed, value))
        return (
            change(value)
            if isinstance(value, np.ndarray) and (value.size or not of_items)
            else value
        )

    return lambda result: (changed(result[0]), *result[1:])


def with_axes(change: Callable[[np.ndarray], Any]) -> Callable[[Any], Any]:
    """Change the observation where it is an array with axes, or each of its entries."""
    return with_observation(
        lambda array: change(array) if array.ndim else array, of_items=True
    )


def put(index: int, value: Any) -> Callable[[Any], Any]:
    return lambda result: (*result[:index], value, *result[index + 1 :])


def with_dict(change: Callable[[dict[str, Any]], Any]) -> Callable[[Any], Any]:
    return lambda result: (
        change(result[0]) if isinstance(result[0], dict) else result[0],
        *result[1:],
    )


def rows_from_anywhere(array: np.ndarray) -> Any:
    return tuple(np.repeat(array, 2, axis=0)[::2])


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
    **{
        f"as {dtype}": with_observation(operator.methodcaller("astype", dtype))
        for dtype in (
            "float64",
            "float32",
            "float16",
            "int64",
            "int8",
            "bool",
            "complex",
            "object",
        )
    },
    "swapped bytes": with_observation(
        lambda array: array.astype(array.dtype.newbyteorder())
    ),
    "times": with_observation(lambda array: np.zeros(array.shape, "M8[s]")),
    "another shape": with_observation(lambda array: array[np.newaxis]),
    "shorter": with_observation(lambda array: array[:1]),
    "longer": with_axes(lambda array: np.concatenate([array, array])),
    "flat": with_observation(lambda array: array.reshape(-1)),
    "its first item": with_observation(
        lambda array: array.reshape(-1)[0], of_items=True
    ),
    "Fortran": with_observation(np.asfortranarray),
    "strided": with_axes(lambda array: np.repeat(array, 2, axis=-1)[..., ::2]),
    "reversed": with_axes(lambda array: array[::-1].copy()[::-1]),
    "read-only": with_observation(
        lambda array: np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)
    ),
    "subclass": with_observation(lambda array: array.view(Sub)),
    "masked": with_observation(np.ma.masked_array),
    "rows": with_axes(tuple),
    "rows from anywhere": with_axes(rows_from_anywhere),
    "rows, one of another dtype": with_axes(
        lambda array: (*array[:-1], array[-1].astype(np.float32))
    ),
    "rows, one too many": with_axes(lambda array: (*array, array[0])),
    "nested list": with_observation(lambda array: array.tolist()),
    "memoryview": with_observation(lambda array: array.copy().data),
    "array of nothing": with_observation(lambda array: np.array(None)),
    **{
        f"observation {value!r}": put(0, value)
        for value in (
            None,
            2,
            np.int64(2),
            np.int32(2),
            True,
            0.25,
            np.float64(0.25),
            2**70,
            "text",
            {"a": 1},
        )
    },
    "an entry more": with_dict(lambda observation: {**observation, "more": 1}),
    "an entry less": with_dict(lambda observation: dict(list(observation.items())[1:])),
    "dict of its own": with_dict(SubDict),
    **{
        f"reward {value!r}": put(1, value)
        for value in (
            *(
                1,
                True,
                0.1,
                -0.0,
                1e300,
                3.5e38,
                1e-40,
                5e-324,
                float("nan"),
                float("-inf"),
                None,
                "1",
                2**70,
                10**400,
            ),
            *(
                np.float64(0.1),
                np.float32(0.1),
                np.float16(0.1),
                np.int64(3),
                np.int32(3),
                np.uint8(3),
                np.bool_(1),
            ),
            *(SubFloat(2.5), [1.0], 1j),
        )
    },
    "reward array": put(1, np.array(0.1)),
    "reward of one": put(1, np.array([0.1], np.float32)),
    "reward of one double": put(1, np.array([0.5])),
    "rewards": put(1, np.array([0.1, 0.2], np.float32)),
    **{
        f"terminated {value!r}": put(2, value)
        for value in (1, 0, 2, None, np.bool_(1), np.bool_(0), np.int8(0), "x", "", 1.0)
    },
    **{f"truncated {value!r}": put(3, value) for value in (1, None, np.bool_(1))},
    "terminated array": put(2, np.array(True)),
    "terminated of one": put(2, np.array([True])),
    "terminated of one zero": put(2, np.array([0])),
    "truth": put(2, Truth()),
    "raises": raising(ValueError("no")),
    "raises an interrupt": raising(KeyboardInterrupt()),
    "raises what is no exception": raising(Leave("x")),
    "exits": raising(SystemExit(3)),
    "stops": raising(StopIteration(1)),
}
_ONLY_STEPS = (
    "end",
    "reward",
    "terminated",
    "truncated",
    "both",
    "truth",
    "four",
    "six",
)
#: The same for a reset: of its two values.
RESETS = {
    name: change for name, change in RESULTS.items() if not name.startswith(_ONLY_STEPS)
} | {
    "info none": put(1, None),
    "no info": put(1, {}),
    "no info of its own": put(1, SubDict()),
    "info that cannot be packed": put(1, {"lock": threading.Lock()}),
    "info of its own": lambda given: (given[0], SubDict(given[1])),
    "nothing, and an info that is not plain": lambda _: (None, {"type": int}),
    "three": lambda given: (*given, 1),
    "observation alone": lambda given: given[0],
}


class Listed(NamedTuple):
    """The values that the step of an adapter returns."""

    values: Any


def listed(
    change: Callable[[list[Any], list[Any], Any, Any], Any],
) -> Callable[[Any], Any]:
    return lambda result: Listed(change([result[0]], [result[1]], *result[2:4]))


#: Results of `Adapter.step` that are not two lists and two flags, or whose lists do not have one item.
LISTS = {
    "no observation": listed(lambda _, *rest: ([], *rest)),
    "two observations": listed(lambda one, *rest: (one * 2, *rest)),
    "tuple of observations": listed(lambda one, *rest: (tuple(one), *rest)),
    "observation in no list": listed(lambda one, *rest: (one[0], *rest)),
    "no rewards": listed(lambda one, _, *rest: (one, [], *rest)),
    "two rewards": listed(lambda one, reward, *rest: (one, reward * 2, *rest)),
    "tuple of rewards": listed(lambda one, reward, *rest: (one, tuple(reward), *rest)),
    "list of all": listed(lambda *values: [*values]),
    "three values": listed(lambda *values: values[:3]),
}


class ListAdapter(GymnasiumAdapter):
    """Passes on what its env returns, without a check: C calls its `step`, and not that of the env."""

    def step(self, action: list[Any]) -> Any:
        result = self.env.step(action[0])
        if isinstance(result, Listed):
            return result.values
        if type(result) is not tuple or len(result) != 5:
            return result
        self.info = result[4]
        return [result[0]], [result[1]], *result[2:4]


Make = Callable[[], list[Adapter]]


def adapters(
    observation: Any = FLOATS,
    action: Any = INDEX,
    scripts: Any = ((),),
    resets: Any = None,
    length: int = 5,
    kind: type[GymnasiumAdapter] = GymnasiumAdapter,
) -> Make:
    """Return a function that makes an adapter for each script, with equal spaces; scripts are names in `RESULTS`."""
    changes = RESULTS | LISTS
    all_resets = [()] * len(scripts) if resets is None else resets

    def make() -> list[Adapter]:
        envs = [
            Scripted(
                observation,
                action,
                [changes[name] for name in names],
                length,
                [RESETS[name] for name in others],
            )
            for names, others in zip(scripts, all_resets, strict=True)
        ]
        return [kind(env) for env in envs]

    return make


def counting(number: int = 3, length: int = 3, **options: Any) -> Make:
    return lambda: [PlainAdapter(CountingEnv(length, **options)) for _ in range(number)]


# ---- programs ----------------------------------------------------------------------------------------


class Case(NamedTuple):
    """One program.

    Attributes:
        make: creates the adapters.
        program: see `native_sides.run`; a reset of all envs comes first.
        options: of the block.
        by_python: for each command after the first, the ids of the envs for which the loop in C calls Python; None if
            that does not matter. C makes neither the first step nor the first reset of an env.
    """

    make: Make
    program: list[Any]
    options: BlockOptions | None = None
    by_python: list[list[int]] | None = None


TWO = ((), ())
#: For envs that have ended, and for others; ends are those of two envs with episodes of two steps.
AMONG_RESETS = [(STEP, 0), (RESET, 1), (STEP, 1), (RESET, 0), (RESET, 2)]


def cases_of(target: int, has_seeds: bool) -> dict[str, Case]:  # noqa: FBT001
    name = f"target {target}, {'' if has_seeds else 'no '}seeds"
    last, options = (
        NUM_COLUMNS - 1 if target else 2,
        BlockOptions(episode_seeds=has_seeds),
    )
    # In a storage Python writes the root after an end.
    ends_in_storage = [1, 2] if target else []
    return {
        f"resets after ends, {name}": Case(
            adapters(scripts=TWO, length=2),
            [
                (STEP, [1, 2]),
                *(
                    (STEP_RESET, [1, 2], target, column)
                    for column in (0, 1, last, 0, last, 1)
                ),
            ],
            options,
            [[1, 2], *[[]] * 6],
        ),
        f"resets that are commands, {name}": Case(
            adapters(scripts=TWO, length=2),
            [
                (STEP, [1, 2]),
                *((op, [1, 2], target, column) for op, column in AMONG_RESETS),
                (RESET, [1, 2], target, last),
                (RESET, [2], target, 0, PREPARED),
                (RESET, [1], target, 1, EACH),
            ],
            options,
            [[1, 2], ends_in_storage, [], [], [], [], [], [2], []],
        ),
    }


def seed_anew(root_seed: int) -> Callable[[Side], None]:
    return lambda side: side.block.seed(root_seed)


def number_of_episode(side: Side) -> None:
    side.words["episode"][1] = 2**32 - 2


def index(value: int) -> Callable[[Side], None]:
    return lambda side: side.act(1, [np.array(value)])


def prepare(side: Side) -> None:
    side.block.prepare(
        Prepare(env_id=1, seed=99, options={"options": {"a": 1}}, has_seed=True)
    )


def shorten(side: Side) -> None:
    side.adapters[1].env.length = 2


def detach(side: Side) -> None:
    side.block.detach_storage(TARGET)


def ask_for_ring(ring_at: int) -> Callable[[Side], None]:
    def ask(side: Side) -> None:
        side.words["ring_at"][1] = ring_at
        side.words["answered"][0] = 2

    return ask


def replace_step(side: Side) -> None:
    side.adapters[1].env.step = lambda action: (
        np.full(3, 9, np.float32),
        1.0,
        False,
        False,
        {},
    )


def restore_step(side: Side) -> None:
    del side.adapters[1].env.step


def replace_env(side: Side) -> None:
    other = Scripted(FLOATS, INDEX)
    other.reset(seed=3)
    side.adapters[1].env = gymnasium.Wrapper(other)


NOT_PLAIN: dict[str, tuple[Make, BlockOptions]] = {
    **{name: (adapters(OBSERVATIONS[name]), BlockOptions()) for name in NOT_STORED},
    "infos that are no dicts": (
        adapters(scripts=[["no info of its own"] * 13]),
        BlockOptions(infos="plain"),
    ),
    "isolated generators": (adapters(), BlockOptions(isolate_rng=True)),
    "checked for NaN": (adapters(), BlockOptions(check_finite=True)),
}
CASES: dict[str, Case] = {
    **{
        f"steps of {name} to target {target}": Case(
            adapters(space, scripts=TWO),
            [(STEP, [1, 2]), (STEP, [1, 2], target, NUM_COLUMNS - 2)],
            by_python=[[1, 2], []],
        )
        for name, space in OBSERVATIONS.items()
        if name not in NOT_STORED
        for target in (0, TARGET)
    },
    **{
        f"not plain: {name}": Case(
            make,
            [(STEP, [1]), (STEP, [1]), *[(STEP_RESET, [1])] * 11],
            options,
            [[1]] * 13,
        )
        for name, (make, options) in NOT_PLAIN.items()
    },
    **{
        name: case
        for target in (0, TARGET)
        for has_seeds in (True, False)
        for name, case in cases_of(target, has_seeds).items()
    },
    **{
        f"steps and resets without infos, infos={infos}": Case(
            adapters(
                scripts=[
                    [
                        "no info",
                        "no info",
                        "end without info",
                        "no info",
                        "no info",
                        "end without info",
                        "plain",
                    ]
                ],
                resets=[["plain", "no info", "plain"]],
            ),
            [(STEP, [1]), *[(STEP_RESET, [1])] * 12],
            BlockOptions(infos=infos),
            # The first step is watched; a step after the second end has an info.
            [[1], *[[]] * 5, [1], *[[]] * 6],
        )
        for infos in ("plain", "pickle")
    },
    "infos of a known schema": Case(
        adapters(),
        [(STEP, [1]), (STEP, [1]), *[(STEP_RESET, [1])] * 11],
        BlockOptions(infos="plain"),
        [[1], *[[]] * 12],
    ),
    **{
        f"action: {name}": Case(
            adapters(action=space, scripts=TWO), [(STEP, [1, 2])] * 4
        )
        for name, space in ACTIONS.items()
    },
    "indices beyond those that are ready made": Case(
        adapters(action=spaces.Discrete(2**40, start=-(2**20))),
        [
            part
            for value in (0, 255, 256, 2**35, -1, -(2**63))
            for part in (index(value), (STEP, [1]))
        ],
    ),
    **{
        f"any adapter, {options}": Case(
            counting(**options),
            [
                (STEP_RESET, [1, 2, 3], target, column % 3)
                for column in range(9)
                for target in (0, TARGET)
            ],
        )
        for options in ({}, {"size": 4}, {"reuses_buffers": True, "size": 2})
    },
    "new root seeds": Case(
        adapters(length=2),
        [
            part
            for seed in (3, 2**70, 0)
            for part in (seed_anew(seed), *[(STEP_RESET, [1])] * 4)
        ],
    ),
    "an episode whose number has more than 32 bits": Case(
        adapters(length=2), [number_of_episode, *[(STEP_RESET, [1])] * 8]
    ),
    "messages are read before the steps that follow them": Case(
        adapters(scripts=TWO), [(STEP, [1, 2]), shorten, (STEP_RESET, [1, 2])]
    ),
    "a seed and options for one reset": Case(
        adapters(scripts=TWO),
        [
            (STEP, [1, 2]),
            (STEP, [1, 2]),
            prepare,
            (RESET, [1, 2], 0, 0, PREPARED),
            (STEP, [1, 2]),
        ],
    ),
    "entries that a failed reset has left out are reported with the next command": Case(
        adapters(
            resets=[["plain", "nothing, and an info that is not plain", "no info"]],
        ),
        [(STEP, [1]), (RESET, [1]), (RESET, [1]), (RESET, [1])],
        BlockOptions(infos="plain"),
        [[1], [1], [1], []],
    ),
    "a storage that was detached": Case(
        adapters(),
        [(STEP, [1], TARGET)] * 2
        + [detach, (STEP, [1], TARGET, 1), (RESET, [1]), (STEP, [1])],
    ),
    **{
        f"answers one by one, rung for at {ring_at}": Case(
            adapters(scripts=((), (), ())),
            [(STEP, [1, 2, 3]), ask_for_ring(ring_at), (STEP, [3, 1, 2], 0, 0, EACH)],
        )
        for ring_at in (0, 3, 5, 100)
    },
    "another step of an env, then its own": Case(
        adapters(),
        [
            (STEP, [1]),
            (STEP, [1]),
            replace_step,
            (STEP, [1]),
            restore_step,
            (STEP, [1]),
        ],
    ),
    "another env": Case(
        adapters(scripts=TWO),
        [(STEP, [1, 2]), replace_env, (STEP, [1, 2]), (STEP, [1, 2])],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_c_does_what_python_does(name):
    make, program, options, by_python = CASES[name]
    _, executed = run(
        make, [(RESET, list(range(1, len(make()) + 1))), *program], options
    )
    if by_python is not None:
        assert executed[1:] == by_python


def test_programs_have_the_effects_that_they_are_written_for():
    """Otherwise they would compare nothing."""

    def after(name: str) -> Side:
        case = CASES[name]
        side: Side = run(
            case.make,
            [(RESET, list(range(1, len(case.make()) + 1))), *case.program],
            case.options,
        )[0]
        return side

    side = after("resets after ends, target 0, seeds")
    assert side.words["resets"].tolist() == side.words["episode"].tolist() == [0, 4, 4]
    seeds = [
        seen[1] for seen in after("new root seeds").envs[0].seen if seen[0] == "reset"
    ]
    assert len(set(seeds)) == len(seeds) == 7
    assert after("messages are read before the steps that follow them").words[
        "resets"
    ].tolist() == [0, 2, 1]
    side = after("a seed and options for one reset")
    assert [seen[1:3] for seen in side.envs[0].seen if seen[0] == "reset"][1:] == [
        (99, {"a": 1})
    ]
    side = after("a storage that was detached")
    assert [report["kind"] for report in side.reports] == ["fault"]
    side = after("answers one by one, rung for at 3")
    assert side.words["answered"].tolist() == [2, 3]
    side = after("another step of an env, then its own")
    assert (
        side.envs[0].num_steps,
        after("another env").adapters[1].env.unwrapped.num_steps,
    ) == (3, 2)


#: Spaces that C stores as it does another of the table. `CASES` has steps of them, and the random programs have them.
LIKE_OTHERS = (
    *(
        "int8",
        "int16",
        "int32",
        "uint16",
        "float16",
        "index from 3",
        "dict of one",
        "one double",
        "indices",
        "bits",
    ),
    *("tuple", "dict with a small index"),
)
#: Where infos are reported, C leaves results with an info of an unknown schema to Python, of whatever space it is.
OF_SPACES = [
    *((name, "drop") for name in OBSERVATIONS if IS_FULL or name not in LIKE_OTHERS),
    *((name, "pickle") for name in ("float32", "index", "dict")),
]


#: Spaces with all results. C reads rewards and flags without a look at the space: the others have them in a full run.
WITH_ALL: Collection[str] = (
    OBSERVATIONS if IS_FULL else ("float32", "index", "one float", "dict", "text")
)
_OF_NO_SPACE = ("reward", "terminated ", "truncated ", "truth")


@pytest.mark.sampled(3)
@pytest.mark.long
@pytest.mark.parametrize(
    ("observation", "infos", "kind"),
    [
        *((name, infos, GymnasiumAdapter) for name, infos in OF_SPACES),
        *((name, "drop", ListAdapter) for name in ("int64", "one float")),
    ],
)
def test_every_result_of_every_space(observation, infos, kind):
    """An env for each result: an odd one follows its first step in C, to the ring and to a storage."""
    names = [
        name
        for name in RESULTS
        if observation in WITH_ALL or not name.startswith(_OF_NO_SPACE)
    ]
    names += LISTS if kind is ListAdapter else ()
    scripts = [["plain", name, "plain", name, "plain"] for name in names]
    make = adapters(OBSERVATIONS[observation], scripts=scripts, length=9, kind=kind)
    ids = list(range(1, len(names) + 1))
    commands = [
        (STEP_RESET, 0),
        (STEP_RESET, 0),
        (RESET, 0),
        (STEP_RESET, 0),
        (STEP_RESET, TARGET),
        (STEP, TARGET),
    ]
    program = [
        (op, ids, target, column % 3) for column, (op, target) in enumerate(commands)
    ]
    run(make, [(RESET, ids), *program], BlockOptions(infos=infos))


@pytest.mark.sampled(3)
@pytest.mark.long
@pytest.mark.parametrize(("observation", "infos"), OF_SPACES)
def test_every_reset_of_every_space(observation, infos):
    """An env for each reset: after an end in the ring, after one in a storage, and as a command."""
    names = list(RESETS)
    scripts = [["plain", *["no info", "end without info"] * 3] for _ in names]
    make = adapters(
        OBSERVATIONS[observation],
        scripts=scripts,
        resets=[["plain", name] * 4 for name in names],
    )
    ids = list(range(1, len(names) + 1))
    ops = [
        *[(STEP_RESET, 0)] * 3,
        (RESET, 0),
        *[(STEP_RESET, TARGET)] * 2,
        (RESET, 0),
        (RESET, 0),
        (STEP, 0),
        (RESET, 0),
    ]
    program = [(op, ids, target, column % 3) for column, (op, target) in enumerate(ops)]
    run(make, [(RESET, ids), *program], BlockOptions(infos=infos))


COMMANDS = st.lists(
    st.tuples(
        st.sampled_from([STEP, STEP, STEP_RESET, STEP_RESET, RESET]),
        st.permutations([1, 2, 3]).flatmap(
            lambda ids: st.sampled_from([ids, ids[:1], ids[:2]])
        ),
        st.sampled_from([0, TARGET]),
        st.integers(0, 2),
        st.sampled_from([0, EACH]),
    ),
    max_size=12,
)


def three_of(names: Any, max_size: int) -> st.SearchStrategy[list[list[str]]]:
    return st.lists(
        st.lists(st.sampled_from([*names]), max_size=max_size), min_size=3, max_size=3
    )


@pytest.mark.slow
@settings(
    max_examples=300 if IS_FULL else 60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    st.sampled_from(list(OBSERVATIONS)),
    st.sampled_from(list(ACTIONS)),
    three_of(RESULTS, 8),
    three_of(["plain", *RESETS], 4),
    COMMANDS,
    st.builds(
        BlockOptions,
        episode_seeds=st.booleans(),
        infos=st.sampled_from(["drop", "plain", "pickle"]),
    ),
)
def test_every_program_of_any_envs(
    observation, action, scripts, resets, commands, options
):
    make = adapters(
        OBSERVATIONS[observation], ACTIONS[action], scripts, resets, length=3
    )
    run(make, [(RESET, [1, 2, 3]), *commands], options)


# ---- what else ---------------------------------------------------------------------------------------


def under_way(
    make: Make, options: BlockOptions | None = None, way: str = "loop"
) -> Side:
    """Return a side whose envs have been reset and stepped once."""
    side = Side(make(), way, options)
    for op in (RESET, STEP):
        side.do((op, list(side.adapters)))
    return side


def step_of(side: Side, target: int = 0) -> Any:
    """Return the step of env 1 that the loop in Python calls."""
    return getattr(side.block.slots[1].sinks[target].step, "__self__", None)


@pytest.mark.parametrize(
    ("make", "options", "way", "is_in_c"),
    [
        (adapters(), None, "step", True),
        (counting(1), None, "step", True),
        (adapters(kind=ListAdapter), None, "step", True),
        (adapters(), None, "python", False),
        *(
            (*NOT_PLAIN[name], "step", False)
            for name in (*NOT_STORED, "checked for NaN")
        ),
    ],
    ids=["env", "plain", "derived", "in Python", *NOT_STORED, "checked for NaN"],
)
def test_the_loop_in_python_calls_plain_steps_in_c(make, options, way, is_in_c):
    step = step_of(under_way(make, options, way))
    assert isinstance(step, native.load().Step) == is_in_c


def test_an_exception_of_pythons_own_part_ends_the_loop():
    side = under_way(counting(1))
    side.send(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        side.serve()


@pytest.mark.parametrize("op", [STEP, RESET])
@pytest.mark.parametrize("way", WAYS)
def test_interrupt_at_a_read_of_the_info_is_not_lost(way, op):
    side = under_way(adapters(kind=ListAdapter), BlockOptions(infos="plain"), way)
    # The adapter sets it, and the worker reads it.
    with patch.object(
        ListAdapter, "info", PropertyMock(side_effect=[None, KeyboardInterrupt, {}])
    ):
        side.do((op, [1]))
    assert side.reports[-1]["type_name"] == "KeyboardInterrupt"


@pytest.mark.parametrize(
    ("column", "in_command"),
    [
        (-1, -1),
        (-(2**31), -(2**31)),
        *((column, NUM_COLUMNS) for column in (NUM_COLUMNS, 2**80, -(2**80), 1.5, "0")),
    ],
)
def test_missing_column_is_refused_before_the_env_is_stepped(column, in_command):
    side = under_way(adapters(), way="step")
    with pytest.raises((IndexError, TypeError)):
        step_of(side, TARGET).run(column)
    looped = under_way(adapters())
    looped.do((STEP, [1], TARGET, in_command))
    assert looped.words["status"][1] == 1
    assert side.envs[0].num_steps == looped.envs[0].num_steps == 1


def facts_of(side: Side) -> dict[str, Any]:
    slot = side.block.slots[1]
    return step_facts(slot, slot.sinks[0], side.loop._words, slot.adapter.step)


@pytest.mark.parametrize(
    "missing", ["observation", "words", "env_id", "readers", "done", "seed_pool"]
)
def test_facts_that_are_missing_are_refused(missing):
    facts = facts_of(Side(counting(1)()))
    native.load().Step(facts)
    del facts[missing]
    with pytest.raises(KeyError, match=missing):
        native.load().Step(facts)


FLAGS = [np.zeros((3, 1), bool)] * 3
WORDS = ("env_steps", "ends", "episode", "resets", "info_ids")


@pytest.mark.parametrize(
    "wrong",
    [
        {"env_id": 99},
        {"env_id": -1},
        {"num_columns": 7},
        {"done": []},
        {"done": [*FLAGS[:2], np.zeros((2, 1), bool)]},
        {"done": [*FLAGS[:2], np.zeros((3, 1), np.int16)]},
        {"observation": [np.zeros((3, 4, 4))[..., ::2]]},
        {"observation": [np.zeros(3).tobytes()]},
        {"reward": [3]},
        {"reward": [np.zeros((2, 1), np.float32)]},
        {"root": [np.zeros((3, 4), np.int64)]},
        {"root": []},
        {"index": np.zeros(2, np.int64)},
        {"index": np.zeros(1, np.int32)},
        {"seed_pool": np.zeros(4, np.uint32)},
        {"words": {name: np.zeros(2, np.int32) for name in WORDS}},
        {"words": {name: np.zeros(1, np.int64) for name in WORDS}},
    ],
    ids="-".join,
)
def test_memory_that_does_not_fit_is_refused(wrong):
    facts = facts_of(Side(counting(1)()))
    native.load().Step(facts | {"done": FLAGS})
    with pytest.raises((ValueError, TypeError, BufferError)):
        native.load().Step(facts | wrong)


# ---- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["step", "loop"])
def test_all_is_freed_with_the_loop(way):
    side = under_way(adapters(OBSERVATIONS["dict"], ACTIONS["dict"], TWO), way=way)
    side.do((STEP, [1, 2], TARGET))
    detached = weakref.ref(side.block.slots[1].sinks[TARGET])
    for deed in (detach, (STEP, [1, 2])):
        side.do(deed)
    gc.collect()
    assert detached() is None
    parts = (side.adapters[1], side.block, side.loop, side.slab, side.slab.buffer)
    dying = [weakref.ref(part) for part in parts]
    del side, parts
    gc.collect()
    assert [reference() for reference in dying] == [None] * 5


@pytest.mark.parametrize("op", [STEP, RESET])
@pytest.mark.parametrize("way", WAYS)
def test_an_env_that_has_raised_is_freed_when_it_is_replaced(way, op):
    """At once: not when a cycle of its exception and the frames is collected."""
    side = under_way(
        adapters(scripts=[["plain", "raises"]], resets=[["plain", "raises"]]), way=way
    )
    dying = weakref.ref(side.adapters.pop(1).env)
    side.envs.clear()
    gc.collect()
    side.do((op, [1]))
    assert [report["kind"] for report in side.reports] == ["fault"]
    side.block.forget = id
    side.block.prepare(Prepare(env_id=1, call=FactoryCall(None, {})))
    assert dying() is None


def test_a_step_holds_the_memory_that_it_writes_to():
    side = under_way(counting(1))
    step = side.block.slots[1].sinks[0].native
    assert type(step).__name__ == "Step"
    array = weakref.ref(side.slab.buffer)
    del side
    gc.collect()
    assert array() is not None
    del step
    gc.collect()
    assert array() is None


@pytest.mark.long
@pytest.mark.parametrize(
    ("observation", "action", "kind"),
    [("dict", "dict", GymnasiumAdapter), ("float32", "index", ListAdapter)],
)
def test_no_leak_for_any_results_of_envs(observation, action, kind):
    make = adapters(
        OBSERVATIONS[observation],
        ACTIONS[action],
        [()] * len(RESULTS),
        kind=kind,
    )
    sides = [under_way(make, way=way) for way in ("step", "loop")]
    watched = [
        *sides[0].envs,
        *sides[0].block.slots.values(),
        *sides[1].envs,
        *sides[1].block.slots.values(),
        np.ndarray,
        native.load().Step,
    ]
    process = psutil.Process()

    def turn(side: Side) -> None:
        for (name, change), env in zip(RESULTS.items(), side.envs, strict=True):
            env.script = [change] if name != "generator" else []
            env.resets = (
                [RESETS[name]] if name in RESETS and name != "generator" else []
            )
            env.num_steps = 9 if env.resets else 0
            env.seen.clear()
            env.kept.clear()
        for op in (STEP_RESET, RESET, STEP):
            side.command(op, list(side.adapters), TARGET if op == STEP else 0)
            side.serve()
        side.reports.clear()
        side.executed.clear()

    def turns(number: int) -> None:
        for _ in range(number):
            for side in sides:
                turn(side)
        gc.collect()

    def measure() -> np.ndarray:
        return np.array(
            [
                len(gc.get_objects()),
                sys.getallocatedblocks(),
                process.memory_info().rss,
            ]
        )

    turns(5)
    references = [*map(sys.getrefcount, watched)]
    growths, num_turns = [], scaled(4, full=40)
    for _ in range(3):
        before = measure()
        turns(num_turns)
        growths.append(measure() - before)
    assert (np.min(growths, axis=0) < num_turns * np.array([1, 100, 1 << 16])).all(), (
        f"a leak grows at every time; what else the process has does not: {growths}"
    )
    assert [*map(sys.getrefcount, watched)] == references


def test_fingerprints_tell_types_and_bits():
    assert fingerprint(np.int64(1)) != fingerprint(1)
    assert fingerprint(np.zeros(2)) != fingerprint(np.full(2, -0.0))
