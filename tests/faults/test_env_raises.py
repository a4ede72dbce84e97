"""An exception of an env names that env in the caller; its worker and all other envs continue."""

import functools

import pytest
import torch

from envherd.executor import EnvError, FactoryError, ParallelEnv, SerialEnv
from envherd.workers.testing import CountingEnv, FaultyEnv
from envherd.workers.testing.faults import BAD_OBSERVATIONS, EXCEPTIONS

NUM_ENVS = 4
VICTIMS = [0, 2, 3]


def factories(victim, **fault):
    make = [CountingEnv] * NUM_ENVS
    make[victim] = functools.partial(FaultyEnv, **fault)
    return [functools.partial(one, length=1_000_000) if one is CountingEnv else one for one in make]


def step(env, td):
    td["action"] = torch.ones(NUM_ENVS, dtype=torch.int64)
    return env.step_and_maybe_reset(td)[1]


def counters(td):
    return [int(td[i]["observation"][1]) for i in range(NUM_ENVS)]


@pytest.mark.slow
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_step_that_raises_ends_one_env_alone(victim):
    with ParallelEnv(NUM_ENVS, factories(victim, fault="value_error"), num_workers=2, seed=0) as env:
        root = step(env, env.reset())
        with pytest.raises(EnvError, match=rf"step failed: the env raised ValueError: .*\(env {victim}, ") as caught:
            step(env, root)
        assert "Traceback" in str(caught.value.__cause__)
        assert caught.value.env_ids == (victim,)
        partial = caught.value.partial
        assert counters(partial) == [2 if i != victim else 1 for i in range(NUM_ENVS)]
        mask = torch.zeros(NUM_ENVS, dtype=torch.bool)
        mask[victim] = True
        root = env.reset(env.rand_action().set("_reset", mask))
        assert counters(root) == [2 if i != victim else 0 for i in range(NUM_ENVS)]
        assert counters(step(env, root)) == [3 if i != victim else 1 for i in range(NUM_ENVS)]
        assert env.statistics().env_errors == 1


@pytest.mark.slow
@pytest.mark.parametrize("fault", EXCEPTIONS)
@pytest.mark.parametrize("at", ["reset", "step"])
def test_whatever_it_raises_the_worker_goes_on(fault, at):
    make = factories(1, fault=fault, at=at, episode=1)
    with ParallelEnv(NUM_ENVS, make, num_workers=2, seed=0) as env:
        step(env, env.reset())
        pids = [worker.pid for worker in env.statistics().workers]
        with pytest.raises(EnvError) as caught:
            step(env, step(env, env.reset()))
        assert caught.value.context["phase"] == at
        assert caught.value.env_ids == (1,)
        assert [worker.pid for worker in env.statistics().workers] == pids


@pytest.mark.slow
@pytest.mark.parametrize("fault", BAD_OBSERVATIONS)
@pytest.mark.parametrize("at", ["reset", "step"])
def test_an_observation_that_breaks_the_spec_is_refused(fault, at):
    make = factories(0, fault=fault, at=at, episode=0)
    with ParallelEnv(NUM_ENVS, make, num_workers=2, seed=0) as env:
        with pytest.raises(EnvError, match=r"writing observation failed: expected int64 \(3,\), got ") as caught:
            step(env, step(env, env.reset()))
        assert caught.value.env_ids == (0,)


@pytest.mark.parametrize("fault", EXCEPTIONS)
@pytest.mark.slow
def test_a_factory_that_raises_leaves_no_process(fault):
    with pytest.raises(FactoryError, match=r"env 2, worker 1, pid \d+, phase build") as caught:
        ParallelEnv(NUM_ENVS, factories(2, fault=fault, at="construct"), num_workers=2)
    assert "faults.py" in str(caught.value.__cause__)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["close"])
def test_an_env_that_cannot_close_is_a_warning(at, caplog):
    with ParallelEnv(NUM_ENVS, factories(3, fault="value_error", at=at), num_workers=2) as env:
        env.reset()
    assert "closing env 3 raised ValueError" in caplog.text


def test_in_process_too():
    with SerialEnv(NUM_ENVS, factories(2, fault="value_error"), seed=0) as env:
        root = step(env, env.reset())
        with pytest.raises(EnvError, match=r"ValueError.*\(env 2, ") as caught:
            step(env, root)
        assert counters(caught.value.partial) == [2, 2, 1, 2]


@pytest.mark.slow
def test_an_env_that_was_sent_and_raises_is_no_longer_sent():
    with ParallelEnv(NUM_ENVS, factories(1, fault="value_error", step=1), num_workers=2, seed=0) as env:
        root = env.reset()
        root["action"] = torch.zeros(NUM_ENVS, dtype=torch.int64)
        env.send(root)
        received, raised = [], []
        while len(received) + len(raised) < NUM_ENVS:
            try:
                received += env.recv(1)["env_ids"].tolist()
            except EnvError as error:
                raised.append(error.env_ids)
        assert sorted(received) == [0, 2, 3]
        assert raised == [(1,)]
