"""`rebuild`: another task takes the place of an env, in the same process."""

import contextlib
import functools
import gc
import re
import signal
import threading
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from envherd.executor import (
    AsyncCollector,
    Collector,
    ExecutorOptions,
    FactoryError,
    ParallelEnv,
    SerialEnv,
    SpecError,
    WorkerTimeout,
)
from envherd.gymnasium import AsyncVectorEnv
from envherd.workers.testing import CountingEnv
from tests.envs.breaking_envs import FaultyEnv
from tests.executor.calls import TWO_WORKERS, begun, both
from tests.executor.drives import DRIVES, rolled
from tests.faults.children import files_left

ACTIONS = TensorDict({"action": torch.ones(4, dtype=torch.int64)}, [4])
TASKS = [{"length": length} for length in (9, 3, 9, 4)]
HOW: dict[str, Any] = {"make_env": CountingEnv, "seed": 5}
WAYS: dict[str, Any] = {
    "fused": lambda env: env.step_and_maybe_reset(ACTIONS.clone())[0],
    "step": lambda env: env.step(ACTIONS.clone()),
    "rollout": lambda env: env.rollout(
        1, lambda _: ACTIONS.clone(), auto_reset=False, break_when_any_done=False
    )[:, 0],
    "sent": lambda env: env.recv(4),
}


@both
@pytest.mark.parametrize(
    "options", [{}, {"env_threads": True}, {"infos": "plain"}, {"isolate_rng": True}]
)
def test_the_data_are_those_of_an_executor_that_was_made_so(
    make: Any, options: Any
) -> None:
    how = {**HOW, "options": ExecutorOptions(**options)}
    with (
        make(4, env_kwargs={"length": 9}, **how) as env,
        make(4, env_kwargs=TASKS, **how) as made,
    ):
        for drive in DRIVES:
            drive(env, 7)  # ends in the middle of episodes
            for ids, call in (
                ([1, 3], {"factories": CountingEnv, "env_kwargs": TASKS[1::2]}),
                ([0, 2], {}),
                (np.zeros(4, bool), {"factories": FaultyEnv, "env_kwargs": {}}),
            ):
                env.rebuild(ids, **call)
            made.set_seed(5)
            assert all(
                (one == other).all()
                for one, other in zip(drive(env, 18), drive(made, 18), strict=True)
            )
            env.rebuild(env_kwargs={"length": 9})


@both
@pytest.mark.parametrize("way", WAYS)
def test_an_episode_that_is_broken_off_ends_with_a_truncated_row(
    make: Any, way: str
) -> None:
    with begun(make(4, env_kwargs={"length": 9}, **HOW)) as env:
        before = env.step_and_maybe_reset(ACTIONS.clone())[1]["observation"]
        if way == "sent":
            env.send(ACTIONS.clone())
        env.rebuild([1, 3], env_kwargs=TASKS[1::2])
        data = WAYS[way](env)
        rows = data[data.get("env_ids", torch.arange(4)).argsort()]["next"]
        is_cut = (
            rows["truncated"]
            & rows["done"]
            & ~rows["terminated"]
            & (rows["reward"] == 0)
        )
        assert is_cut.flatten().tolist() == [False, True, False, True]
        assert torch.equal(rows["observation"][[1, 3]], before[[1, 3]])


@both
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            {"factories": functools.partial(CountingEnv, size=2)},
            SpecError,
            r"rebuild failed: .*pixels",
        ),
        (
            {"factories": functools.partial(FaultyEnv, "value_error", at="construct")},
            FactoryError,
            "the factory raised",
        ),
        ({"factories": CountingEnv()}, FactoryError, "got an env"),
        ({"factories": [CountingEnv] * 3}, ValueError, "expected 2 factories"),
        (
            {"env_kwargs": {"lengths": 3}},
            FactoryError,
            r"the factory raised TypeError: .*lengths",
        ),
        ({"env_kwargs": [{}] * 3}, ValueError, "expected 2 dicts"),
    ],
)
def test_a_refused_rebuild_keeps_the_tasks(
    make: Any, call: Any, error: Any, message: str
) -> None:
    with (
        begun(make(4, env_kwargs=TASKS, **HOW)) as env,
        make(4, env_kwargs=TASKS, **HOW) as made,
    ):
        with pytest.raises(error, match=message):
            env.rebuild([1, 2], **call)
        env.set_seed(5)
        assert all(
            (one == other).all()
            for one, other in zip(rolled(env, 18), rolled(made, 18), strict=True)
        )


@both
@pytest.mark.parametrize("fault", ["value_error", "system_exit"])
def test_an_env_that_cannot_close_is_replaced(make: Any, fault: str) -> None:
    with begun(
        make(4, FaultyEnv, env_kwargs={"fault": fault, "at": "close"}, seed=5)
    ) as env:
        env.rebuild([1, 3], factories=CountingEnv, env_kwargs=TASKS[1::2])
        assert (
            env.rollout(4, break_when_any_done=False)["next", "done"]
            .any(1)
            .flatten()
            .tolist()
            == [False, True] * 2
        )


@pytest.mark.parametrize(
    "call",
    [
        {"factories": functools.partial(print, threading.Lock())},
        {"env_kwargs": {"size": threading.Lock()}},
    ],
)
def test_unpicklable_factory_is_refused_before_anything_changes(call: Any) -> None:
    with begun(TWO_WORKERS(4, env_kwargs=TASKS, **HOW)) as env:
        with pytest.raises(
            FactoryError,
            match=r"lock.* cannot be pickled|can be pickled, got a _thread.lock",
        ):
            env.rebuild([1, 2], **call)
        assert not env.step(ACTIONS.clone())["next", "done"].any()


