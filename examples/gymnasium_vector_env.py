"""A Gymnasium vector env with one changed import: random actions, with the statistics of episodes."""

from __future__ import annotations

import gymnasium
import numpy as np

from envherd import ExecutorOptions
from envherd.gymnasium import AsyncVectorEnv

NUM_ENVS, NUM_STEPS = 4, 300


def make_env() -> gymnasium.Env:
    """Build one env; runs in a worker process."""
    return gymnasium.make("CartPole-v1")


def main() -> None:
    """Step the envs and print the statistics of their episodes."""
    # The infos of Gymnasium's RecordEpisodeStatistics.
    options = ExecutorOptions(episode_statistics=True)
    envs = AsyncVectorEnv(
        [make_env] * NUM_ENVS, num_workers=2, autoreset_mode="SameStep", options=options
    )
    returns: list[float] = []
    envs.reset(seed=0)
    envs.action_space.seed(0)
    for _ in range(NUM_STEPS):
        _, _, terminations, truncations, infos = envs.step(envs.action_space.sample())
        ended = terminations | truncations
        if ended.any():
            # infos["final_obs"][i] is the true last observation of an episode that ended.
            returns += infos["episode"]["r"][ended].tolist()
    envs.close()
    print(
        f"{len(returns)} episodes in {NUM_ENVS * NUM_STEPS} steps, mean return {np.mean(returns):.1f}"
    )


if __name__ == "__main__":
    main()
