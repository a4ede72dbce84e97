"""Infos belong to the right env, step and reset, or are dropped."""

from __future__ import annotations

import functools
import signal
import threading

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from envherd.executor import EnvError, ExecutorOptions, ParallelEnv, SerialEnv
from envherd.workers.infos import packer, unpack

pytestmark = pytest.mark.preloads()

NUM_ENVS = 3


class Telling(gymnasium.Env):
    """Ends every third step; every info has the step count, except the second step's, which is empty."""

    observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, what="plain"):
        self.what = what
        self.count = 0
        self.seeds = []
        self.reused = {"count": 0}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.count = 0
        return np.zeros(1, np.float32), {"fresh": True, "options": options}

    def step(self, action):
        self.count += 1
        self.reused["count"] = self.count
        info = {} if self.count == 2 else self.reused
        if self.what == "object" and info:
            info = {"count": self.count, "space": self.action_space}
        if self.what == "lock":
            info = {"fine": 1, "lock": threading.Lock()}
        return np.full(1, self.count, np.float32), 0.0, self.count == 3, False, info


class Ringing:
    """Sends SIGALRM to its process when it is unpickled."""

    def __reduce__(self):
        return signal.raise_signal, (signal.SIGALRM,)


def actions():
    return TensorDict({"action": torch.zeros(NUM_ENVS, dtype=torch.int64)}, [NUM_ENVS])


@pytest.fixture(params=["serial", "parallel"])
def make(request):
    kind = SerialEnv if request.param == "serial" else functools.partial(ParallelEnv, num_workers=2)

    def build(what="plain", **options):
        return kind(NUM_ENVS, functools.partial(Telling, what), seed=0, options=ExecutorOptions(**options))

    return build


class TellingOnce(Telling):
    """Raises in its second reset."""

    def reset(self, *, seed=None, options=None):
        if self.seeds:
            raise ValueError("no second episode")
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("kind", [SerialEnv, functools.partial(ParallelEnv, num_workers=2)])
def test_of_the_last_step_where_the_reset_after_it_raises(kind):
    with kind(NUM_ENVS, TellingOnce, options=ExecutorOptions(infos="plain")) as env:
        env.reset()
        for _ in range(2):
            env.step_and_maybe_reset(actions())
        with pytest.raises(EnvError, match="no second episode"):
            env.step_and_maybe_reset(actions())
        assert env.infos() == [{"count": 3}] * NUM_ENVS
        assert env.infos("root") == [{}] * NUM_ENVS


def test_of_steps_and_resets(make):
    with make(infos="plain") as env:
        env.reset(options={"level": 2})
        assert env.infos("root") == [{"fresh": True, "options": {"level": 2}}] * NUM_ENVS
        assert env.infos() == [{}] * NUM_ENVS
        env.step_and_maybe_reset(actions())
        assert env.infos() == [{"count": 1}] * NUM_ENVS
        assert env.infos("root") == [{}] * NUM_ENVS
        env.step_and_maybe_reset(actions())
        assert env.infos() == [{}] * NUM_ENVS
        env.step_and_maybe_reset(actions())
        assert env.infos() == [{"count": 3}] * NUM_ENVS
        assert env.infos("root") == [{"fresh": True, "options": None}] * NUM_ENVS


def test_of_a_rollout_they_are_those_of_its_latest_step(make):
    said = []
    with make(infos="plain") as env:
        env.reset()
        env.step(actions())
        env.rollout(
            5,
            break_when_any_done=False,
            auto_reset=False,
            callback=lambda env, _: said.append((env.infos()[0], env.infos("root")[0])),
        )
        assert env.infos() == [{"count": 3}] * NUM_ENVS
        assert env.infos("root") == [{}] * NUM_ENVS
    fresh = {"fresh": True, "options": None}
    counted = [{}, {"count": 3}, {"count": 1}, {}, {"count": 3}]
    assert said == list(zip(counted, [{}, fresh, {}, {}, {}], strict=True))


def test_of_a_partial_reset(make):
    with make(infos="plain") as env:
        env.reset()
        env.step(actions())
        env.reset(TensorDict({"_reset": torch.tensor([False, True, False])}, [NUM_ENVS]))
        assert env.infos() == [{"count": 1}, {}, {"count": 1}]
        assert env.infos("root") == [{}, {"fresh": True, "options": None}, {}]


def test_of_envs_received_one_by_one(make):
    with make(infos="plain") as env:
        env.reset()
        env.send(actions())
        for _ in range(NUM_ENVS):
            env_id = env.recv(1)["env_ids"].item()
            assert env.infos()[env_id] == {"count": 1}


def test_what_is_not_plain_is_left_out_or_pickled(make):
    with make("object", infos="plain") as env:
        env.reset()
        env.step(actions())
        assert env.infos() == [{"count": 1}] * NUM_ENVS
    with make("object", infos="pickle") as env:
        env.reset()
        env.step(actions())
        assert env.infos() == [{"count": 1, "space": gymnasium.spaces.Discrete(2)}] * NUM_ENVS


def test_what_cannot_be_pickled_is_left_out_and_named_once(make, caplog):
    with make("lock", infos="pickle") as env:
        env.reset()
        env.step(actions())
        env.step(actions())
        assert env.infos() == [{"fine": 1}] * NUM_ENVS
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == NUM_ENVS
    assert all("'lock' of its info is left out (TypeError: cannot pickle" in line for line in said)


def test_seeds_are_the_callers_alone_if_asked(make):
    with make(episode_seeds=False, infos="plain") as env:
        env.reset(seed=[5, None, 7])
        for _ in range(3):
            env.step_and_maybe_reset(actions())
        env.reset()
        assert env.get("seeds") == [[5, None, None], [None, None, None], [7, None, None]]


def test_what_a_signal_handler_raises_while_an_info_is_unpacked_is_raised():
    class TooLateError(Exception):
        pass

    def ring(*_):
        if is_armed:
            is_armed.clear()
            raise TooLateError

    is_armed = []
    before = signal.signal(signal.SIGALRM, ring)
    try:
        packed, left_out = packer("pickle")({"count": 1, "ringing": Ringing()})
        is_armed.append(True)
        with pytest.raises(TooLateError):
            unpack(packed, "pickle")
        assert unpack(packed, "pickle") == {"count": 1, "ringing": None}
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not left_out
