"""PPO of RLlib on CartPole, in two remote runners: `python -m tests.executor.facades.rllib_training`.

In a separate process, because RLlib starts its own Ray.
"""

from __future__ import annotations

import warnings

warnings.simplefilter("ignore")

import psutil
import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

from envherd.rllib import SingleAgentEnvRunner

ENOUGH = 100.0
MAX_ITERATIONS = 40


def main() -> None:
    """Train until the mean return is enough, and check that no process is left."""
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(
            env_runner_cls=SingleAgentEnvRunner,
            num_env_runners=2,
            num_envs_per_env_runner=4,
        )
        .training(
            train_batch_size_per_learner=2000,
            minibatch_size=250,
            num_epochs=8,
            lr=1e-3,
            gamma=0.99,
        )
        .rl_module(
            model_config=DefaultModelConfig(
                fcnet_hiddens=[64, 64], vf_share_layers=False
            )
        )
        .debugging(seed=0)
    )
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    algorithm = config.build_algo()
    returns = [0.0]
    while max(returns) < ENOUGH and len(returns) <= MAX_ITERATIONS:
        returns.append(algorithm.train()["env_runners"]["episode_return_mean"])
    algorithm.stop()
    ray.shutdown()
    assert max(returns) >= ENOUGH, returns
    # A helper may be kept for 10 s.
    _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=20)
    assert not alive, alive


if __name__ == "__main__":
    main()
