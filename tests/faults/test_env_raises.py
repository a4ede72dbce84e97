"""An exception of an env names that env in the caller; its worker and all other envs continue. See also `matrix`."""

import functools

import pytest

from envherd.executor import EnvError, FactoryError, ParallelEnv, ResetNeeded
from envherd.workers.testing import CountingEnv, FaultyEnv
from envherd.workers.testing.faults import BAD_OBSERVATIONS, EXCEPTIONS
from tests.executor.calls import ENDLESS, act, both, counters, only


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


@pytest.mark.parametrize(("call", "ended"), [("step", (0, 1, 3)), ("step_and_maybe_reset", (0, 3))])
@both
def test_a_step_that_raises_ends_the_episodes_of_these_envs_alone(make, call, ended):
    """The error names them; the others have stepped, and go on, or must be reset because they have ended."""
    raises = functools.partial(FaultyEnv, "value_error")
    with make(5, [raises, functools.partial(CountingEnv, 2), ENDLESS, raises, ENDLESS], seed=0) as env:
        env.reset()
        env.step_and_maybe_reset(act(env))
        with pytest.raises(EnvError, match=r"step failed: the env raised ValueError: .*\(env 0, ") as caught:
            getattr(env, call)(act(env))
        assert "Traceback" in str(caught.value.__cause__)
        assert caught.value.env_ids == (0, 3)
        assert counters(caught.value.partial) == [1, 2, 2, 1, 2]
        with pytest.raises(ResetNeeded) as refused:
            getattr(env, call)(act(env))
        assert refused.value.env_ids == ended
        assert counters(env.reset(only(env, *ended))) == [0, 0, 2, 0, 2]
        assert counters(env.step_and_maybe_reset(act(env))[1]) == [1, 1, 3, 1, 3]
        assert env.statistics().env_errors == 2


@both
def test_a_failed_reset_leaves_the_others_reset(make):
    with make(2, [ENDLESS, functools.partial(FaultyEnv, "value_error", at="reset", episode=1)]) as env:
        env.reset()
        env.step(act(env))
        with pytest.raises(EnvError, match="reset failed"):
            env.reset()
        assert counters(env.current())[0] == 0
        with pytest.raises(ResetNeeded) as caught:
            env.step(act(env))
        assert caught.value.env_ids == (1,)
        assert env.statistics().env_errors == 1
