"""Gymnasium vector envs: the three modes, true last observations, and refusals."""

import contextlib
from functools import partial
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from envherd.executor import ParallelEnv, SerialEnv
from envherd.workers import seeding
from envherd.workers.adapters.gymnasium.vector import GymnasiumVectorAdapter
from envherd.workers.errors import EnvError, ResetNeeded, SpecError
from tests.contracts.families import FAMILIES
from tests.envs.vector_envs import LoopVectorEnv, TellingEnv, invalid_transitions
from tests.extras import needs, skip_without
from tests.oracles.driving import Driven

pytestmark = pytest.mark.preloads()

NEXT, SAME, DISABLED = (
    AutoresetMode.NEXT_STEP,
    AutoresetMode.SAME_STEP,
    AutoresetMode.DISABLED,
)
MODES = (NEXT, SAME, DISABLED)


def sync(mode, num_rows=3, *, reuses_buffer=True, copy=False):
    env_fns = [
        partial(TellingEnv, reuses_buffer=reuses_buffer, offset=100 * row)
        for row in range(num_rows)
    ]
    return SyncVectorEnv(env_fns, autoreset_mode=mode, copy=copy)


def async_(mode, num_rows=2, **kwargs):
    return AsyncVectorEnv([TellingEnv] * num_rows, autoreset_mode=mode, **kwargs)


# ---- traps ---------------------------------------------------------------------------------------


def test_the_callers_options_and_masks_are_left_alone():
    options = {"start": 3}
    with SerialEnv(1, lambda: sync(DISABLED), seed=0) as env:
        td = env.reset(options=options)
        mask = torch.tensor([[[True], [False], [True]]])
        # Gymnasium takes the mask out of its options, so that the second call would reset all.
        for _ in range(2):
            td = env.reset(td.clone().set("_reset", mask), options=options)
        assert td["observation"][0, :, 0].tolist() == [3.0, 101.0, 203.0]
    assert options == {"start": 3}
    assert mask.flatten().tolist() == [True, False, True]


def test_rows_see_no_mask_and_only_the_callers_options():
    built = []
    with SerialEnv(
        1, lambda: built.append(sync(DISABLED, 2)) or built[-1], seed=0
    ) as env:
        td = env.reset()
        mask = torch.tensor([[[True], [False]]])
        env.reset(td.clone().set("_reset", mask))
        env.reset(td.clone().set("_reset", mask), options={"start": 3})
    seen = [
        options if options is None else dict(options)
        for options in built[0].envs[0].options
    ]
    assert seen == [None, {}, {"start": 3}]


def test_a_mask_reaches_wrappers_whose_env_takes_it_out():
    with SerialEnv(
        1, lambda: gym.wrappers.vector.RecordEpisodeStatistics(sync(DISABLED)), seed=0
    ) as env:
        td = env.reset()
        for _ in range(2):
            td = env.step(env.rand_action(td))["next"]
            td = env.reset(
                td.clone().set(
                    "_reset", td["done"] | torch.tensor([[[True], [False], [False]]])
                )
            )
        lengths, steps = env.get("episode_lengths")[0], td["observation"][0, :, 2]
    assert lengths.tolist() == steps.tolist()
    assert lengths.max() == 2


@pytest.mark.slow
def test_an_ended_row_is_refused_where_the_vector_env_would_step_it():
    with ParallelEnv(1, lambda: async_(DISABLED, shared_memory=False), seed=0) as env:
        td = env.reset()
        while not td["done"].any():
            td = env.step(env.rand_action(td))["next"]
        with pytest.raises(ResetNeeded, match="have ended"):
            env.step(env.rand_action(td))
        assert invalid_transitions(env.rollout(40, break_when_any_done=False)) == 0


@pytest.mark.slow
def test_a_lost_last_observation_of_processes_is_found_out():
    """In a worker: an AsyncVectorEnv keeps memory as long as its process lives."""

    def make():
        rows = [partial(TellingEnv, reuses_buffer=True)] * 2
        return AsyncVectorEnv(rows, autoreset_mode=SAME)

    with (
        ParallelEnv(1, make, seed=0) as env,
        pytest.raises(EnvError, match=r"it reuses its buffer.*DISABLED"),
    ):
        env.rollout(30, break_when_any_done=False)


def test_episodes_that_end_where_they_start_can_be_declared():
    def make():
        return GymnasiumVectorAdapter(
            LoopVectorEnv(2, SAME, loses_ends=True, says_mode=False),
            autoreset_mode="SameStep",
            ends_where_it_starts=True,
        )

    with SerialEnv(1, make, seed=0) as env:
        assert env.rollout(20, break_when_any_done=False)["next", "done"].sum() > 4


# ---- modes ---------------------------------------------------------------------------------------


def test_a_mode_in_the_metadata_of_all_vector_envs_says_nothing(monkeypatch):
    def make():
        env = LoopVectorEnv(2)
        del env.metadata
        return env

    # As an Atari vector env does.
    monkeypatch.setitem(gym.vector.VectorEnv.metadata, "autoreset_mode", NEXT)
    with pytest.raises(SpecError, match="got nothing"):
        SerialEnv(1, make)


