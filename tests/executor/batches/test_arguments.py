"""Wrong arguments are refused in the caller, with their name and the fix, before any effect."""

import functools
import importlib
import logging
import operator
import re
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from envherd import (
    ActionError,
    AsyncCollector,
    Collector,
    ExecutorOptions,
    FactoryError,
    ParallelEnv,
    RayRollouts,
    SerialEnv,
    progress,
    recommend,
)
from envherd.workers.testing import CountingEnv
from tests.envs.gymnasium_envs import Precise
from tests.executor.calls import ones as act
from tests.extras import needs


def seeded(seed, make):
    return make(1, CountingEnv, seed=seed)


NO_SEED = "seed failed: expected an integer of at least 0, or None, got "

#: These calls have wrong types, so they are hidden from the type checker.
collector: Any = Collector
async_collector: Any = AsyncCollector
CONSTRUCTORS = {
    "make_env first": (
        lambda make: make(CountingEnv, 4),
        FactoryError,
        r"the number of envs first, got <class .*CountingEnv.*Write \(4, make_env\)",
    ),
    "no make_env": (lambda make: make(4), FactoryError, "make_env failed"),
    "a float": (
        lambda make: make(2.0, CountingEnv),
        ValueError,
        r"num_envs failed: expected an int of at least 1, got 2\.0",
    ),
    "a list and a number": (
        lambda make: make([CountingEnv], 1),
        FactoryError,
        "expected the number of envs first",
    ),
    "no envs": (
        lambda make: make(0, CountingEnv),
        ValueError,
        "expected an int of at least 1, got 0",
    ),
    "a bool of envs": (
        lambda make: make(True, CountingEnv),  # noqa: FBT003  # it is what is wrong
        ValueError,
        "expected an int of at least 1, got True",
    ),
    "fewer factories": (
        lambda make: make(2, [CountingEnv]),
        ValueError,
        "expected 2 factories, one per env, got 1",
    ),
    "fewer env_kwargs": (
        lambda make: make(2, CountingEnv, env_kwargs=[{}]),
        ValueError,
        "expected 2 dicts, one per env, got 1",
    ),
    **{
        f"seed {seed!r}": (functools.partial(seeded, seed), ValueError, NO_SEED)
        for seed in (-1, "a", 1.5, True)
    },
    "num_workers": (
        lambda make: make(1, CountingEnv, num_workers=0),
        ValueError,
        "num_workers failed",
    ),
    "copy": (lambda make: make(1, CountingEnv, copy="no"), ValueError, "copy failed"),
    "options": (
        lambda make: make(1, CountingEnv, options={"poison": True}),
        TypeError,
        "options failed.*ExecutorOptions",
    ),
    "env_kwargs": (
        lambda make: make(1, CountingEnv, env_kwargs=3),
        TypeError,
        "env_kwargs failed",
    ),
    "a list of env_kwargs": (
        lambda make: make(1, CountingEnv, env_kwargs=[3]),
        TypeError,
        "env_kwargs failed",
    ),
    "device": (
        lambda make: make(1, CountingEnv, device="gpu"),
        ValueError,
        "device failed",
    ),
}


@pytest.mark.parametrize("make", [ParallelEnv, SerialEnv])
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_constructor_names_the_argument(make, name):
    call, error, text = CONSTRUCTORS[name]
    with pytest.raises(error, match=text):
        call(make)


