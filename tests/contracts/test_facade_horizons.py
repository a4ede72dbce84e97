"""Short fixed horizons, as in RoboHive's tasks: the share of transitions that did not happen.

Every API is used according to its documentation, over 10,000 steps of envs that are truncated after 50.
"""

from __future__ import annotations

from tests.extras import skip_without

skip_without("sb3", "torchrl")

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from envherd.executor import Collector, ParallelEnv
from tests.executor.facades.sb3_envs import HorizonEnv
from tests.scale import scaled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

NUM_ENVS, NUM_STEPS, HORIZON = 8, scaled(255, full=1275), 50


def count_invalid(observation, following, reward):
    """Return how many of `[n]` transitions no env has made."""
    made = (following[:, 0] == observation[:, 0]) & (following[:, 1] == observation[:, 1] + 1)
    return int((~(made & (reward.reshape(-1) == following[:, 1]))).sum())


def from_tensordict(data):
    flat = data.reshape(-1)
    return [flat[key].numpy() for key in ("observation", ("next", "observation"), ("next", "reward"))]


def of_the_core():
    with ParallelEnv(NUM_ENVS, HorizonEnv, num_workers=2, seed=0) as env:
        return from_tensordict(env.rollout(NUM_STEPS, break_when_any_done=False))


def of_a_collector():
    with Collector(
        ParallelEnv(NUM_ENVS, HorizonEnv, num_workers=2),
        frames_per_batch=NUM_ENVS * NUM_STEPS // 5,
        total_frames=NUM_ENVS * NUM_STEPS,
    ) as batches:
        return from_tensordict(torch.cat([batch.clone() for batch in batches], 1))


def of_torchrl():
    from torchrl.envs import GymWrapper

    from envherd.executor.facades.torchrl import ParallelEnv as Facade

    env = Facade(NUM_ENVS, lambda: GymWrapper(HorizonEnv()))
    data = env.rollout(NUM_STEPS, break_when_any_done=False)
    env.close()
    return from_tensordict(data)


def of_sb3():
    from envherd.executor.facades.sb3 import SubprocVecEnv

    env = SubprocVecEnv([HorizonEnv] * NUM_ENVS)
    seen, observation = [], env.reset()
    for _ in range(NUM_STEPS):
        following, reward, done, infos = env.step(np.zeros(NUM_ENVS, np.int64))
        last = [
            info["terminal_observation"] if ended else row
            for info, ended, row in zip(infos, done, following, strict=True)
        ]
        seen.append((observation, np.stack(last), reward))
        observation = following
    env.close()
    return [np.concatenate(column) for column in zip(*seen, strict=True)]


def _of_vector_env(env):
    mode = env.metadata["autoreset_mode"]
    seen, (observation, _) = [], env.reset()
    for _ in range(NUM_STEPS):
        following, reward, terminated, truncated, infos = env.step(np.zeros(NUM_ENVS, np.int64))
        ended, last = terminated | truncated, following.copy()
        if mode is AutoresetMode.SAME_STEP and ended.any():
            last[ended] = np.stack(infos["final_obs"][ended])
        seen.append((observation, last, reward))
        observation = following
        if mode is AutoresetMode.DISABLED and ended.any():
            observation, _ = env.reset(options={"reset_mask": ended})
    env.close()
    return [np.concatenate(column) for column in zip(*seen, strict=True)]


def of_gymnasium(mode):
    from envherd.executor.facades.gymnasium import AsyncVectorEnv

    return _of_vector_env(AsyncVectorEnv([HorizonEnv] * NUM_ENVS, autoreset_mode=mode))


WAYS = {
    "core": of_the_core,
    "collector": of_a_collector,
    "torchrl": of_torchrl,
    "sb3": of_sb3,
    "gymnasium same step": lambda: of_gymnasium(AutoresetMode.SAME_STEP),
    "gymnasium disabled": lambda: of_gymnasium(AutoresetMode.DISABLED),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_transition_was_made(way):
    observation, following, reward = WAYS[way]()
    assert len(observation) == NUM_ENVS * NUM_STEPS
    assert (following[:, 1] == HORIZON).sum() >= NUM_ENVS * (NUM_STEPS // (HORIZON + 1))
    assert count_invalid(observation, following, reward) == 0


@pytest.mark.parametrize("make", [lambda: gymnasium.vector.SyncVectorEnv([HorizonEnv] * NUM_ENVS), None])
def test_next_step_autoreset_puts_two_percent_in(make):
    """In Gymnasium's default mode, with its own class or ours, steps that only reset are in the data."""
    data = _of_vector_env(make()) if make is not None else of_gymnasium(AutoresetMode.NEXT_STEP)
    share = count_invalid(*data) / (NUM_ENVS * NUM_STEPS)
    assert share == pytest.approx(1 / (HORIZON + 1), rel=0.05)