@pytest.mark.parametrize(
    ("factor", "dtype"),
    [(1, np.int64), (1, np.uint8), (1.0, np.float32), (2, np.int64)],
)
def test_flags_may_be_numbers(factor, dtype):
    class Numbers(LoopVectorEnv):
        def step(self, actions):
            observations, rewards, *flags, infos = super().step(actions)
            return (
                observations,
                rewards,
                *(flag.astype(dtype) * factor for flag in flags),
                infos,
            )

    with SerialEnv(1, lambda: Numbers(3, DISABLED), seed=0) as env:
        if factor == 2:
            with pytest.raises(
                EnvError, match=r"expected bool \(3,\) as t.*, got int64 \(3,\)"
            ):
                env.rollout(50, break_when_any_done=False)
        else:
            data = env.rollout(50, break_when_any_done=False)
            assert data["next", "terminated"].any()
            assert invalid_transitions(data) == 0


def cartpoles(**kwargs):
    """Make what a new user makes: without a mode it is Gymnasium's CartPole on arrays."""
    return gym.make_vec("CartPole-v1", 5, **kwargs)


@pytest.mark.parametrize("wrapper", [None, gym.wrappers.vector.RecordEpisodeStatistics])
def test_the_default_cartpole_is_reset_by_row(wrapper):
    rng = np.random.default_rng(0)

    def make():
        env = cartpoles(max_episode_steps=15)
        return env if wrapper is None else wrapper(env)

    with SerialEnv(2, make, seed=3) as env:
        native = cartpoles()
        root = env.reset()
        first, _ = native.reset(seed=seeding.episode_seed(3, 1, 0))
        assert np.array_equal(root["observation"][1].numpy(), first)
        lengths = torch.zeros(2, 5, 1, dtype=torch.int64)
        for _ in range(80):
            td = env.step(env.rand_action(root))["next"]
            lengths += 1
            assert torch.equal(td["truncated"], lengths == 15)
            mask = td["done"] | torch.from_numpy(rng.random((2, 5, 1)) < 0.1)
            root = env.reset(td.clone().set("_reset", mask))
            assert torch.equal(
                root["observation"][~mask[..., 0]], td["observation"][~mask[..., 0]]
            )
            started = root["observation"][mask[..., 0]]
            assert (started.abs() <= 0.05).all()
            assert len(started.unique()) == started.numel()
            assert not root["done"].any()
            lengths[mask] = 0


# ---- spaces --------------------------------------------------------------------------------------


class ManyEnv(gym.Env):
    """One entry for each kind of space."""

    kinds: ClassVar = {
        "box": gym.spaces.Box(0, 1, (2, 3), np.float64),
        "number": gym.spaces.Box(-1, 1, ()),
        "choice": gym.spaces.Discrete(4, start=2),
        "choices": gym.spaces.MultiDiscrete([3, 5]),
        "bits": gym.spaces.MultiBinary(3),
        "pair": gym.spaces.Tuple(
            (gym.spaces.Discrete(2), gym.spaces.Box(0, 255, (2,), np.uint8))
        ),
    }

    def __init__(self):
        self.observation_space = self.action_space = gym.spaces.Dict(self.kinds)
        self.last = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample(), {}

    def step(self, action):
        # A numpy scalar, in SyncVectorEnv.
        action = {**action, "number": np.asarray(action["number"])}
        assert self.action_space.contains(action), action
        self.t += 1
        return action, 0.5, self.t == 4, False, {}


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_space_of_fixed_shape(mode):
    def make():
        return SyncVectorEnv([ManyEnv] * 3, autoreset_mode=mode)

    with SerialEnv(1, make, seed=0) as env:
        td = env.step(env.rand_action(env.reset()))
        assert td.batch_size == (1, 3)
        assert {
            key: tuple(td["action", key].shape)
            for key in ManyEnv.kinds
            if key != "pair"
        } == {
            "box": (1, 3, 2, 3),
            "number": (1, 3, 1),
            "choice": (1, 3),
            "choices": (1, 3, 2),
            "bits": (1, 3, 3),
        }
        for key in ("box", "number", "choices", "bits", ("pair", "0"), ("pair", "1")):
            path = (key,) if isinstance(key, str) else key
            assert torch.equal(
                td[("action", *path)].double(), td[("next", *path)].double()
            )
        assert torch.equal(td["action", "choice"] + 2, td["next", "choice"])
        data = env.rollout(9, break_when_any_done=False)
    assert data["next", "done"].sum() == 6


@needs("box2d")
def test_pictures_of_all_rows_make_one():
    with SerialEnv(
        1,
        lambda: gym.make_vec(
            "CartPole-v1", 3, vectorization_mode="sync", render_mode="rgb_array"
        ),
    ) as env:
        env.reset()
        picture = env.render()[0]
    assert picture.dtype == np.uint8
    assert picture.shape == (800, 1200, 3)


# ---- Atari ---------------------------------------------------------------------------------------


def atari(mode, **kwargs):
    skip_without("atari")
    import ale_py.vector_env as ale

    settings = {
        "max_num_frames_per_episode": 24,
        "noop_max": 8,
        "stack_num": 1,
        "use_fire_reset": False,
    }
    return ale.AtariVectorEnv(
        "pong", 2, num_threads=1, autoreset_mode=mode, **settings, **kwargs
    )


@pytest.mark.long
def test_rows_of_an_atari_env_are_those_of_a_plain_loop():
    skip_without("atari")
    family = FAMILIES["vector_atari_same_step"]
    with (
        SerialEnv(1, family.make_env, seed=7) as env,
        contextlib.closing(Driven(family, env, 7)) as driven,
    ):
        assert driven.roll(60)[1] == 0
        assert driven.step_fused(60) > 0