METHODS = {
    "step of an array": (
        lambda env: env.step(np.zeros(2)),
        TypeError,
        r"step failed.*as_tensor.*envherd\.gymnasium",
    ),
    "step of a dict": (
        lambda env: env.step({"action": 0}),
        TypeError,
        "step failed: expected a batch as a TensorDict",
    ),
    "the fused step": (
        lambda env: env.step_and_maybe_reset([0, 0]),
        TypeError,
        "step_and_maybe_reset failed",
    ),
    "send": (lambda env: env.send(torch.zeros(2)), TypeError, "send failed"),
    "rand_action": (lambda env: env.rand_action(3), TypeError, "rand_action failed"),
    "reset of an array": (
        lambda env: env.reset(np.ones(2, bool)),
        TypeError,
        "reset failed",
    ),
    "seed of text": (
        lambda env: env.reset(seed="ab"),
        ValueError,
        "reset failed: expected seed",
    ),
    "a seed below 0": (
        lambda env: env.reset(seed=-1),
        ValueError,
        "reset failed: expected seed as an int of at least 0",
    ),
    "a float as seed": (
        lambda env: env.reset(seed=2.5),
        ValueError,
        "reset failed: expected seed",
    ),
    "list_of_kwargs": (
        lambda env: env.reset(list_of_kwargs=3),
        TypeError,
        "list_of_kwargs",
    ),
    "policy first": (
        lambda env: env.rollout(act, 3),
        TypeError,
        r"Write \(200, policy\)",
    ),
    "max_steps of text": (lambda env: env.rollout("3"), ValueError, "max_steps"),
    "a float of max_steps": (
        lambda env: env.rollout(1.5),
        ValueError,
        r"rollout failed: expected max_steps as an int of at least 1, got float 1\.5\.",
    ),
    "policy of text": (lambda env: env.rollout(3, "act"), TypeError, "policy"),
    "callback": (lambda env: env.rollout(3, callback=3), TypeError, "callback"),
    "break_when_any_done": (
        lambda env: env.rollout(3, break_when_any_done="no"),
        ValueError,
        "break_when_any_done",
    ),
    "out": (
        lambda env: env.rollout(3, out=3),
        TypeError,
        "expected out as a TensorDict",
    ),
    "primer": (
        lambda env: env.rollout(3, primer=3),
        TypeError,
        "expected primer as a TensorDict",
    ),
    "tensordict": (
        lambda env: env.rollout(3, auto_reset=False, tensordict=3),
        TypeError,
        "expected tensordict",
    ),
    "a root that a reset replaces": (
        lambda env: env.rollout(3, tensordict=env.current()),
        ValueError,
        "expected auto_reset=False with tensordict",
    ),
    "an out that is too short": (
        lambda env: env.rollout(6, out=TensorDict({}, [2, 4])),
        ValueError,
        r"expected out of at least 6 steps \(max_steps\), got 4\. Pass max_steps=4",
    ),
    "a primer of observations": (
        lambda env: env.rollout(3, primer=env.current().select("observation")),
        ValueError,
        "expected primer without the envs' own keys, got \\('observation',\\)",
    ),
    "a bool as seed": (
        lambda env: env.reset(seed=[True, 1]),
        ValueError,
        r"got True \(env 0\)",
    ),
    "a dict of seeds": (
        lambda env: env.reset(seed={0: 1, 1: 2}),
        ValueError,
        "expected seed as an int",
    ),
    "a set of seeds": (
        lambda env: env.reset(seed={1, 2}),
        ValueError,
        "expected seed as an int",
    ),
    "an empty list_of_kwargs": (
        lambda env: env.reset(list_of_kwargs=[]),
        ValueError,
        "expected 2 items in list_of_kwargs, got 0",
    ),
    "maybe_reset": (
        lambda env: env.send(act(env.current()), maybe_reset="no"),
        ValueError,
        "send failed.*maybe_reset",
    ),
    "with_root": (
        lambda env: env.recv(with_root="no"),
        ValueError,
        "recv failed.*with_root",
    ),
    "too few values": (
        lambda env: env.set("mark", [1, 2, 3]),
        ValueError,
        r"set failed: expected a list of 2 values, one for each env, got 3 values\. .* pass \[value\] \* 2",
    ),
    "too few values of some envs": (
        lambda env: env.set("mark", [1, 2], env_ids=[0]),
        ValueError,
        "expected a list of 1 values",
    ),
    "infos that are dropped": (
        lambda env: env.infos(),
        ValueError,
        r"infos failed: expected options=ExecutorOptions\(infos=\"plain\"\)",
    ),
    "min_envs": (lambda env: env.recv("a"), ValueError, "min_envs"),
    "timeout_s": (lambda env: env.recv(1, -1), ValueError, "timeout_s"),
    "call": (lambda env: env.call(3), TypeError, "call failed"),
    "get": (lambda env: env.get(None), TypeError, "get failed"),
    "set": (lambda env: env.set(3, 4), TypeError, "set failed"),
    "worker_output": (
        lambda env: env.worker_output(-1),
        ValueError,
        "expected worker_id as an int of at least 0, got -1",
    ),
    "infos": (lambda env: env.infos("first"), ValueError, "infos failed"),
    "a state": (
        lambda env: env.load_state_dict(3),
        ValueError,
        "load_state_dict failed",
    ),
    "rows of a primer": (
        lambda env: env.rollout(3, primer=TensorDict({"h": torch.zeros(3)}, [3])),
        ValueError,
        "rollout failed: expected primer with a row for each of 2 envs",
    ),
    "frames_per_batch": (
        lambda env: collector(env, frames_per_batch="8"),
        ValueError,
        "frames_per_batch",
    ),
    "a bool as a number": (
        lambda env: collector(env, frames_per_batch=True),
        ValueError,
        "got bool True",
    ),
    "a collector's primer": (
        lambda env: collector(env, frames_per_batch=8, primer=42),
        TypeError,
        "Collector failed: expected primer as a TensorDict",
    ),
    "policy_device": (
        lambda env: collector(env, frames_per_batch=8, policy_device="gpu"),
        ValueError,
        "Collector failed: expected policy_device as a device such as 'cpu'",
    ),
    "storing_device": (
        lambda env: collector(env, frames_per_batch=8, storing_device=1.5),
        ValueError,
        "Collector failed: expected storing_device as a device such as 'cpu'",
    ),
    "total_frames": (
        lambda env: collector(env, frames_per_batch=8, total_frames="8"),
        ValueError,
        "total_frames",
    ),
    "a collector's policy": (
        lambda env: collector(env, "act", frames_per_batch=8),
        TypeError,
        "policy",
    ),
    "a collector's order": (
        lambda env: collector(act, env, frames_per_batch=8),
        TypeError,
        r"Collector\(env, policy\)",
    ),
    "another's order": (
        lambda env: async_collector(act, env, frames_per_batch=8),
        TypeError,
        "expected an executor first",
    ),
    "a policy_device that is not there": (
        lambda env: collector(env, act, frames_per_batch=8, policy_device="cuda:99"),
        ValueError,
        "expected policy_device as a device of this machine, got 'cuda:99'",
    ),
    "no steps": (lambda env: env.rollout(0), ValueError, "at least 1"),
    "nothing to receive": (
        lambda env: env.recv(),
        ValueError,
        "recv failed: expected envs that were sent, got none",
    ),
    "an executor in the place of a function": (
        lambda env: env(),
        TypeError,
        r"envherd\.torchrl, SubprocVecEnv",
    ),
    "an attribute that there is nowhere": (
        lambda env: env.qqq,
        AttributeError,
        r"^'SerialEnv' object has no attribute 'qqq'$",
    ),
    **{
        f"the keyword {name}": (
            operator.methodcaller("rollout", 3, **{name: 1}),
            TypeError,
            rf"rollout failed: it has no argument '{name}'\. Did you mean {meant}\?",
        )
        for name, meant in (
            ("break_when_done", "break_when_any_done"),
            ("steps", "max_steps"),
        )
    },
    **{
        f"the attribute {name}": (
            operator.attrgetter(name),
            AttributeError,
            re.escape(f"'SerialEnv' object has no attribute {name!r}. {instead}"),
        )
        for name, instead in (
            (
                "action_space",
                "Use action_spec. Spaces are attributes of AsyncVectorEnv",
            ),
            ("get_attr", "Use get(name)."),
            ("env_method", "Use call(name, ...)."),
            ("step_async", "Use send(td)."),
        )
    },
}


