"""RLlib's PPO on Melting Pot: the agents share a policy, and envherd's workers run the substrates.

What it shows: one line of an RLlib script changes, `env_runner_cls=`. The env needs no `MultiAgentEnv` around it.
The rest is RLlib's own.

`ray[rllib]` pins Gymnasium: create a virtual environment with `pip install "envherd[rllib,pettingzoo,meltingpot]"`.

Run: python examples/rllib_meltingpot.py [--iterations 3]
"""

import argparse
import os

# Melting Pot brings TensorFlow, which RLlib would import (docs/rllib.md).
os.environ["RLLIB_TEST_NO_TF_IMPORT"] = "1"

import gymnasium
import numpy as np
import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.env_to_module.observation_preprocessor import (
    SingleAgentObservationPreprocessor,
)
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.tune.registry import register_env

from envherd import MeltingPotFactory
from envherd.rllib import MultiAgentEnvRunner

NUM_ENVS = 4
NUM_STEPS = 200


class Scale(SingleAgentObservationPreprocessor):
    """Converts pictures to floats from 0 to 1 for RLlib's networks; the workers send bytes."""

    def recompute_output_observation_space(
        self,
        input_observation_space,
        input_action_space,
    ):
        """Return the spaces of the scaled pictures."""
        spaces = input_observation_space.spaces
        return gymnasium.spaces.Dict(
            {agent: gymnasium.spaces.Box(0, 1, spaces[agent].shape) for agent in spaces}
        )

    def preprocess(self, observation, episode):
        """Scale one agent's picture."""
        return observation.astype(np.float32) / 255


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--iterations",
        type=int,
        default=3,
        help="of PPO; a few show that it runs, not that it learns",
    )
    iterations = parser.parse_args().iterations

    make_env = MeltingPotFactory(
        "prisoners_dilemma_in_the_matrix__repeated", keys=("RGB",), max_steps=50
    )
    register_env("repeated", lambda _: make_env())
    config = (
        PPOConfig()
        .environment("repeated")
        .env_runners(
            env_runner_cls=MultiAgentEnvRunner,
            num_env_runners=0,
            num_envs_per_env_runner=NUM_ENVS,
        )
        .env_runners(env_to_module_connector=lambda *_: Scale())
        .multi_agent(policies={"shared"}, policy_mapping_fn=lambda *_, **__: "shared")
        .rl_module(
            model_config=DefaultModelConfig(
                conv_filters=[[8, 8, 8], [16, 4, 2]], head_fcnet_hiddens=[32]
            )
        )
        .training(
            train_batch_size_per_learner=NUM_STEPS, minibatch_size=100, num_epochs=1
        )
    )
    ray.init(include_dashboard=False, log_to_driver=False)
    algorithm = config.build_algo()
    for iteration in range(1, iterations + 1):
        sampled = algorithm.train()["env_runners"]
        steps, agents = (
            sampled["num_env_steps_sampled"],
            sampled["num_agent_steps_sampled"],
        )
        print(
            f"iteration {iteration}: {steps:.0f} steps of {len(agents)} agents, "
            f"mean return {sampled.get('episode_return_mean', float('nan')):.1f}"
        )
    algorithm.stop()
    ray.shutdown()