def test_a_rebuild_needs_no_room_for_other_workers() -> None:
    with ParallelEnv(
        16, CountingEnv, seed=0, options=ExecutorOptions(alone=True)
    ) as env:
        with files_left(20):
            env.rebuild(env_kwargs={"length": 2})
        assert (
            env.rollout(9, break_when_any_done=False)["observation"][..., 1].max() == 1
        )


@pytest.mark.parametrize("kind", [Collector, AsyncCollector])
def test_collectors_go_on_with_the_new_task(kind: Any) -> None:
    with (
        TWO_WORKERS(4, env_kwargs={"length": 9}, **HOW) as env,
        kind(env, frames_per_batch=16) as collector,
    ):
        collector.collect()
        env.rebuild(env_kwargs={"length": 2})
        # An env that is slow has its row from before in a later batch.
        assert any(
            collector.collect()["observation"][..., 1].max() == 1 for _ in range(50)
        )


@pytest.mark.parametrize("mode", [None, "NextStep", "SameStep"])
def test_facades_build_the_new_env_as_their_own(mode: str | None) -> None:
    from envherd.sb3 import SubprocVecEnv  # not for workers, which import this module

    limited = [
        functools.partial(gymnasium.make, "CartPole-v1", max_episode_steps=limit)
        for limit in (50, 3)
    ]
    envs: Any = (
        AsyncVectorEnv([limited[0]] * 2, autoreset_mode=mode)
        if mode
        else SubprocVecEnv([limited[0]] * 2)
    )
    with envs.executor:
        envs.reset()
        envs.executor.rebuild([1], factories=limited[1])
        for is_over in (
            True,
            False,
            False,
            mode != "NextStep",
            mode == "NextStep",
            False,
        ):
            assert envs.step(np.zeros(2, int))[3 if mode else 2].tolist()[1] is is_over


class Level:
    """What a task is built from."""


class LevelEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self, level: Any) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        vars(self).update(level=level, level_id=id(level))

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {"score": 1.0}

    def num_levels(self) -> int:
        return sum(isinstance(one, Level) for one in gc.get_objects())


def test_arguments_of_former_tasks_are_freed() -> None:
    levels: Any = weakref.WeakSet()
    with SerialEnv(
        1,
        LevelEnv,
        env_kwargs={"level": Level()},
        options=ExecutorOptions(infos={"score": int}),
    ) as env:
        for _ in range(9):
            levels.add(level := Level())
            env.rebuild(env_kwargs={"level": level})
        assert len(levels) < 4


def test_a_copy_frees_the_factory_of_its_source() -> None:
    with begun(
        ParallelEnv(2, functools.partial(LevelEnv, Level()), num_workers=2)
    ) as env:
        env.branch(0, [1])
        env.rebuild(factories=functools.partial(LevelEnv, [Level()]))
        assert env.call("num_levels") == [1, 1]


def _heavy(length: int, level: Any = None) -> CountingEnv:  # its size counts
    env: Any = CountingEnv(length)
    env.ballast = np.ones(60 << 17)
    return env


def test_forty_tasks_need_the_memory_of_four() -> None:
    with ParallelEnv(4, _heavy, num_workers=4, env_kwargs={"length": 4}, seed=0) as env:
        peaks = []
        for task in range(10):
            env.step(env.reset().update(ACTIONS))
            files = [Path(f"/proc/{pid}/status").read_text() for pid in env.call("pid")]
            # In kB.
            peaks.append(
                [int(re.findall(r"VmHWM:\s+(\d+)", text)[0]) for text in files]
            )
            levels = [
                functools.partial(_heavy, level=np.full(3 << 17, task + i))
                for i in range(4)
            ]
            env.rebuild(
                factories=levels,
                env_kwargs=[{"length": 5 + task + i} for i in range(4)],
            )
        # A second env in memory would take 60 MB; what the allocator keeps grows for three tasks, by 20 MB.
        # A level (3 MB) that were kept at each later rebuild would take 18 MB.
        assert (peaks[-1] < np.add([peaks[0], peaks[3]], [[45_000], [9_000]])).all()


@both
def test_envs_share_their_factory_after_former_tasks_of_another(make: Any) -> None:
    with make(6, functools.partial(LevelEnv, Level())) as env:
        for level in range(3):
            env.rebuild([0], factories=functools.partial(LevelEnv, level))
        env.rebuild([1])
        assert len({*env.get("level_id")[1:3]}) == 1


def _broken(built: list[Any], at_close: Any) -> Any:
    built.append(CountingEnv(9))
    if len(built) == 1:
        vars(built[0]).update(
            reset=Mock(side_effect=ValueError),
            close=Mock(side_effect=at_close),
        )
    return built[-1]


@pytest.mark.parametrize(
    ("make", "at_close", "then"),
    [
        (SerialEnv, [KeyboardInterrupt, None], contextlib.nullcontext()),
        (ParallelEnv, GeneratorExit, contextlib.nullcontext()),
        pytest.param(
            ParallelEnv,
            signal.pause,
            pytest.raises(WorkerTimeout, match="in reset of env 0"),
            marks=pytest.mark.broken_pool,
        ),
    ],
)
def test_an_env_whose_reset_and_close_have_raised_is_replaced(
    make: Any, at_close: Any, then: Any
) -> None:
    with make(
        1,
        functools.partial(_broken, [], at_close),
        options=ExecutorOptions(on_env_error="interrupt", reset_timeout_s=3),
    ) as env:
        with contextlib.suppress(KeyboardInterrupt, WorkerTimeout):
            env.reset()
        with then:
            env.reset()
        assert env.statistics().env_errors == 1