def test_a_policy_that_takes_tensors_gets_a_note_and_keeps_its_error(env):
    note = r"in_keys=\['observation'\], out_keys=\['action'\]"
    net: Any = torch.nn.Sequential(torch.nn.Linear(3, 4))

    def collect(kind, **options):
        with kind(env, net, frames_per_batch=4, close_env=False, **options) as one:
            one.collect()

    for call in (
        lambda: env.rollout(3, net),
        lambda: collect(collector),
        lambda: collect(async_collector),
        lambda: collect(async_collector, in_background=1),
    ):
        with pytest.raises(TypeError, match=r"torch\.nn\.linear") as caught:
            call()
        assert [bool(re.search(note, text)) for text in caught.value.__notes__] == [
            True
        ]
    env.reset()


@pytest.mark.parametrize(
    "error", [TypeError("mine"), ValueError("a TensorDict"), AttributeError("mine")]
)
def test_other_errors_of_a_policy_are_unchanged(env, error):
    def policy(_root):
        raise error

    with pytest.raises(type(error)) as caught:
        env.rollout(3, policy)
    assert caught.value is error
    assert not hasattr(error, "__notes__")


@pytest.fixture(scope="module")
def env():
    with SerialEnv(2, functools.partial(CountingEnv, 9), seed=0) as env:
        env.reset()
        yield env


