"""RLlib's env runners on the executor give RLlib's own episodes, and train.

RLlib needs a Gymnasium version that other tests do not support: `python -m tools.compat --rows RLlib` creates an
environment for it and runs this file there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.extras import needs, skip_without

skip_without("rllib")

os.environ["RLLIB_TEST_NO_TF_IMPORT"] = "1"  # docs/rllib.md says why

import gymnasium
import numpy as np
import psutil
import pytest
import tree

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.callbacks.callbacks import RLlibCallback
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.env.multi_agent_env_runner import (
        MultiAgentEnvRunner as TheirMultiAgentEnvRunner,
    )
    from ray.rllib.env.single_agent_env_runner import (
        SingleAgentEnvRunner as TheirSingleAgentEnvRunner,
    )
    from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
    from ray.tune.registry import register_env

from envherd.executor import ExecutorOptions, MeltingPotFactory
from envherd.rllib import (
    MultiAgentEnvRunner,
    MultiAgentVectorEnv,
    SingleAgentEnvRunner,
)
from envherd.workers.errors import ActionError, EnvError, SpecError
from tests.envs import rllib_envs
from tests.envs.rllib_context import make_lonely
from tests.envs.rllib_envs import AGENTS, Corridor, Leaving, Nameless, Together, Turns

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

NUM_ENVS = 3


def make_config(env: Any, env_config: dict[str, Any] | None = None) -> PPOConfig:
    """Return the config of a runner with three envs, seeded."""
    return (
        PPOConfig()
        .environment(env, env_config=env_config or {}, disable_env_checking=True)
        .env_runners(
            num_env_runners=0,
            num_envs_per_env_runner=NUM_ENVS,
            rollout_fragment_length=10,
        )
        .debugging(seed=3)
    )


def multi_agent(config: PPOConfig, agents: Any = AGENTS) -> PPOConfig:
    """Give each agent a policy by its name."""
    return config.multi_agent(
        policies=set(agents), policy_mapping_fn=lambda agent, *_, **__: agent
    )


def sampled(runner_class: Any, config: PPOConfig, num_samples: int = 2) -> list[Any]:
    """Return the episodes of some samples of one runner."""
    runner = runner_class(config=config, worker_index=0)
    try:
        return [episode for _ in range(num_samples) for episode in runner.sample()]
    finally:
        runner.stop()


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    """Compare episodes except for their random ids."""
    assert len(ours) == len(theirs)
    assert any(episode.is_done for episode in ours)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.is_terminated, one.is_truncated) == (
            other.is_terminated,
            other.is_truncated,
        )
        for name in ("get_observations", "get_actions", "get_rewards", "get_infos"):
            tree.map_structure(
                np.testing.assert_array_equal,
                getattr(one, name)(),
                getattr(other, name)(),
            )


class InWorkers(SingleAgentEnvRunner):
    """Does not leave cheap envs to RLlib's own vector env."""

    num_env_workers = 2


def make_corridor(config: Any) -> gymnasium.Env:
    """Build an env from RLlib's context."""
    return Corridor({**config, "runner": config.worker_index})


@pytest.mark.parametrize(
    ("env", "env_config"),
    [
        ("CartPole-v1", {"sutton_barto_reward": True}),
        (make_corridor, {"length": 2}),
        ("corridor", {"length": 3}),
    ],
    ids=["id", "function", "registered name"],
)
def test_episodes_of_single_agents_are_rllibs(
    env: Any, env_config: dict[str, Any]
) -> None:
    register_env(
        "corridor",
        lambda config: rllib_envs.Corridor({**config, "runner": config.worker_index}),
    )
    config = make_config(env, env_config)
    assert_same(sampled(InWorkers, config), sampled(TheirSingleAgentEnvRunner, config))


def test_an_id_that_only_the_script_has_registered() -> None:
    def make(**_: Any) -> gymnasium.Env:
        return gymnasium.make("CartPole-v1").unwrapped

    gymnasium.register("OnlyHere-v0", make, max_episode_steps=4)
    episodes = sampled(InWorkers, make_config("OnlyHere-v0"), 1)
    assert {len(episode) for episode in episodes if episode.is_done} == {4}


