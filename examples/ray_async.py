"""Over several machines, a slow node does not delay the others.

What it shows: `send` and `recv(min_envs=K)` across nodes. Envs 0-2 are quick, envs 3-5 are on another node and ten
times slower; the first three envs that are ready are mostly the quick ones, which do not wait for the slow node.

Run: python examples/ray_async.py [--address HOST:PORT]    (without an address, on two nodes started on this machine)
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from ray_step import some_cluster  # type: ignore[import-not-found]  # in the same folder

from envherd import RayParallelEnv

NUM_ENVS, MIN_ENVS, NUM_BATCHES = 6, 3, 40


class Slow(gymnasium.Env[np.ndarray, Any]):
    """An env whose steps take a given time.

    Args:
        step_s: seconds.
    """

    observation_space = Box(-1.0, 1.0, (4,), np.float32)
    action_space = Discrete(2)

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed, options=options)
        return self.np_random.uniform(-1, 1, 4).astype(np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Sleep; an episode lasts 20 steps on average."""
        time.sleep(self.step_s)
        ended = bool(self.np_random.random() < 0.05)
        return self.np_random.uniform(-1, 1, 4).astype(np.float32), float(action), ended, False, {}


def main() -> None:
    """Receive the first three envs that are ready, repeatedly."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address")
    steps = [0.005] * 3 + [0.05] * 3
    with (
        some_cluster(parser.parse_args().address) as address,
        RayParallelEnv(
            NUM_ENVS,
            Slow,
            env_kwargs=[{"step_s": one} for one in steps],
            num_nodes=2,
            resources_per_node={"CPU": 1},
            num_workers=3,
            address=address,
            seed=0,
        ) as env,
    ):
        env.send(env.rand_action(env.reset()))
        seen = np.zeros(NUM_ENVS, int)
        for _ in range(NUM_BATCHES):
            td = env.recv(MIN_ENVS)
            seen[td["env_ids"].numpy()] += 1
            root = env.current(td["env_ids"])
            env.send(root.set("action", (root["observation"][:, 0] > 0).long()))
        env.recv()
    print(f"{NUM_BATCHES} batches of {MIN_ENVS}; steps of each env: {seen.tolist()}")


if __name__ == "__main__":
    main()