@pytest.mark.parametrize("name", METHODS)
def test_a_method_names_the_argument_and_changes_nothing(env, name):
    call, error, text = METHODS[name]
    before = env.current(), env.statistics().env_steps
    with pytest.raises(error, match=text):
        call(env)
    assert (env.current() == before[0]).all()
    assert env.statistics().env_steps == before[1]


def test_numpy_integers_are_numbers():
    with SerialEnv(np.int64(2), CountingEnv, num_workers=np.int64(1)) as env:
        assert env.rollout(np.int32(1)).shape == (2, 1)


def test_an_unknown_attribute_is_an_ordinary_error_that_suggests_the_right_one(env):
    with pytest.raises(
        AttributeError,
        match=r"has no attribute 'action_spek'\. Did you mean action_spec\?$",
    ) as caught:
        env.action_spek  # noqa: B018
    # From a name python would suggest it once more.
    assert (caught.value.name, caught.value.obj) == (None, env)


def test_a_rollout_that_is_cut_short_says_so_each_time(caplog):
    with (
        SerialEnv(2, functools.partial(CountingEnv, 4), seed=0) as env,
        caplog.at_level(logging.WARNING, "envherd"),
    ):
        assert env.rollout(9, act, break_when_any_done=True).shape == (2, 4)
        assert env.rollout(9, act, break_when_any_done=False).shape == (2, 9)
        assert env.rollout(4, act).shape == (2, 4)
        assert caplog.messages == []
        for _ in range(2):
            assert env.rollout(9, act).shape == (2, 4)
        assert len(caplog.messages) == 2
        for message in caplog.messages:
            assert "4 of 9 steps" in message
            assert "break_when_any_done=False" in message


@pytest.mark.parametrize("make", [SerialEnv, ParallelEnv])
def test_the_message_says_where_a_factorys_arguments_come_from(make):
    def needs_one(index):
        return CountingEnv(index)

    with pytest.raises(
        FactoryError,
        match=r"missing 1 required .*\(env 0, .*get no arguments but those of env_kwargs=",
    ):
        make(1, needs_one)
    with pytest.raises(
        FactoryError, match=r"TypeError: of another kind.*phase build\)\.$"
    ):
        make(1, raises_type_error)


def raises_type_error():
    raise TypeError("of another kind")


@pytest.mark.parametrize(
    ("shape", "advice"),
    [
        ((2, 2), r"action\.argmax\(-1\)"),
        ((2, 1), r"action\.squeeze\(-1\)"),
        ((2, 3), "stepped"),
    ],
)
def test_actions_of_another_shape_come_with_advice(shape, advice):
    with SerialEnv(2, Cut) as env:
        td = env.reset().set("action", torch.zeros(shape, dtype=torch.int64))
        with pytest.raises(
            ActionError, match=rf"expected shape \(2,\), got shape .*{advice}\.$"
        ):
            env.step(td)
        with pytest.raises(
            ActionError,
            match=r"got 7 at \(1,\).*ExecutorOptions\(check_actions=\.\.\.\)",
        ):
            env.step(td.set("action", torch.tensor([0, 7])))


class Cut(Precise):
    action_space = gymnasium.spaces.Discrete(2)


@pytest.mark.parametrize("kind", [Collector, AsyncCollector])
def test_a_collector_knows_how_many_batches_it_has(env, kind):
    with kind(
        env, act, frames_per_batch=8, total_frames=20, close_env=False
    ) as collector:
        assert len(collector) == len(list(collector)) == 3
    endless = kind(env, act, frames_per_batch=8, close_env=False)
    assert endless
    with pytest.raises(TypeError, match=r"len failed: .* never stops"):
        len(endless)


def meant(path, name, advice):
    """Return a row of the table: what is called, with a keyword that it lacks, and what the error says then."""
    kind = path.rpartition(".")[2]
    sentence = advice if " " in advice else f"Did you mean {advice}?"
    return path, {name: 4}, f"{kind} failed: it has no argument '{name}'. {sentence}"


