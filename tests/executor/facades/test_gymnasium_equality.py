"""The facade's transitions are Gymnasium's own, bit for bit, in every autoreset mode."""

import functools
from contextlib import closing

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode

from envherd.executor.options import ExecutorOptions
from envherd.gymnasium import AsyncVectorEnv
from tests.envs.gymnasium_envs import MAKES, Horizon, Particular, Precise, Reusing

NUM_ENVS = 3
TWO_WORKERS = functools.partial(AsyncVectorEnv, num_workers=2)


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        assert data_equivalence(our, their, exact=True), (our, their)


@pytest.mark.slow
@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("name", MAKES)
def test_steps_and_infos_equal_gymnasiums(name, mode):
    make_envs = [MAKES[name]] * NUM_ENVS
    with (
        closing(TWO_WORKERS(make_envs, autoreset_mode=mode)) as ours,
        closing(
            gymnasium.vector.SyncVectorEnv(make_envs, autoreset_mode=mode)
        ) as theirs,
    ):
        assert ours.metadata == theirs.metadata
        assert ours.observation_space == theirs.observation_space
        assert ours.action_space == theirs.action_space
        theirs.action_space.seed(5)
        assert_same(
            ours.reset(seed=3, options={"level": 1}),
            theirs.reset(seed=3, options={"level": 1}),
        )
        num_terminated = num_truncated = 0
        for _ in range(60):
            actions = theirs.action_space.sample()
            our, their = ours.step(actions), theirs.step(actions)
            assert_same(our, their)
            num_terminated += our[2].sum()
            num_truncated += our[3].sum()
            ended = our[2] | our[3]
            if mode is AutoresetMode.DISABLED and ended.any():
                mask = ended.copy()
                assert_same(
                    ours.reset(options={"reset_mask": ended}),
                    theirs.reset(options={"reset_mask": ended}),
                )
                assert (mask == ended).all()
        assert num_terminated >= 3 or name == "pendulum"
        assert num_truncated >= 3 or name == "cartpole"
        assert_same(ours.reset(seed=[1, None, 2]), theirs.reset(seed=[1, None, 2]))


def test_final_observation_is_copied_before_the_env_reuses_its_array():
    with closing(TWO_WORKERS([Reusing] * 2, autoreset_mode="SameStep")) as envs:
        envs.reset()
        for _ in range(2):
            envs.step(np.zeros(2, np.int64))
        observations, _, terminations, _, infos = envs.step(np.zeros(2, np.int64))
        assert terminations.all()
        assert observations.tolist() == [[0.0], [0.0]]
        assert [last.tolist() for last in infos["final_obs"]] == [[3.0], [3.0]]


def test_actions_reach_the_env_as_they_are():
    with closing(TWO_WORKERS([Precise] * 2)) as envs:
        envs.reset()
        third = np.full((2, 1), 1 / 3)
        assert envs.step(third)[1].tolist() == [1 / 3] * 2
        assert (
            envs.step(third.astype(np.float32))[1].tolist()
            == [float(np.float32(1 / 3))] * 2
        )
        _, rewards, _, _, infos = envs.step([[0.25], [0.5]])
        assert rewards.tolist() == [0.25, 0.5]
        assert infos["type"].tolist() == ["list"] * 2
        with pytest.raises(ValueError, match="one for each env"):
            envs.step(np.zeros((3, 1)))
        with pytest.raises(TypeError):
            envs.step(0)
        # Nothing was kept.
        assert (
            envs.step(third.astype(np.float32))[1].tolist()
            == [float(np.float32(1 / 3))] * 2
        )


def test_an_env_may_be_stepped_before_any_reset():
    with closing(TWO_WORKERS([Precise] * 2)) as envs:
        assert envs.step(np.zeros((2, 1), np.float32))[1].tolist() == [0.0, 0.0]


def test_copies_stay_and_views_last_for_ring_frames_steps():
    actions = np.zeros(2, np.int64)
    with closing(TWO_WORKERS([Horizon] * 2)) as envs:
        first, _ = envs.reset()
        kept = [envs.step(actions)[0] for _ in range(6)]
        assert [float(one[0, 0]) for one in [first, *kept]] == [0, 1, 2, 3, 4, 5, 6]
    with closing(
        TWO_WORKERS([Horizon] * 2, copy=False, options=ExecutorOptions(ring_frames=3))
    ) as envs:
        envs.reset()
        kept = [envs.step(actions)[0] for _ in range(3)]
        assert [float(one[0, 0]) for one in kept] == [1, 2, 3]
        del kept


def test_a_reset_of_the_callers_has_keywords_and_an_autoreset_has_none():
    with closing(TWO_WORKERS([Particular])) as envs:
        assert envs.reset()[1]["kwargs"].tolist() == ["['options', 'seed']"]
        envs.step(np.zeros(1, np.int64))
        assert envs.step(np.zeros(1, np.int64))[4]["kwargs"].tolist() == ["[]"]
        options = {"reset_mask": np.array([True]), "level": 3}
        envs.reset(options=options)
        assert sorted(options) == ["level", "reset_mask"]
