"""SB3 trains on the facade, through its wrappers, with agents as rows, action masks, callbacks and films."""

import functools
from contextlib import closing

from tests.extras import needs, skip_without

skip_without("sb3")

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.callbacks import (
    BaseCallback,
    EvalCallback,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecVideoRecorder,
)

from envherd.executor import ExecutorOptions, MeltingPotFactory
from envherd.sb3 import SubprocVecEnv
from envherd.workers.adapters.named import NamedFactory
from tests.envs.gymnasium_envs import Horizon
from tests.envs.sb3_envs import (
    MaskedEnv,
    SampledEnv,
    SilentMaskedEnv,
    make_cartpole,
    make_tagged,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_torch_thread"),
    pytest.mark.timeout(280),
    pytest.mark.filterwarnings("ignore:.*precision lowered"),
]

TWO_WORKERS = functools.partial(SubprocVecEnv, num_workers=2)


@pytest.mark.parametrize(
    ("algorithm", "arguments"),
    [(PPO, {"n_steps": 16}), (A2C, {}), (DQN, {"learning_starts": 20})],
)
def test_algorithms_train(algorithm, arguments):
    with closing(VecMonitor(TWO_WORKERS([make_cartpole] * 4))) as env:
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


def test_wrappers_of_sb3_wrap_it():
    with closing(
        VecNormalize(
            VecFrameStack(
                VecMonitor(
                    TWO_WORKERS([functools.partial(SampledEnv, length=4), make_tagged])
                ),
                2,
            )
        )
    ) as env:
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


@pytest.mark.full
def test_ppo_solves_cartpole():
    with (
        closing(
            VecMonitor(TWO_WORKERS([functools.partial(make_cartpole, 500)] * 8))
        ) as env,
        closing(DummyVecEnv([functools.partial(make_cartpole, 500)] * 4)) as judge,
    ):
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
    assert mean >= 475


@needs("meltingpot")
def test_melting_pot_has_one_row_per_agent():
    make_env = MeltingPotFactory(
        "prisoners_dilemma_in_the_matrix__repeated",
        keys=("RGB", "INVENTORY", "READY_TO_SHOOT"),
        max_steps=7,
    )
    with closing(TWO_WORKERS([make_env] * 2)) as env:
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


# ---- action masks for sb3-contrib, `VecNormalize`, callbacks -------------------------------------

FROM_INFOS = functools.partial(
    SubprocVecEnv,
    num_workers=1,
    options=ExecutorOptions(infos={"action_mask": np.ones(4, bool)}),
)


def masked(name):
    """Return the factory of an env whose module imports PettingZoo."""
    return NamedFactory("python", f"tests.envs.pettingzoo_masked:{name}")


def legal(action):
    """Return the mask of an env whose last legal action was `action`."""
    mask = np.ones(4, bool)
    mask[action % 4] = False
    return mask


@pytest.mark.parametrize(
    ("make", "make_env"),
    [(TWO_WORKERS, MaskedEnv), (FROM_INFOS, SilentMaskedEnv)],
    ids=["method", "info"],
)
def test_masks_are_those_of_where_the_envs_are(make, make_env):
    with closing(
        make([functools.partial(make_env, length) for length in (3, 5)])
    ) as env:
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
                env.env_method("action_masks", indices=1)[0].tolist()
                == masks[1].tolist()
            )
            _, _, dones, infos = env.step(masks.argmax(1))
            assert not any(info["was_illegal"] for info in infos)
            expected = [
                0 if done else step + 1
                for step, done in zip(expected, dones, strict=True)
            ]
            num_ends += int(dones.sum())
        assert num_ends == 3


def test_an_env_without_masks_has_none():
    with closing(TWO_WORKERS([make_cartpole])) as env:
        assert not env.has_attr("action_masks")
        with pytest.raises(AttributeError):
            env.action_masks()


@needs("pettingzoo")
def test_agents_of_pettingzoo_have_rows_and_masks():
    with closing(TWO_WORKERS([masked("MaskedAgents")] * 2)) as env:
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


