"""`ExecutorOptions(episode_statistics=True)`: every row has its episode's return and length so far."""

import contextlib
import functools
import os
import signal

import numpy as np
import pytest
import torch

from envherd import (
    Collector,
    EpisodeLogger,
    ExecutorOptions,
    ParallelEnv,
    SerialEnv,
    SpecError,
)
from envherd.workers.testing import CountingEnv
from tests.envs.counting_envs import AgentsEnv, TextEnv
from tests.executor.drives import act, fused, reset_by_hand, rolled, sent
from tests.extras import needs

ON = ExecutorOptions(episode_statistics=True)
MAKERS = {
    "parallel": functools.partial(ParallelEnv, num_workers=2),
    "serial": SerialEnv,
}
ENVS = [
    functools.partial(CountingEnv, 4),
    functools.partial(CountingEnv, 7),
    functools.partial(CountingEnv, 5),
]


def made(name, *arguments, **keywords):
    return MAKERS[name](*arguments, **{"options": ON, "seed": 3, **keywords})


def without_time(td):
    return td.exclude(("episode", "time"), ("next", "episode", "time"))


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.slow
def test_the_rows_of_a_rollout_sum_up_their_episodes(name):
    with made(name, 3, ENVS) as env:
        data = env.rollout(40, act, break_when_any_done=False)
        more = env.rollout(3, act, auto_reset=False, break_when_any_done=False)
    data = torch.cat([data, more], 1)
    ends = 0
    for row in data.unbind(0):
        total = length = 0
        for step in row.unbind(0):
            assert step["episode", "return"].item() == total
            assert step["episode", "length"].item() == length
            total, length = total + step["next", "reward"].item(), length + 1
            assert step["next", "episode", "return"].item() == total
            assert step["next", "episode", "length"].item() == length
            assert (
                step["next", "episode", "time"].item()
                > step["episode", "time"].item()
                >= 0
            )
            if step["next", "done"].item():
                ends += 1
                total = length = 0
    assert ends > 20
    assert data["next", "episode", "return"].dtype == data["next", "reward"].dtype
    assert data["next", "episode", "length"].dtype == torch.int64


@pytest.mark.parametrize("drive", [fused, reset_by_hand, rolled, sent])
@pytest.mark.slow
def test_all_ways_to_step_give_the_same_statistics(drive):
    with made("parallel", 3, ENVS) as one, made("serial", 3, ENVS) as other:
        for mine, theirs in zip(drive(one, 12), drive(other, 12), strict=True):
            assert (without_time(mine) == without_time(theirs)).all()
            assert ("next", "episode", "return") in mine or (
                "episode",
                "return",
            ) in mine


def test_agents_have_returns_of_their_own():
    with made("serial", 2, functools.partial(AgentsEnv, 4)) as env:
        data = env.rollout(9, act, break_when_any_done=False)
        rewards = data["next", "agents", "reward"]
        assert data["next", "agents", "episode", "return"].shape == rewards.shape
        assert (
            data["next", "agents", "episode"].batch_size
            == data["next", "agents"].batch_size
        )
        assert (
            data["next", "agents", "episode", "return"][:, 3] == rewards[:, :4].sum(1)
        ).all()
        assert (data["next", "episode", "length"][:, 3] == 4).all()


@pytest.mark.slow
@pytest.mark.broken_pool
def test_a_lost_worker_ends_no_episode_of_the_logger():
    options = ExecutorOptions(episode_statistics=True, on_worker_loss="restart")
    with ParallelEnv(
        2, functools.partial(CountingEnv, 50), num_workers=2, seed=0, options=options
    ) as env:
        root = env.reset()
        for _ in range(3):
            td, root = env.step_and_maybe_reset(act(root))
        os.kill(env.statistics().workers[1].pid, signal.SIGKILL)
        td, root = env.step_and_maybe_reset(act(root))
        assert td["next", "interrupted"].flatten().tolist() == [False, True]
        assert td["next", "episode", "length"].flatten().tolist() == [4, 3]
        assert root["episode", "length"].flatten().tolist() == [4, 0]
        logger = EpisodeLogger()
        assert logger.add(td) == []
        assert logger.num_steps == 2


