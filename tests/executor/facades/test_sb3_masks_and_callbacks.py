"""Features that SB3's users build on a vec env: action masks for sb3-contrib, `VecNormalize`, callbacks."""

import functools

from tests.extras import needs, skip_without

skip_without("sb3")

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    CheckpointCallback,
    EvalCallback,
    StopTrainingOnMaxEpisodes,
)
from stable_baselines3.common.vec_env import DummyVecEnv as HostVecEnv
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize

from envherd.executor import ExecutorOptions
from envherd.sb3 import DummyVecEnv, SubprocVecEnv
from tests.envs.sb3_envs import MaskedEnv, SilentMaskedEnv, make_cartpole

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_torch_thread"),
    pytest.mark.filterwarnings("ignore:.*precision lowered"),
]

TWO_WORKERS = functools.partial(SubprocVecEnv, num_workers=2)
BOTH = pytest.mark.parametrize(
    "make", [DummyVecEnv, TWO_WORKERS], ids=["dummy", "subproc"]
)
FROM_INFOS = functools.partial(
    SubprocVecEnv, num_workers=1, options=ExecutorOptions(infos=("action_mask",))
)


def legal(action):
    """Return the mask of an env whose last legal action was `action`."""
    mask = np.ones(4, bool)
    mask[action % 4] = False
    return mask


@pytest.mark.parametrize(
    ("make", "make_env"),
    [(DummyVecEnv, MaskedEnv), (TWO_WORKERS, MaskedEnv), (FROM_INFOS, SilentMaskedEnv)],
    ids=["dummy", "method", "info"],
)
def test_masks_are_those_of_where_the_envs_are(make, make_env):
    env = make([functools.partial(make_env, length) for length in (3, 5)])
    assert env.has_attr("action_masks")
    assert env.observation_space == spaces.Box(-1, 1, (2,), np.float32)
    env.reset()
    num_ends = 0
    expected = [0, 0]
    for _ in range(8):
        masks = env.action_masks()
        assert (masks.dtype, masks.shape) == (bool, (2, 4))
        assert masks.tolist() == [legal(step).tolist() for step in expected]
        assert (
            env.env_method("action_masks", indices=1)[0].tolist() == masks[1].tolist()
        )
        _, _, dones, infos = env.step(masks.argmax(1))
        assert not any(info["was_illegal"] for info in infos)
        expected = [
            0 if done else step + 1 for step, done in zip(expected, dones, strict=True)
        ]
        num_ends += int(dones.sum())
    assert num_ends == 3
    env.close()


def test_an_env_without_masks_has_none():
    env = TWO_WORKERS([make_cartpole])
    assert not env.has_attr("action_masks")
    with pytest.raises(AttributeError):
        env.action_masks()
    env.close()


@needs("pettingzoo")
def test_agents_of_pettingzoo_have_rows_and_masks():
    from tests.envs.pettingzoo_masked import MaskedAgents

    for make in (DummyVecEnv, TWO_WORKERS):
        env = make([MaskedAgents] * 2)
        assert (env.num_envs, env.action_space) == (4, spaces.Discrete(4))
        assert env.observation_space == spaces.Box(-1, 1, (2,), np.float32)
        env.reset()
        assert env.reset_infos == [{"name": "agent_0"}, {"name": "agent_1"}] * 2
        for step in range(6):
            assert env.action_masks().tolist() == [
                legal(step % 4 + agent).tolist() for agent in (0, 1, 0, 1)
            ]
            actions = env.action_masks().argmax(1)
            actions[3] = (step % 4 + 1) % 4
            _, rewards, dones, infos = env.step(actions)
            assert rewards.tolist() == [1, 1, 1, -10]
            assert [info["was_illegal"] for info in infos] == [
                False,
                False,
                False,
                True,
            ]
            assert dones.all() == (step == 3)
        env.close()


@needs("pettingzoo")
def test_the_info_of_a_single_agent_is_that_of_its_row():
    from tests.envs.pettingzoo_masked import Alone

    env = TWO_WORKERS([Alone] * 2)
    env.reset()
    assert env.reset_infos == [{"name": "agent_0"}] * 2
    infos = env.step(np.array([1, 0]))[3]
    assert infos == [
        {"was_illegal": illegal, "TimeLimit.truncated": False}
        for illegal in (False, True)
    ]
    env.close()


@needs("pettingzoo")
def test_supersuits_function_makes_a_vec_env_of_agents():
    from envherd.pettingzoo import concat_vec_envs_v1
    from tests.envs.pettingzoo_masked import MaskedAgents, Named

    # Two groups by their names.
    env = concat_vec_envs_v1(Named, 2, num_cpus=2, base_class="stable_baselines3")
    assert isinstance(env, SubprocVecEnv)
    assert (env.num_envs, env.executor.num_workers) == (4, 2)
    model = PPO(
        "MlpPolicy",
        VecMonitor(env),
        n_steps=16,
        batch_size=32,
        n_epochs=1,
        device="cpu",
    )
    model.learn(64)
    assert {info["l"] for info in model.ep_info_buffer} == {4}
    env.close()
    assert MaskedAgents.possible_agents != Named.possible_agents