@needs("pettingzoo")
def test_the_info_of_a_single_agent_is_that_of_its_row():
    with closing(TWO_WORKERS([masked("Alone")] * 2)) as env:
        env.reset()
        assert env.reset_infos == [{"name": "agent_0"}] * 2
        infos = env.step(np.array([1, 0]))[3]
        assert infos == [
            {"was_illegal": illegal, "TimeLimit.truncated": False}
            for illegal in (False, True)
        ]


@needs("pettingzoo")
def test_supersuits_function_makes_a_vec_env_of_agents():
    from envherd.pettingzoo import concat_vec_envs_v1

    # Two groups by their names.
    with closing(
        concat_vec_envs_v1(
            masked("Named"), 2, num_cpus=2, base_class="stable_baselines3"
        )
    ) as env:
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


@needs("dev")
@pytest.mark.parametrize(
    ("make", "make_envs"),
    [
        (TWO_WORKERS, [MaskedEnv] * 4),
        (FROM_INFOS, [SilentMaskedEnv] * 4),
        pytest.param(
            TWO_WORKERS, [masked("MaskedAgents")] * 2, marks=needs("pettingzoo")
        ),
    ],
    ids=["method", "info", "pettingzoo"],
)
def test_maskable_ppo_trains_and_takes_legal_actions_alone(make, make_envs):
    from sb3_contrib import MaskablePPO
    from sb3_contrib.common.maskable.evaluation import evaluate_policy

    env = make(make_envs)
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


def test_statistics_of_normalization_are_saved_and_loaded(tmp_path):
    """A run that saves its model and its `VecNormalize`, and one that loads both, are those of SB3's own classes."""
    results = []
    for kind in (DummyVecEnv, TWO_WORKERS):
        with closing(
            VecNormalize(VecMonitor(kind([make_cartpole] * 2)), clip_obs=5.0)
        ) as env:
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
        with closing(
            VecNormalize.load(
                tmp_path / "statistics.pkl", VecMonitor(kind([make_cartpole] * 2))
            )
        ) as loaded:
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
    assert len(results[0][2]) > 5
    for mine, theirs in zip(results[1], results[0], strict=True):
        assert np.array_equal(mine, theirs)


# ---- SB3's video recorder -----------------------------------------------------------------------

NUM_FRAMES = 8
FPS = 5


class Brighter(Horizon):
    """Draws a square that becomes brighter with every step; a second one identifies the env."""

    render_mode = "rgb_array"

    def __init__(self, env_id: int) -> None:
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": FPS}
        self.env_id = env_id
        self.count = 0

    def render(self):
        return np.full((32, 32, 3), 10 + 12 * self.count + 100 * self.env_id, np.uint8)


@needs("all")
# Of moviepy, when it is compiled.
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_a_video_has_a_frame_for_every_step(tmp_path, monkeypatch):
    from moviepy.video.io.VideoFileClip import VideoFileClip
    from tqdm import tqdm

    # Moviepy's progress bar would leave a thread behind.
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    makes = [functools.partial(Brighter, 0), functools.partial(Brighter, 1)]
    with closing(
        VecVideoRecorder(
            VecMonitor(TWO_WORKERS(makes)),
            str(tmp_path),
            lambda step: step == 0,
            video_length=NUM_FRAMES - 1,
        )
    ) as env:
        env.reset()
        for _ in range(NUM_FRAMES + 3):
            env.step([0, 1])
    (path,) = tmp_path.glob("*.mp4")
    with VideoFileClip(str(path)) as clip:
        assert clip.fps == FPS
        frames = list(clip.iter_frames())
    assert len(frames) == NUM_FRAMES
    for step, frame in enumerate(frames):
        assert frame.shape == (64, 32, 3)
        seen = [int(frame[:28].mean()), int(frame[36:].mean())]
        # Lossy.
        assert np.allclose(seen, [10 + 12 * step, 110 + 12 * step], atol=4), step