@pytest.mark.slow
def test_infos_and_text_stay_next_to_episode_statistics():
    options = ExecutorOptions(episode_statistics=True, infos={"lives": int})
    with made("parallel", 2, functools.partial(TextEnv, 4), options=options) as env:
        data = env.rollout(6, act, break_when_any_done=False)
        assert data["next", "episode", "length"][0].flatten().tolist() == [
            1,
            2,
            3,
            4,
            1,
            2,
        ]
        assert not data["next", "info", "_lives"].any()
        seed = data["next", "observation"][0, 3, 0].item()
        assert data["next"][0, 3]["text"].startswith(f"{seed}:4")


def infos_of(ours, theirs, num_steps=80):
    """Step two vector envs of three CartPoles alike, and yield the infos of both; close them at the end."""
    rng = np.random.default_rng(0)
    with contextlib.closing(ours), contextlib.closing(theirs):
        for _ in range(num_steps):
            action = rng.integers(0, 2, 3)
            yield ours.step(action)[-1], theirs.step(action)[-1]


@needs("gymnasium")
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_the_gymnasium_facade_has_the_infos_of_gymnasiums_wrapper(mode):
    import gymnasium
    from gymnasium.wrappers.vector import RecordEpisodeStatistics

    from envherd.gymnasium import AsyncVectorEnv

    makers = [lambda: gymnasium.make("CartPole-v1")] * 3
    ours = AsyncVectorEnv(makers, num_workers=2, options=ON, autoreset_mode=mode)
    theirs = RecordEpisodeStatistics(
        gymnasium.vector.SyncVectorEnv(makers, autoreset_mode=mode)
    )
    assert np.array_equal(ours.reset(seed=1)[0], theirs.reset(seed=1)[0])
    assert ours.observation_space == theirs.observation_space
    ends = 0
    for found, expected in infos_of(ours, theirs):
        assert found.keys() == expected.keys()
        for name in "rl" if "episode" in expected else "":
            assert np.array_equal(found["episode"][name], expected["episode"][name])
        assert np.array_equal(found.get("_episode"), expected.get("_episode"))
        ends += "episode" in expected
    assert ends > 5


@needs("sb3")
@pytest.mark.slow
def test_the_sb3_facade_has_the_infos_of_sb3s_monitor():
    import gymnasium
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv

    from envherd.sb3 import SubprocVecEnv

    def make():
        """Rewards whose sums have more than the six digits that Monitor keeps."""
        return gymnasium.wrappers.TransformReward(
            gymnasium.make("CartPole-v1"), lambda reward: reward / 1024
        )

    ours, theirs = (
        SubprocVecEnv([make] * 3, num_workers=2, options=ON),
        DummyVecEnv([lambda: Monitor(make())] * 3),
    )
    for env in (ours, theirs):
        env.seed(1)
    assert np.array_equal(ours.reset(), theirs.reset())
    ends = 0
    for found, expected in infos_of(ours, theirs):
        for mine, other in zip(found, expected, strict=True):
            assert mine.keys() == other.keys()
            if "episode" in other:
                ends += 1
                assert {**mine["episode"], "t": 0} == {**other["episode"], "t": 0}
    assert ends > 5


@needs("sb3")
@pytest.mark.slow
def test_the_sb3_facade_gives_each_agent_its_own_return():
    from envherd.sb3 import SubprocVecEnv

    with contextlib.closing(
        SubprocVecEnv([functools.partial(AgentsEnv, 3)] * 2, num_workers=1, options=ON)
    ) as env:
        env.reset()
        total = sum(env.step([0, 1, 2, 3, 4, 0])[1] for _ in range(2))
        _, reward, _, infos = env.step([0, 1, 2, 3, 4, 0])
        assert [info["episode"]["r"] for info in infos] == (total + reward).tolist()
        assert {info["episode"]["l"] for info in infos} == {3}
        assert env.observation_space.shape == (3,)


@needs("gymnasium")
@pytest.mark.slow
def test_rows_of_a_vector_env_end_one_by_one():
    import gymnasium

    def make():
        return gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync")

    with made("serial", 2, make) as env:
        data = env.rollout(60, break_when_any_done=False)
    assert data["next", "episode", "return"].shape == (2, 60, 3, 1)
    ends = 0
    for row in data.permute(0, 2, 1).flatten(0, 1).unbind(0):
        length = 0
        for step in row.unbind(0):
            length += 1
            assert (
                step["next", "episode", "length"].item()
                == step["next", "episode", "return"].item()
                == length
            )
            if step["next", "done"].item():
                ends, length = ends + 1, 0
    assert ends > 6


