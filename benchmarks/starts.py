"""Time the starts of a facade in fresh programs, with and without a block of `preloaded` around their imports.

    python -m benchmarks.starts [CASE ...] [--rounds 3]

Columns: seconds of the program's imports, of its first start until the first reset, and of its next start.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from typing import Any

from envherd import preloaded

#: Case -> modules that a block of `preloaded` names.
CASES = {
    "gym": ("torchrl.envs", "gymnasium"),
    "meltingpot": ("torchrl.envs", "meltingpot.substrate"),
    "rllib": ("ray.rllib.env.multi_agent_env", "benchmarks.rllib_agents"),
}


def torchrl_starts(case: str) -> list[float]:
    """Return the seconds of the imports and of two starts of four TorchRL envs in two workers."""
    began = time.perf_counter()
    from torchrl.envs import GymEnv, MeltingpotEnv

    from envherd.executor.facades.torchrl import ParallelEnv

    make: Any = (lambda: GymEnv("CartPole-v1")) if case == "gym" else (lambda: MeltingpotEnv("commons_harvest__open"))
    seconds = [time.perf_counter() - began]
    for _ in range(2):
        began = time.perf_counter()
        env = ParallelEnv(4, make, num_processes=2)
        env.reset()
        seconds.append(time.perf_counter() - began)
        env.close()
    return seconds


def rllib_starts(_case: str) -> list[float]:
    """Return the seconds of the imports and of two builds of PPO with four envs of three agents in two workers."""
    began = time.perf_counter()
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig

    from benchmarks.rllib_agents import ThreeAgents
    from envherd.executor.facades.rllib import MultiAgentEnvRunner

    class Runner(MultiAgentEnvRunner):
        num_env_workers = 2

    ray.init(address="local", num_cpus=2, log_to_driver=False)
    config = PPOConfig().environment(ThreeAgents)
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=4, env_runner_cls=Runner)
    config.multi_agent(policies={"shared"}, policy_mapping_fn=lambda *_, **__: "shared")
    seconds = [time.perf_counter() - began]
    for _ in range(2):
        began = time.perf_counter()
        algorithm = config.build_algo()
        seconds.append(time.perf_counter() - began)
        algorithm.stop()
    return seconds


def main() -> None:
    """Read the command line; run the programs in turn and print a line each, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], metavar="CASE", help=f"of: {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", choices=["plain", "preloaded"], help="be one program with one case")
    arguments = parser.parse_args()
    if arguments.way is None:
        for _ in range(arguments.rounds):
            for case in arguments.cases or ("gym", "meltingpot"):
                for way in ("plain", "preloaded"):
                    command = [sys.executable, "-m", "benchmarks.starts", case, "--way", way]
                    environment = {**os.environ, "RLLIB_TEST_NO_TF_IMPORT": "1"}
                    subprocess.run(command, env=environment, stderr=subprocess.DEVNULL, check=True)
        return
    (case,) = arguments.cases
    with preloaded(*CASES[case]) if arguments.way == "preloaded" else contextlib.nullcontext():
        seconds = (rllib_starts if case == "rllib" else torchrl_starts)(case)
    print(case, arguments.way, "imports {:.2f} first {:.2f} next {:.2f}".format(*seconds), flush=True)


if __name__ == "__main__":
    main()
