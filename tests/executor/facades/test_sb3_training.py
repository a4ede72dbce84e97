"""SB3 trains on the facade, through its wrappers and with agents as rows."""

import functools

from tests.extras import needs, skip_without

skip_without("sb3")

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.callbacks import (
    EvalCallback,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecFrameStack, VecMonitor, VecNormalize

from envherd.executor import MeltingPotFactory
from envherd.sb3 import DummyVecEnv, SubprocVecEnv
from tests.envs.sb3_envs import SampledEnv, make_cartpole, make_tagged

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_torch_thread"),
    pytest.mark.timeout(280),
    pytest.mark.filterwarnings("ignore:.*precision lowered"),
]

TWO_WORKERS = functools.partial(SubprocVecEnv, num_workers=2)
BOTH = pytest.mark.parametrize(
    "make", [DummyVecEnv, TWO_WORKERS], ids=["dummy", "subproc"]
)


@BOTH
@pytest.mark.parametrize(
    ("algorithm", "arguments"),
    [(PPO, {"n_steps": 16}), (A2C, {}), (DQN, {"learning_starts": 20})],
)
def test_algorithms_train(make, algorithm, arguments):
    env = VecMonitor(make([make_cartpole] * 4))
    model = algorithm("MlpPolicy", env, seed=1, device="cpu", **arguments)
    before = [p.detach().clone() for p in model.policy.parameters()]
    model.learn(200)
    assert model.num_timesteps >= 200
    assert len(model.ep_info_buffer) > 3
    assert max(info["l"] for info in model.ep_info_buffer) <= 25
    assert any(
        not torch.equal(one, other)
        for one, other in zip(before, model.policy.parameters(), strict=True)
    )
    env.close()


@pytest.mark.parametrize("space", ["dict of boxes", "image"])
def test_policies_of_dicts_and_images_train(space):
    make_env = (
        functools.partial(SampledEnv, "dict", 7)
        if space == "dict of boxes"
        else functools.partial(BigImage)
    )
    env = TWO_WORKERS([make_env] * 2)
    model = PPO(
        "MultiInputPolicy" if space == "dict of boxes" else "CnnPolicy",
        env,
        n_steps=8,
        batch_size=8,
        n_epochs=1,
    )
    model.learn(16)
    env.close()


class BigImage(SampledEnv):
    """Observes noise of a size that a convolution takes."""

    def __init__(self):
        super().__init__("image")
        self.observation_space = gymnasium.spaces.Box(0, 255, (40, 40, 3), np.uint8)


@BOTH
def test_wrappers_of_sb3_wrap_it(make):
    env = VecNormalize(
        VecFrameStack(
            VecMonitor(make([functools.partial(SampledEnv, length=4), make_tagged])), 2
        )
    )
    obs = env.reset()
    assert obs.shape == (2, 6)
    for _ in range(4):
        obs, _, dones, infos = env.step(np.zeros(2, np.int64))
    assert dones.tolist() == [True, False]
    assert infos[0]["episode"]["l"] == 4
    assert infos[0]["terminal_observation"].shape == (6,)
    assert np.abs(obs).max() <= 10
    assert env.get_attr("length") == [4, 5]
    assert env.render().shape == (4, 3, 3)
    env.close()


@pytest.mark.full
def test_ppo_solves_cartpole():
    env = VecMonitor(TWO_WORKERS([functools.partial(make_cartpole, 500)] * 8))
    judge = DummyVecEnv([functools.partial(make_cartpole, 500)] * 4)
    judge.seed(100)
    enough = StopTrainingOnRewardThreshold(475)
    check = EvalCallback(
        VecMonitor(judge),
        callback_on_new_best=enough,
        n_eval_episodes=8,
        eval_freq=1024,
        verbose=0,
    )
    model = PPO(
        "MlpPolicy",
        env,
        n_steps=32,
        batch_size=256,
        gae_lambda=0.8,
        gamma=0.98,
        n_epochs=20,
        learning_rate=lambda left: 0.001 * left,
        clip_range=lambda left: 0.2 * left,
        seed=0,
        device="cpu",
    )
    model.learn(100_000, callback=check)
    mean, _ = evaluate_policy(model, judge, 20, warn=False)
    env.close()
    judge.close()
    assert mean >= 475


@needs("meltingpot")
@BOTH
def test_melting_pot_has_one_row_per_agent(make):
    make_env = MeltingPotFactory(
        "prisoners_dilemma_in_the_matrix__repeated",
        keys=("RGB", "INVENTORY", "READY_TO_SHOOT"),
        max_steps=7,
    )
    env = make([make_env] * 2)
    assert env.num_envs == 4
    assert env.num_agents == 2
    assert env.observation_space["RGB"] == gymnasium.spaces.Box(
        0, 255, (40, 40, 3), np.uint8
    )
    assert env.action_space == gymnasium.spaces.Discrete(8)
    assert {key: values.shape for key, values in env.reset().items()} == {
        "RGB": (4, 40, 40, 3),
        "INVENTORY": (4, 2),
        "READY_TO_SHOOT": (4, 1),
    }
    # Two agents may see the same at one time: nothing is drawn in a dark corner.
    differ = False
    for step in range(7):
        obs, rewards, dones, infos = env.step(np.arange(4))
        differ = differ or not np.array_equal(obs["RGB"][0], obs["RGB"][1])
        assert rewards.shape == (4,)
        assert dones.all() == (step == 6)
    assert differ
    assert all(info["TimeLimit.truncated"] for info in infos)
    assert infos[2]["terminal_observation"]["RGB"].shape == (40, 40, 3)
    # An agent may observe the same after its reset.
    lasts = [info["terminal_observation"]["RGB"] for info in infos]
    assert any(
        not np.array_equal(*pair) for pair in zip(lasts, obs["RGB"], strict=True)
    )
    assert env.render().ndim == 3
    env.close()


@needs("meltingpot")
def test_melting_pot_trains_with_shared_parameters():
    make_env = MeltingPotFactory(
        "prisoners_dilemma_in_the_matrix__repeated",
        keys=("RGB", "INVENTORY"),
        max_steps=12,
    )
    env = VecMonitor(TWO_WORKERS([make_env] * 2))
    model = PPO(
        "MultiInputPolicy", env, n_steps=16, batch_size=32, n_epochs=1, device="cpu"
    )
    model.learn(3 * 16 * 4)
    assert model.num_timesteps == 192
    assert {info["l"] for info in model.ep_info_buffer} == {12}
    env.close()
