"""RLlib's EnvRunners. Their packages: `pip install --no-deps dm-tree lz4 ormsgpack pyarrow tensorboardX`.

`ray[rllib]` itself requires an older Gymnasium than the one tested here; its EnvRunners also run with this one.

`python -m benchmarks.rllib` compares the runners of `facades.rllib` with RLlib's own. It needs the extra
`rllib` and those of Melting Pot and PettingZoo.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

# ---- the facade's runners and RLlib's own ------------------------------------------------------

ROUNDS = 7
SUBSTRATE = "commons_harvest__open"


def _substrate(_: Any) -> Any:
    """Build a substrate for RLlib's own runner."""
    from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv

    from envherd.executor import MeltingPotFactory
    from envherd.executor.facades.pettingzoo import parallel_env

    return ParallelPettingZooEnv(parallel_env(MeltingPotFactory(SUBSTRATE, keys=("RGB",))))


def _bare_substrate(_: Any) -> Any:
    from envherd.executor import MeltingPotFactory

    return MeltingPotFactory(SUBSTRATE, keys=("RGB",))()


def cartpole_runners() -> dict[str, Any]:
    """Return local runners with 8 CartPoles: RLlib's, with one process and with one per env; ours."""
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

    from envherd.executor.facades import rllib

    def make(kind: Any, mode: str) -> Any:
        config = PPOConfig().environment("CartPole-v1").debugging(seed=0)
        config.env_runners(num_env_runners=0, num_envs_per_env_runner=8, gym_env_vectorize_mode=mode)
        return kind(config=config, worker_index=0)

    return {
        "RLlib, sync": make(SingleAgentEnvRunner, "sync"),
        "RLlib, async": make(SingleAgentEnvRunner, "async"),
        "envherd": make(rllib.SingleAgentEnvRunner, "sync"),
    }


def substrate_runners() -> dict[str, Any]:
    """Return local runners with 8 substrates of 7 players: RLlib's and ours."""
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
    from ray.tune.registry import register_env

    from envherd.executor.facades import rllib

    register_env("substrate", _substrate)
    register_env("bare substrate", _bare_substrate)

    def make(kind: Any, name: str) -> Any:
        config = PPOConfig().environment(name, disable_env_checking=True).debugging(seed=0)
        config.env_runners(num_env_runners=0, num_envs_per_env_runner=8)
        config.multi_agent(policies={"shared"}, policy_mapping_fn=lambda *_, **__: "shared")
        config.rl_module(model_config=DefaultModelConfig(conv_filters=[[4, 8, 8]]))
        return kind(config=config, worker_index=0)

    return {
        "RLlib, sync": make(MultiAgentEnvRunner, "substrate"),
        "envherd": make(rllib.MultiAgentEnvRunner, "bare substrate"),
    }


def compare(runners: dict[str, Any], num_timesteps: int, **how: Any) -> dict[str, list[float]]:
    """Return env steps a second of each runner, taken in turn, `ROUNDS` of each after one that is not counted."""
    rates: dict[str, list[float]] = {name: [] for name in runners}
    for turn in range(ROUNDS + 1):
        for name, runner in runners.items():
            start = time.perf_counter()
            runner.sample(num_timesteps=num_timesteps, **how)
            if turn:
                rates[name].append(num_timesteps / (time.perf_counter() - start))
    for runner in runners.values():
        runner.stop()
    return rates


def main() -> None:
    """Compare and print; torch has one thread, as in RLlib's remote runners."""
    torch.set_num_threads(1)
    cases = {
        "8 CartPoles, with the policy": lambda: compare(cartpole_runners(), 1600),
        f"8 {SUBSTRATE}, random actions": lambda: compare(substrate_runners(), 240, random_actions=True),
    }
    for title, measure in cases.items():
        print(title)
        for name, rates in measure().items():
            low, middle, high = min(rates), statistics.median(rates), max(rates)
            print(f"  {name:18} {middle:8,.0f} env steps/s (from {low:,.0f} to {high:,.0f})")


if __name__ == "__main__":
    main()