def test_an_env_that_has_such_an_observation_is_refused():
    from dataclasses import replace

    from envherd.shm.specs import LeafSpec

    class Taken(CountingEnv):
        def __init__(self):
            super().__init__()
            self.spec = replace(
                self.spec,
                observation=(
                    *self.spec.observation,
                    LeafSpec(("episode", "return"), (1,)),
                ),
            )

    with pytest.raises(
        SpecError,
        match="episode_statistics failed: expected an env without an observation named",
    ):
        made("serial", 1, Taken)


def test_the_option_is_off_by_default():
    with SerialEnv(1, CountingEnv) as env:
        assert "episode" not in set(env.rollout(2)["next"].keys())
        with pytest.raises(ValueError, match="episode_statistics=True"):
            EpisodeLogger().add(env.rollout(2))


class Recorder:
    """As TensorBoard's and as Weights & Biases' writer."""

    def __init__(self):
        self.rows = []


class Board(Recorder):
    def add_scalar(self, tag, value, step=None):
        self.rows.append((tag, value, step))


class Run(Recorder):
    def log(self, scalars, step=None):
        self.rows += [(tag, value, step) for tag, value in scalars.items()]


def test_the_logger_writes_means_over_the_episodes_that_ended():
    board, run = Board(), Run()
    logger = EpisodeLogger(board, run, window=2)
    with made("serial", 3, ENVS) as env:
        for data in Collector(
            env, act, frames_per_batch=36, total_frames=72, close_env=False
        ):
            ended = logger.add(data)
            mask = data["next", "done"]
            assert [one.length for one in ended] == data["next", "episode", "length"][
                mask
            ].tolist()
            scalars = logger.write(env.statistics(), loss=0.5)
            assert scalars["loss"] == 0.5
            assert scalars["episode/return"] == pytest.approx(
                data["next", "episode", "return"][mask].mean().item()
            )
            assert scalars["envherd/env_steps"] == logger.num_steps
        assert board.rows == run.rows
        assert {step for _, _, step in board.rows} == {36, 72}
        assert len(logger.last) == 2
        assert logger.mean_length == sum(one.length for one in logger.last) / 2
        assert logger.num_episodes == env.statistics().episodes
        assert "episode/return" not in logger.write()


def test_the_logger_takes_agents_and_different_tasks():
    logger = EpisodeLogger()
    with made(
        "serial", 2, [functools.partial(AgentsEnv, 4), functools.partial(AgentsEnv, 3)]
    ) as env:
        data = env.rollout(4, act, break_when_any_done=False)
        lengths = sorted(one.length for one in logger.add(data))
        assert lengths == [3, 4]
        scalars = logger.write()
        each = [
            value
            for tag, value in scalars.items()
            if tag.startswith("agents/episode/return/")
        ]
        assert len(each) == data["next", "agents", "reward"].shape[2]
        assert scalars["agents/episode/return"] == pytest.approx(sum(each) / len(each))


def test_the_logger_refuses_what_cannot_write():
    with pytest.raises(TypeError, match="expected writers with add_scalar"):
        EpisodeLogger("runs")
    with pytest.raises(ValueError, match="window"):
        EpisodeLogger(window=0)


@needs("tensorboard")
@pytest.mark.slow
def test_tensorboard_reads_what_the_logger_wrote(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    logger = EpisodeLogger(writer)
    with made("serial", 3, ENVS) as env:
        logger.add(env.rollout(12, act, break_when_any_done=False))
        scalars = logger.write(env.statistics())
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (event,) = events.Scalars("episode/return")
    assert event.value == pytest.approx(scalars["episode/return"])
    assert event.step == 36


WITH_WANDB = """
import functools, sys, wandb
from envherd import EpisodeLogger, ExecutorOptions, SerialEnv
from envherd.workers.testing import CountingEnv

run = wandb.init(mode="offline", dir=sys.argv[1], project="envherd")
logger = EpisodeLogger(run)
options = ExecutorOptions(episode_statistics=True)
with SerialEnv(3, functools.partial(CountingEnv, 4), seed=0, options=options) as env:
    for _ in range(2):  # a step is complete when the next one comes
        logger.add(env.rollout(4))
        scalars = logger.write(env.statistics())
assert run.step == 24, run.step
run.finish()
"""


@needs("wandb")
@pytest.mark.long
def test_weights_and_biases_takes_what_the_logger_writes(script_host, tmp_path):
    done = script_host.run_text(WITH_WANDB, str(tmp_path), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"episode/return" in written.read_bytes()
