"""A run that is resumed from a state goes on with the episodes, seeds and random actions that would have come next."""

import functools

import pytest
import torch

from envherd import ExecutorOptions, ParallelEnv, SerialEnv
from envherd.workers.testing import CountingEnv
from tests.executor.drives import act

MAKERS = {
    "parallel": functools.partial(ParallelEnv, num_workers=2),
    "serial": SerialEnv,
    "ahead": functools.partial(ParallelEnv, options=ExecutorOptions(reset_ahead=True)),
}
PAIRS = [("parallel", "serial"), ("serial", "parallel"), ("ahead", "ahead"), ("serial", "ahead")]


@pytest.mark.parametrize(("before", "after"), PAIRS)
@pytest.mark.slow
def test_a_state_with_envs_goes_on_bit_for_bit(before, after, tmp_path):
    with MAKERS[before](3, CountingEnv, seed=5) as env:
        env.rollout(10, break_when_any_done=False)
        torch.save(env.state_dict(), tmp_path / "state.pt")
        expected = env.rollout(30, auto_reset=False, break_when_any_done=False)  # random actions
    with MAKERS[after](3, CountingEnv, seed=99) as env:
        env.rollout(4, act, break_when_any_done=False)
        env.load_state_dict(torch.load(tmp_path / "state.pt"))
        found = env.rollout(30, auto_reset=False, break_when_any_done=False)
        assert env.seed == 5
    assert (found == expected).all()
    assert found["next", "done"].sum() > 10


@pytest.mark.parametrize(("before", "after"), PAIRS)
@pytest.mark.slow
def test_a_state_without_envs_begins_the_episodes_that_would_have_come_next(before, after):
    with MAKERS[before](3, CountingEnv, seed=5) as env:
        data = env.rollout(10, act, break_when_any_done=False)
        state = env.state_dict(with_envs=False)
        assert state.keys() == {"executor"}
        expected = env.rollout(20, act, break_when_any_done=False)
    with MAKERS[after](3, CountingEnv, seed=99) as env:
        env.load_state_dict(state)
        found = env.rollout(20, act, break_when_any_done=False)
    assert (found == expected).all()
    seeds = [set(batch["observation"][..., 0].flatten().tolist()) for batch in (data, found)]
    assert not seeds[0] & seeds[1]


def test_the_state_says_at_which_episode_each_env_is():
    lengths = [functools.partial(CountingEnv, length) for length in (2, 3, 5)]
    with SerialEnv(3, lengths, seed=5) as env:
        assert env.state_dict(with_envs=False)["executor"]["episodes"] == [0, 0, 0]
        env.rollout(7, act, break_when_any_done=False)
        assert env.state_dict(with_envs=False)["executor"]["episodes"] == [4, 3, 2]
        assert env.state_dict()["executor"]["seed"] == 5


def test_envs_must_be_reset_after_seeds_alone():
    from envherd import ResetNeeded

    with SerialEnv(2, CountingEnv, seed=5) as env:
        env.reset()
        env.load_state_dict(env.state_dict(with_envs=False))
        with pytest.raises(ResetNeeded):
            env.step(env.rand_action())


def test_a_state_of_another_number_of_envs_is_refused_and_loads_nothing():
    with SerialEnv(3, CountingEnv, seed=5) as one, SerialEnv(2, CountingEnv, seed=6) as other:
        other.reset()
        for state in (one.state_dict(with_envs=False), one.state_dict() | {"env2": None}):
            with pytest.raises(ValueError, match="load_state_dict failed: expected"):
                other.load_state_dict(state)
        assert other.seed == 6
        assert other.step(act(other.current()))["next", "observation"][:, 1].tolist() == [1, 1]


@pytest.mark.slow
@pytest.mark.broken_pool
def test_a_worker_that_is_replaced_while_seeds_are_loaded_goes_on_with_them():
    import os
    import signal

    options = ExecutorOptions(on_worker_loss="restart")
    with SerialEnv(2, CountingEnv, seed=5) as env:
        env.rollout(10, act, break_when_any_done=False)
        state = env.state_dict(with_envs=False)
        expected = env.rollout(6, act, break_when_any_done=False)
    with ParallelEnv(2, CountingEnv, num_workers=2, seed=9, options=options) as env:
        os.kill(env.statistics().workers[1].pid, signal.SIGKILL)
        env.load_state_dict(state)
        found = env.rollout(6, act, break_when_any_done=False)
    assert (found["observation"] == expected["observation"]).all()
