"""An executor is used by one caller at a time, closed once, and never after."""

import copy
import functools
import gc
import logging
import pickle
import weakref

import pytest
import torch

from envherd.executor import (
    Busy,
    Closed,
    Collector,
    ExecutorOptions,
    ParallelEnv,
    ResetNeeded,
    SerialEnv,
)
from envherd.workers.testing import CountingEnv
from tests.envs.counting_envs import GlobalRandomEnv
from tests.executor.calls import begun, both, ones

CALLS = {
    "reset": lambda env: env.reset(),
    "step": lambda env: env.step(env.rand_action()),
    "step_and_maybe_reset": lambda env: env.step_and_maybe_reset(env.rand_action()),
    "rollout": lambda env: env.rollout(2),
    "send": lambda env: env.send(env.rand_action()),
    "recv": lambda env: env.recv(),
    "current": lambda env: env.current(),
    "set_seed": lambda env: env.set_seed(1),
    "call": lambda env: env.call("episode_length"),
    "get": lambda env: env.get("length"),
    "set": lambda env: env.set("length", 1),
    "render": lambda env: env.render(),
    "state_dict": lambda env: env.state_dict(),
    "statistics": lambda env: env.statistics(),
}


@both
def test_every_call_after_close_is_closed(make):
    env = make(2, CountingEnv)
    env.reset()
    env.close()
    env.close()
    assert env.is_closed
    for name, call in CALLS.items():
        with pytest.raises(
            Closed, match=f"({name}|rand_action) failed: this executor is closed"
        ):
            call(env)
    with pytest.raises(Closed, match="collect failed: this executor is closed"):
        Collector(env, frames_per_batch=4, close_env=False).collect()


@both
def test_closing_needs_no_reset_and_no_with(make):
    env = make(2, CountingEnv)
    del env


@both
@pytest.mark.parametrize("act", [pickle.dumps, copy.deepcopy, copy.copy])
def test_a_live_executor_is_not_pickled_and_not_harmed(make, act):
    with make(2, CountingEnv) as env:
        with pytest.raises(TypeError, match="Pickle its factories instead"):
            act(env)
        assert env.reset()["observation"].shape == (2, 3)


@both
def test_step_with_an_ended_env_steps_no_env(make):
    with begun(
        make(2, [functools.partial(CountingEnv, 1), functools.partial(CountingEnv, 9)])
    ) as env:
        env.step(env.rand_action())
        with pytest.raises(ResetNeeded, match=r"envs \[0\]"):
            env.step(env.rand_action())
        assert env.statistics().steps_per_env == (1, 1)


@both
def test_pending_envs_are_busy(make):
    with begun(make(2, functools.partial(CountingEnv, 99))) as env:
        env.send(env.rand_action())
        for name in (
            "reset",
            "step",
            "step_and_maybe_reset",
            "rollout",
            "send",
            "current",
            "set_seed",
        ):
            with pytest.raises(Busy, match="recv"):
                CALLS[name](env)
        assert sorted(env.recv()["env_ids"].tolist()) == [0, 1]
        with pytest.raises(ValueError, match="expected envs that were sent, got none"):
            env.recv()


@both
def test_attributes_and_methods(make):
    with begun(make(3, functools.partial(CountingEnv, 99))) as env:
        env.set("length", [5, 6, 7])
        assert env.get("length") == [5, 6, 7]
        assert env.get("length", env_ids=[2, 0]) == [7, 5]
        assert env.call("episode_length", env_ids=[1]) == [6]
        env.set("length", 4, env_ids=[1])
        assert env.get("length") == [5, 4, 7]
        assert [picture.shape for picture in env.render()] == [(4, 6, 3)] * 3
        env.step(env.rand_action())
        state = env.state_dict()
        assert state["env2"]["num_steps"] == 1
        state["env2"]["num_steps"] = 3
        env.load_state_dict(state)
        assert env.get("num_steps") == [1, 1, 3]


