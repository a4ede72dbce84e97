"""Stable-Baselines3's PPO on Melting Pot: one row per agent, so all agents share one policy.

What it shows: only the import of `SubprocVecEnv` changes, and a Melting Pot substrate is used like any other env. The
rest is SB3's own. The workers import neither SB3 nor torch.

Run: python examples/sb3_meltingpot.py [--updates 3]
"""

import argparse

from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecMonitor

from envherd import MeltingPotFactory

# Was: from stable_baselines3.common.vec_env import ...
from envherd.sb3 import SubprocVecEnv

NUM_ENVS = 2
NUM_STEPS = 32

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--updates",
        type=int,
        default=3,
        help="of PPO; a few show that it runs, not that it learns",
    )
    updates = parser.parse_args().updates

    make_env = MeltingPotFactory(
        "collaborative_cooking__cramped", keys=("RGB",), max_steps=60
    )
    env = VecMonitor(SubprocVecEnv([make_env] * NUM_ENVS))
    shape, num_actions = env.observation_space.shape, env.action_space.n
    print(
        f"{NUM_ENVS} envs, {env.num_envs} rows; a row sees {shape} and has {num_actions} actions"
    )

    model = PPO("CnnPolicy", env, n_steps=NUM_STEPS, batch_size=64, n_epochs=2, seed=0)
    model.learn(updates * NUM_STEPS * env.num_envs)
    lengths = {int(info["l"]) for info in model.ep_info_buffer}
    print(
        f"{model.num_timesteps} agent steps in {updates} updates; episodes of {sorted(lengths)} steps"
    )
    env.close()
