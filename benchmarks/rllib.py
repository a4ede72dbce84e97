"""RLlib's EnvRunners, where their packages are: `pip install --no-deps dm-tree lz4 ormsgpack pyarrow tensorboardX`.

`ray[rllib]` itself asks for an older Gymnasium than the one that is tested here; its EnvRunners run with this one too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

NEEDED = ("ormsgpack", "tree", "lz4", "pyarrow")


def is_there() -> bool:
    """Return whether EnvRunners can be made."""
    return all(importlib.util.find_spec(name) is not None for name in NEEDED)


def start(num_runners: int, envs_per_runner: int, num_steps: int) -> tuple[Callable[[], int], Callable[[], None]]:
    """Start EnvRunners with CartPoles and a policy like `cluster.Policy`.

    Returns:
        What samples `num_steps` of each env and returns how many env steps it got, and what stops the runners.
    """
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.env.env_runner_group import EnvRunnerGroup
    from ray.rllib.execution.rollout_ops import synchronous_parallel_sample

    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(
            num_env_runners=num_runners,
            num_envs_per_env_runner=envs_per_runner,
            rollout_fragment_length=num_steps,
            batch_mode="truncate_episodes",
            num_cpus_per_env_runner=4,
        )
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64], fcnet_activation="tanh"))
    )
    group = EnvRunnerGroup(config=config, local_env_runner=False)

    def sample() -> int:
        episodes: Any = synchronous_parallel_sample(worker_set=group, concat=True, _uses_new_env_runners=True)
        return sum(map(len, episodes))

    return sample, group.stop