@both
def test_states_alone_can_be_loaded_and_refused_ones_load_nothing(make):
    with make(2, CountingEnv, seed=0) as env:
        states = {f"env{i}": {"seed": 4, "num_steps": 1} for i in range(2)}
        env.load_state_dict(states)
        assert not env.current()["done"].any()
        assert (
            env.step(ones(env.current()))["next", "observation"].tolist()
            == [[4, 2, 1]] * 2
        )
        whole = env.state_dict()
        wrong = {
            **whole,
            "executor": {
                **whole["executor"],
                "roots": [{"observation": torch.zeros(2)}] * 2,
            },
        }
        for refused in (
            {"env0": states["env0"]},
            wrong,
            {**whole, "executor": {"roots": [], "ended": []}},
        ):
            with pytest.raises(ValueError, match="load_state_dict failed: expected"):
                env.load_state_dict(refused)
        assert (
            env.step(ones(env.current()))["next", "observation"].tolist()
            == [[4, 3, 1]] * 2
        )
        env.send(ones(env.current()))
        for refused in (env.state_dict, lambda: env.load_state_dict(states)):
            with pytest.raises(Busy):
                refused()
        env.recv()


@both
def test_missing_attribute_leaves_all_envs_usable(make):
    from envherd.executor import EnvError

    with make(2, CountingEnv) as env:
        for ask in (
            lambda: env.get("nothing"),
            lambda: env.call("nothing"),
            lambda: env.call("state_dict", 1),
        ):
            with pytest.raises(EnvError):
                ask()
        assert env.reset()["observation"].shape == (2, 3)


@both
def test_values_that_are_not_plain_are_refused(make):
    from envherd.executor import EnvError

    with make(1, CountingEnv) as env, pytest.raises(EnvError, match='infos="pickle"'):
        env.get("episode_length")
    with make(1, CountingEnv, options=ExecutorOptions(infos="pickle")) as env:
        assert env.get("spec")[0] == env.spec


@both
def test_global_generators_are_noticed_once(make, caplog):
    with (
        caplog.at_level(logging.WARNING, "envherd"),
        make(1, GlobalRandomEnv, seed=0) as env,
    ):
        env.rollout(6, break_when_any_done=False)
        env.rollout(6, break_when_any_done=False)
    noticed = [
        record for record in caplog.records if "global generators" in record.message
    ]
    assert 1 <= len(noticed) <= 2  # in the first reset, in the first step


@pytest.mark.slow
def test_isolated_generators_do_not_depend_on_the_worker():
    options = ExecutorOptions(isolate_rng=True)
    data = []
    for make, num_workers in ((SerialEnv, None), (ParallelEnv, 1), (ParallelEnv, 3)):
        with make(
            3, GlobalRandomEnv, num_workers=num_workers, seed=5, options=options
        ) as env:
            data.append(
                env.rollout(
                    9, lambda td: td.set("action", torch.zeros(3, dtype=torch.int64))
                )
            )
    assert (data[0] == data[1]).all()
    assert (data[0] == data[2]).all()


@both
def test_isolated_generators_begin_anew_with_a_root_seed(make):
    with make(2, GlobalRandomEnv, options=ExecutorOptions(isolate_rng=True)) as env:
        draws = []
        for _ in range(2):
            env.set_seed(5)
            draws.append(
                env.rollout(
                    3, lambda td: td.set("action", torch.zeros(2, dtype=torch.int64))
                )["draws"]
            )
    assert torch.equal(*draws)


def test_the_caller_keeps_its_generators():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    with SerialEnv(2, CountingEnv, seed=0):
        assert torch.rand(1) == expected


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["capture", "inherit"])
def test_worker_output_is_captured_or_passed_on(capture, capfd):
    from tests.envs.counting_envs import ChattyEnv

    options = ExecutorOptions(worker_output=capture)
    with begun(
        ParallelEnv(2, functools.partial(ChattyEnv, 10), num_workers=2, options=options)
    ) as env:
        env.step(env.rand_action())
        kept = env.worker_output(1)
    printed = capfd.readouterr().out
    assert ("xxxxxxxxx" in kept) == (capture == "capture")
    assert ("xxxxxxxxx" in printed) == (capture == "inherit")


def test_a_closed_executor_is_freed_with_what_its_factory_holds():
    class Held:
        pass

    held = Held()
    env = SerialEnv(1, lambda held=held: CountingEnv(4))
    gone = weakref.ref(held), weakref.ref(env.engine)
    env.rollout(2)
    env.close()
    del env, held
    gc.collect()
    assert [one() for one in gone] == [None, None]
