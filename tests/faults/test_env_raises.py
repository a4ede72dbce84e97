"""An exception of an env names that env in the caller; its worker and all other envs continue. See also `matrix`."""

import functools

import pytest

from envherd.executor import EnvError, FactoryError, ParallelEnv, SerialEnv
from envherd.workers.testing import CountingEnv, FaultyEnv
from envherd.workers.testing.faults import BAD_OBSERVATIONS, EXCEPTIONS
from tests.executor.test_recovery import act, counters, only

VICTIMS = [0, 2, 3]


def reset_and_step(env, env_id):
    env.reset(only(env, env_id))
    env.send(act(env)[:1], [env_id])
    env.recv()


@pytest.mark.slow
@pytest.mark.parametrize("at", ["reset", "step"])
def test_whatever_an_env_raises_it_alone_is_named_and_the_workers_go_on(at):
    faults = [*EXCEPTIONS, *BAD_OBSERVATIONS]
    make = [functools.partial(FaultyEnv, fault, at=at, episode=1, step=1) for fault in faults]
    with ParallelEnv(len(faults), make, num_workers=2) as env:
        env.reset()
        env.step(act(env))
        pids = [worker.pid for worker in env.statistics().workers]
        for env_id, fault in enumerate(faults):
            is_bad = fault in BAD_OBSERVATIONS
            text = r"writing observation failed: expected int64 \(3,\), got " if is_bad else f"{at} failed: "
            with pytest.raises(EnvError, match=text) as caught:
                reset_and_step(env, env_id)
            assert caught.value.context["phase"] == at
            assert caught.value.env_ids == (env_id,)
        assert [worker.pid for worker in env.statistics().workers] == pids
        assert env.statistics().env_errors == len(faults)


@pytest.mark.slow
@pytest.mark.parametrize("fault", EXCEPTIONS)
def test_a_factory_that_raises_leaves_no_process(fault):
    make = [CountingEnv, CountingEnv, functools.partial(FaultyEnv, fault, at="construct")]
    with pytest.raises(FactoryError, match=r"env 2, worker 1, pid \d+, phase build") as caught:
        ParallelEnv(3, make, num_workers=2)
    assert "faults.py" in str(caught.value.__cause__)


@pytest.mark.parametrize("kind", [pytest.param("workers", marks=pytest.mark.slow), "in this process"])
def test_a_step_that_raises_ends_the_episodes_of_these_envs_alone(kind):
    """The error names them; the others have stepped, and go on."""
    make = [functools.partial(FaultyEnv, "value_error" if i in VICTIMS else None) for i in range(5)]
    new = functools.partial(ParallelEnv, num_workers=2) if kind == "workers" else SerialEnv
    with new(5, make, seed=0) as env:
        env.reset()
        env.step_and_maybe_reset(act(env))
        with pytest.raises(EnvError, match=r"step failed: the env raised ValueError: .*\(env 0, ") as caught:
            env.step_and_maybe_reset(act(env))
        assert "Traceback" in str(caught.value.__cause__)
        assert caught.value.env_ids == tuple(VICTIMS)
        assert counters(caught.value.partial) == [1, 2, 1, 1, 2]
        assert counters(env.reset(only(env, *VICTIMS))) == [0, 2, 0, 0, 2]
        assert counters(env.step_and_maybe_reset(act(env))[1]) == [1, 3, 1, 1, 3]
        assert env.statistics().env_errors == 3


@pytest.mark.slow
def test_an_env_that_was_sent_and_raises_is_no_longer_sent():
    make = [functools.partial(FaultyEnv, "value_error" if i == 1 else None, step=1) for i in range(4)]
    with ParallelEnv(4, make, num_workers=2) as env:
        env.reset()
        env.send(act(env))
        received, raised = [], []
        while len(received) + len(raised) < 4:
            try:
                received += env.recv(1)["env_ids"].tolist()
            except EnvError as error:
                raised.append(error.env_ids)
        assert (sorted(received), raised) == ([0, 2, 3], [(1,)])