GYM, ZOO, SB3 = (f"envherd.{name}" for name in ("gymnasium", "pettingzoo", "sb3"))


@needs("sb3", "pettingzoo")
@pytest.mark.parametrize(
    ("path", "keywords", "message"),
    [
        *(
            meant(f"envherd.{kind}", name, advice)
            for kind in ("ParallelEnv", "SerialEnv")
            for name, advice in (
                ("n_envs", "num_envs"),
                ("create_env_fn", "make_env"),
                ("num_env", "num_envs"),
                (
                    "step_timeout_s",
                    "It is an option: options=ExecutorOptions(step_timeout_s=...).",
                ),
                ("frobnicate", "It takes num_envs, make_env,"),
            )
        ),
        meant("envherd.Collector", "frame_per_batch", "frames_per_batch"),
        meant("envherd.Collector", "batch_size", "frames_per_batch"),
        meant("envherd.Collector", "device", "policy_device"),
        meant("envherd.AsyncCollector", "min_envs", "min_batch"),
        meant("envherd.AsyncCollector", "max_batches", "max_batch"),
        meant("envherd.ExecutorOptions", "step_timeout", "step_timeout_s"),
        meant("envherd.ExecutorOptions", "on_worker_lost", "on_worker_loss"),
        meant(f"{GYM}.AsyncVectorEnv", "n_workers", "num_workers"),
        meant(f"{GYM}.AsyncVectorEnv", "autoreset", "autoreset_mode"),
        meant(f"{ZOO}.ParallelVectorEnv", "num_cpus", "num_workers"),
        meant(f"{ZOO}.AgentRowsEnv", "option", "options"),
        meant(f"{SB3}.SubprocVecEnv", "n_processes", "num_workers"),
        *(
            (
                path,
                {"options": {"poison": True}},
                "options failed: expected an ExecutorOptions",
            )
            for path in (
                f"{GYM}.AsyncVectorEnv",
                f"{SB3}.SubprocVecEnv",
            )
        ),
    ],
)
def test_a_wrong_keyword_names_the_one_that_is_meant_or_its_type(
    path, keywords, message
):
    module, _, kind = path.rpartition(".")
    given = [] if module == "envherd" else [[CountingEnv]]
    with pytest.raises(TypeError, match=re.escape(message)):
        getattr(importlib.import_module(module), kind)(*given, **keywords)


@needs("ray")
@pytest.mark.parametrize(
    ("call", "keyword", "advice"),
    [
        (RayRollouts, "node_timeout_s", "Ray itself"),
        (RayRollouts.stream, "overlap", "Call rollout"),
        (recommend, "machine", "Call it on that machine"),
        (recommend, "probe_bytes", "Limit the memory"),
    ],
)
def test_a_keyword_that_is_gone_says_what_to_do(call, keyword, advice):
    with pytest.raises(ValueError, match=f"it has no argument '{keyword}'. {advice}"):
        call(None, **{keyword: 1})


def test_executors_of_one_large_batch_draw_different_random_actions():
    drawn = []
    for first in (0, 0, 8):
        with SerialEnv(
            8, CountingEnv, seed=0, options=ExecutorOptions(first_env_id=first)
        ) as env:
            drawn.append(env.rand_action()["action"].tolist())
    assert drawn[0] == drawn[1] != drawn[2]


@needs("progress")
def test_bars_are_shown_for_what_takes_long(capsys):
    with progress(after_s=0), ParallelEnv(2, CountingEnv, num_workers=1) as env:
        for _ in Collector(env, frames_per_batch=4, total_frames=8, close_env=False):
            pass
    shown = capsys.readouterr().err
    for what in ("workers ready", "rollout", "frames collected"):
        assert what in shown
    with SerialEnv(1, CountingEnv) as env:
        env.rollout(3)
    assert capsys.readouterr().err == ""
    with pytest.raises(ValueError, match="progress failed"), progress(after_s=-1):
        pass


def test_a_start_reports_how_many_workers_are_ready(caplog):
    with (
        caplog.at_level("DEBUG", "envherd"),
        ParallelEnv(3, CountingEnv, num_workers=2),
    ):
        found = [
            (record.num_ready, record.num_workers)
            for record in caplog.records
            if hasattr(record, "num_ready")
        ]
    assert found == [(0, 2), (1, 2), (2, 2)]
    assert "start: 1 of 2 workers are ready" in caplog.text