class InPortablePool(MultiAgentEnvRunner):
    """Runs the workers as on a system without forks."""

    executor_options = ExecutorOptions(start_method="portable")


@pytest.mark.parametrize(
    ("env", "runner_class"),
    [
        (Together, MultiAgentEnvRunner),
        (Turns, MultiAgentEnvRunner),
        (Leaving, MultiAgentEnvRunner),
        (Leaving, InPortablePool),
    ],
)
def test_episodes_of_agents_are_rllibs(env: Any, runner_class: Any) -> None:
    config = multi_agent(make_config(env))
    ours, theirs = (
        sampled(runner_class, config),
        sampled(TheirMultiAgentEnvRunner, config),
    )
    assert_same(ours, theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.env_t_to_agent_t == other.env_t_to_agent_t
        assert one.agent_episodes.keys() == other.agent_episodes.keys()
        for agent, episode in one.agent_episodes.items():
            assert episode.is_terminated == other.agent_episodes[agent].is_terminated
            assert episode.is_truncated == other.agent_episodes[agent].is_truncated


@needs("pettingzoo")
def test_parallel_envs_of_pettingzoo_need_no_wrapper() -> None:
    from mpe2 import simple_spread_v3

    agents = ("agent_0", "agent_1", "agent_2")

    def make(_: Any) -> Any:
        return simple_spread_v3.parallel_env(max_cycles=7)

    ours = sampled(MultiAgentEnvRunner, multi_agent(make_config(make), agents))
    register_env("spread", lambda config: ParallelPettingZooEnv(make(config)))
    assert_same(
        ours,
        sampled(TheirMultiAgentEnvRunner, multi_agent(make_config("spread"), agents)),
    )


@needs("meltingpot", "pettingzoo")
def test_substrates_need_no_wrapper() -> None:
    factory = MeltingPotFactory(
        "prisoners_dilemma_in_the_matrix__repeated", keys=("RGB",), max_steps=5
    )
    config = multi_agent(make_config(lambda _: factory()), ("player_0", "player_1"))
    config.rl_module(model_config=DefaultModelConfig(conv_filters=[[4, 8, 8]]))
    runner = MultiAgentEnvRunner(config=config, worker_index=0)
    try:
        episodes = runner.sample(random_actions=True)
    finally:
        runner.stop()
    done = [episode for episode in episodes if episode.is_done]
    assert {len(episode) for episode in done} == {5}
    assert done[0].get_observations()["player_1"].shape == (6, 40, 40, 3)


class Noting(RLlibCallback):
    """Records its arguments."""

    noted: list[Any]

    def on_environment_created(
        self, *, env_runner: Any, env: Any, env_context: Any, **_: Any
    ) -> None:
        type(self).noted = [
            type(env).__name__,
            dict(env_context),
            env_context.worker_index,
            env_runner.num_envs,
        ]


@pytest.mark.parametrize(
    ("runner_class", "config", "vector_env"),
    [
        (
            SingleAgentEnvRunner,
            make_config("CartPole-v1", {"sutton_barto_reward": True}),
            "AsyncVectorEnv",
        ),
        (
            MultiAgentEnvRunner,
            multi_agent(make_config(Together, {"length": 4})),
            "MultiAgentVectorEnv",
        ),
    ],
)
def test_workers_options_and_callbacks(
    runner_class: Any, config: Any, vector_env: str
) -> None:
    class Three(runner_class):
        num_env_workers = 3
        executor_options = ExecutorOptions(step_timeout_s=7)

    config = config.copy(copy_frozen=False).callbacks(Noting)
    runner = Three(config=config, worker_index=0)
    executor = runner.env.unwrapped.executor
    assert len(executor.statistics().workers) == 3
    assert executor.engine.options.step_timeout_s == 7
    assert Noting.noted == [vector_env, config.env_config, 0, NUM_ENVS]
    assert config.env in ("CartPole-v1", Together)
    pids = [worker.pid for worker in executor.statistics().workers]
    runner.make_env()  # what RLlib does after a failure
    assert not any(map(psutil.pid_exists, pids))
    runner.stop()
    runner.stop()


def test_a_remote_runner_has_a_worker_for_each_cpu_of_it() -> None:
    config = make_config(Corridor, {"length": 3}).env_runners(
        num_env_runners=2, num_cpus_per_env_runner=2
    )
    runner = SingleAgentEnvRunner(config=config, worker_index=1)
    assert len(runner.env.unwrapped.executor.statistics().workers) == 2
    runner.stop()


def test_a_worker_does_not_import_rllib_for_the_context() -> None:
    runner = SingleAgentEnvRunner(
        config=make_config(make_lonely, {"length": 3}), worker_index=0
    )
    assert runner.env.unwrapped.call("knows_rllib") == (False,) * NUM_ENVS
    assert (
        runner.env.unwrapped.call("context")
        == ({"length": 3, "worker_index": 0},) * NUM_ENVS
    )
    assert (
        runner.env.unwrapped.call("overridden")
        == ({"length": 3, "worker_index": 4},) * NUM_ENVS
    )
    runner.stop()


def test_a_config_without_an_env() -> None:
    with pytest.raises(ValueError, match="expected an env in the config, got none"):
        SingleAgentEnvRunner(config=make_config(None), worker_index=0)


@pytest.mark.broken_pool
def test_a_lost_worker_is_a_failed_step_for_rllib(tmp_path: Path) -> None:
    config = multi_agent(make_config(Together, {"trap": str(tmp_path / "sprung")}))
    config.fault_tolerance(restart_failed_sub_environments=True)
    assert sum(map(len, sampled(MultiAgentEnvRunner, config, 1))) >= 30
    assert (tmp_path / "sprung").exists()


@pytest.mark.broken_pool
def test_a_lost_worker_that_is_replaced_truncates_its_episodes(tmp_path: Path) -> None:
    class Restarting(MultiAgentEnvRunner):
        num_env_workers = 1
        executor_options = ExecutorOptions(on_worker_loss="restart")

    config = multi_agent(make_config(Together, {"trap": str(tmp_path / "sprung")}))
    episodes = sampled(Restarting, config, 1)
    cut = [episode for episode in episodes if len(episode) == 3]
    assert len(cut) == NUM_ENVS
    for episode in cut:
        assert episode.is_truncated
        last, before = episode.get_observations(-1), episode.get_observations(-2)
        assert set(last) == set(AGENTS)
        assert all((last[agent] == before[agent]).all() for agent in AGENTS)
        assert episode.get_rewards(-1) == dict.fromkeys(AGENTS, 0.0)
    assert {len(episode) for episode in episodes if episode.is_done} == {3, 6}


class TestVectorEnv:
    def test_wrong_actions_step_no_env(self) -> None:
        with closing(
            MultiAgentVectorEnv([lambda: Together({})] * 2, num_workers=1)
        ) as env:
            env.reset(seed=0)
            whole = {"first": 0, "second": np.zeros(2, np.float32), "third": 1}
            with pytest.raises(
                ActionError,
                match="expected 2 dicts of actions, one for each env, got 1",
            ):
                env.step([whole])
            with pytest.raises(ActionError, match=r"got none of third \(env 1\)"):
                env.step([whole, {"first": 0, "second": np.zeros(2, np.float32)}])
            assert env.get_attr("t") == (0, 0)

    def test_agents_that_were_not_named(self) -> None:
        with closing(MultiAgentVectorEnv([lambda: Nameless({})], num_workers=1)) as env:
            env.reset()
            with pytest.raises(
                EnvError,
                match="expected agents among first, second, third, got 'fourth'",
            ) as caught:
                env.step([{"first": 0, "second": np.zeros(2, np.float32), "third": 1}])
            assert "SpecError" in str(caught.value) or isinstance(
                caught.value, SpecError
            )


@needs("meltingpot", "pettingzoo")
def test_ppo_trains_on_a_substrate(run_example: Callable[..., str]) -> None:
    printed = run_example("rllib_meltingpot", "--iterations", "1")
    assert re.search(
        r"^iteration 1: 200 steps of 2 agents, mean return \d", printed, re.MULTILINE
    ), printed


def test_ppo_learns_cartpole_in_remote_runners() -> None:
    command = [sys.executable, "-m", "tests.executor.facades.rllib_training"]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
