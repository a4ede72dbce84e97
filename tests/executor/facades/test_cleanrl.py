"""`gym` for scripts of Gymnasium 0.29: they get the same data as from Gymnasium's own vector env."""

import pickle
from contextlib import closing

from tests.extras import needs, skip_without

skip_without("gymnasium")

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from envherd.cleanrl import Gym, OldVectorEnv, gym
from envherd.executor.facades.cleanrl import worker

pytestmark = pytest.mark.slow

NUM_ENVS = 3


def make_discrete():
    return gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))


def make_continuous():
    """Wrap an env as scripts of continuous control do."""
    env = gym.wrappers.FlattenObservation(gym.make("Pendulum-v1", max_episode_steps=20))
    env = gym.wrappers.RecordEpisodeStatistics(env)
    env = gym.wrappers.ClipAction(env)
    env = gym.wrappers.NormalizeObservation(env)
    env = gym.wrappers.TransformObservation(
        env, lambda observation: np.clip(observation, -1, 1)
    )
    env = gym.wrappers.NormalizeReward(env, gamma=0.99)
    return gym.wrappers.TransformReward(env, lambda reward: np.clip(reward, -10, 10))


@pytest.mark.parametrize("make_env", [make_discrete, make_continuous])
@pytest.mark.parametrize("name", ["SyncVectorEnv", "AsyncVectorEnv"])
def test_a_script_sees_the_episodes_of_gymnasiums_own(make_env, name):
    with (
        closing(
            getattr(Gym(num_workers=2).vector, name)(
                [make_env for _ in range(NUM_ENVS)]
            )
        ) as ours,
        closing(
            SyncVectorEnv([make_env] * NUM_ENVS, autoreset_mode=AutoresetMode.SAME_STEP)
        ) as theirs,
    ):
        assert isinstance(ours, OldVectorEnv)
        assert ours.executor.num_workers == 2
        assert ours.single_observation_space == theirs.single_observation_space
        assert ours.single_action_space == theirs.single_action_space
        theirs.action_space.seed(3)
        assert np.array_equal(ours.reset(seed=1)[0], theirs.reset(seed=1)[0])
        num_ends = 0
        for _ in range(60):
            actions = theirs.action_space.sample()
            *mine, infos = ours.step(actions)
            *other, their_infos = theirs.step(actions)
            for one, two in zip(mine, other, strict=True):
                assert np.array_equal(one, two)
            ended = other[2] | other[3]
            assert ("final_info" in infos) == ended.any()
            for i in np.flatnonzero(ended):
                num_ends += 1
                assert np.array_equal(
                    infos["final_observation"][i], their_infos["final_obs"][i]
                )
                episode, expected = (
                    infos["final_info"][i]["episode"],
                    their_infos["final_info"]["episode"],
                )
                assert (episode["r"], episode["l"]) == (
                    expected["r"][i],
                    expected["l"][i],
                )
            if ended.any():
                assert infos["_final_info"].tolist() == ended.tolist()
                assert [info is None for info in infos["final_info"]] == (
                    ~ended
                ).tolist()
                assert [seen is None for seen in infos["final_observation"]] == (
                    ~ended
                ).tolist()
        assert num_ends >= 6


def test_wrappers_have_their_former_names_and_arguments():
    class Picture(gymnasium.Env):
        observation_space = gym.spaces.Box(0, 255, (100, 60, 3), np.uint8)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.full((100, 60, 3), 7, np.uint8), {}

        def step(self, action):
            return np.full((100, 60, 3), 8, np.uint8), 0.0, False, False, {}

    pytest.importorskip("cv2")
    env = gym.wrappers.ResizeObservation(Picture(), (84, 84))
    env = gym.wrappers.FrameStack(gym.wrappers.GrayScaleObservation(env), 4)
    assert env.observation_space.shape == (4, 84, 84)
    first, _ = env.reset()
    assert [int(frame[0, 0]) for frame in first] == [7] * 4
    assert [int(frame[0, 0]) for frame in env.step(0)[0]] == [7, 7, 7, 8]
    assert gym.wrappers.ResizeObservation(Picture(), 84).observation_space.shape == (
        84,
        84,
        3,
    )


def test_statistics_of_normalization_are_float64():
    env = gym.wrappers.NormalizeObservation(gym.make("CartPole-v1"))
    seen, _ = env.reset(seed=0)
    raw, _ = gymnasium.make("CartPole-v1").reset(seed=0)
    assert env.obs_rms.mean.dtype == env.obs_rms.var.dtype == np.float64
    count = 1 + 1e-4
    mean = raw.astype(np.float64) / count
    var = (1e-4 + np.square(raw.astype(np.float64)) * 1e-4 / count) / count
    assert np.allclose(seen, (raw - mean) / np.sqrt(var + 1e-8), rtol=1e-6)


@needs("atari")
def test_names_of_atari_games_need_no_registration():
    with closing(gym.make("BreakoutNoFrameskip-v4")) as env:
        assert env.observation_space.shape == (210, 160, 3)
    with pytest.raises(gymnasium.error.Error):
        gym.make("NoSuchGameNoFrameskip-v4")


def test_workers_have_a_gym_without_vector_envs():
    in_worker = pickle.loads(pickle.dumps(gym))
    assert type(in_worker) is worker.Gym
    assert in_worker.spaces is gymnasium.spaces
    assert not hasattr(in_worker.vector, "OldVectorEnv")
    assert gym.vector.VectorEnv is gymnasium.vector.VectorEnv