@needs("dev")
@pytest.mark.parametrize("source", ["method", "info", "pettingzoo"])
def test_maskable_ppo_trains_and_takes_legal_actions_alone(source):
    from sb3_contrib import MaskablePPO
    from sb3_contrib.common.maskable.evaluation import evaluate_policy

    if source == "pettingzoo":
        skip_without("pettingzoo")
        from tests.envs.pettingzoo_masked import MaskedAgents

        env = TWO_WORKERS([MaskedAgents] * 2)
    elif source == "info":
        env = FROM_INFOS([SilentMaskedEnv] * 4)
    else:
        env = TWO_WORKERS([MaskedEnv] * 4)
    model = MaskablePPO(
        "MlpPolicy",
        VecMonitor(env),
        n_steps=16,
        batch_size=32,
        n_epochs=2,
        seed=0,
        device="cpu",
    )
    before = [p.detach().clone() for p in model.policy.parameters()]
    watcher = Watcher()
    model.learn(3 * 16 * 4, callback=watcher)
    assert model.num_timesteps == 192
    assert any(
        not torch.equal(one, other)
        for one, other in zip(before, model.policy.parameters(), strict=True)
    )
    assert watcher.num_illegal == 0
    assert watcher.num_steps == 48
    rewards, lengths = evaluate_policy(
        model, VecMonitor(env), 4, return_episode_rewards=True, warn=False
    )
    # An illegal action would cost 10.
    assert rewards == [float(length) for length in lengths]
    env.close()


class Watcher(BaseCallback):
    """Counts steps and illegal actions, and what SB3 hands to a callback."""

    num_illegal = num_steps = 0

    def _on_step(self):
        self.num_steps += 1
        self.num_illegal += sum(
            info.get("was_illegal", False) for info in self.locals["infos"]
        )
        assert len(self.locals["dones"]) == self.training_env.num_envs
        return True


@BOTH
def test_statistics_of_normalization_are_saved_and_loaded(make, tmp_path):
    """A run that saves its model and its `VecNormalize`, and one that loads both, are those of SB3's own classes."""
    results = []
    for kind in (HostVecEnv, make):
        env = VecNormalize(VecMonitor(kind([make_cartpole] * 2)), clip_obs=5.0)
        env.seed(1)
        model = PPO(
            "MlpPolicy",
            env,
            n_steps=32,
            batch_size=32,
            n_epochs=2,
            seed=3,
            device="cpu",
        )
        model.learn(128)
        model.save(tmp_path / "model")
        env.save(tmp_path / "statistics.pkl")
        env.close()
        loaded = VecNormalize.load(
            tmp_path / "statistics.pkl", VecMonitor(kind([make_cartpole] * 2))
        )
        assert loaded.obs_rms.count == env.obs_rms.count
        loaded.seed(7)
        resumed = PPO.load(tmp_path / "model", env=loaded, device="cpu")
        resumed.learn(128, reset_num_timesteps=False)
        assert resumed.num_timesteps == 256
        results.append(
            (
                loaded.obs_rms.mean,
                loaded.ret_rms.var,
                [info["r"] for info in resumed.ep_info_buffer],
            )
        )
        loaded.close()
    assert len(results[0][2]) > 5
    for mine, theirs in zip(results[1], results[0], strict=True):
        assert np.array_equal(mine, theirs)


@BOTH
def test_callbacks_see_the_training_and_run_evaluations(make, tmp_path):
    seen = []
    for kind in (HostVecEnv, make):
        out = tmp_path / str(len(seen))
        env = VecNormalize(VecMonitor(kind([make_cartpole] * 2)))
        judge = VecNormalize(
            VecMonitor(kind([make_cartpole] * 2)), training=False, norm_reward=False
        )
        env.seed(1)
        judge.seed(2)
        check = EvalCallback(
            judge,
            n_eval_episodes=4,
            eval_freq=32,
            log_path=str(out),
            best_model_save_path=str(out),
            verbose=0,
        )
        save = CheckpointCallback(32, str(out), save_vecnormalize=True)
        callbacks = CallbackList(
            [check, save, StopTrainingOnMaxEpisodes(12), Watcher()]
        )
        PPO(
            "MlpPolicy",
            env,
            n_steps=32,
            batch_size=32,
            n_epochs=1,
            seed=3,
            device="cpu",
        ).learn(5000, callback=callbacks)
        evaluations = np.load(out / "evaluations.npz")
        seen.append(
            (
                evaluations["results"],
                evaluations["timesteps"],
                sorted(path.name for path in out.iterdir()),
            )
        )
        env.close()
        judge.close()
    assert seen[0][0].size >= 4
    assert "best_model.zip" in seen[0][2]
    assert any("vecnormalize" in name for name in seen[0][2])
    for mine, theirs in zip(seen[1], seen[0], strict=True):
        assert np.array_equal(mine, theirs)
