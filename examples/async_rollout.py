"""Send and receive: continue with the envs that are ready instead of waiting for the slowest.

What it shows: a synchronous step takes as long as the slowest env. With `send` and `recv(min_envs=K)` the caller gets
the first K transitions while the other envs keep stepping, so no worker is idle. `recv` returns transitions with their
`env_ids`; `env.current(td["env_ids"])` returns those envs' roots, on which the policy acts next. This is faster from
about three envs per worker on. Fast envs appear more often in the data than slow ones, which a learner must take into
account.

Run: python examples/async_rollout.py
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDictBase

from envherd import ParallelEnv

NUM_ENVS, NUM_WORKERS = 12, 4
MIN_ENVS = 4  # K: how many to receive at a time


class Uneven(gymnasium.Env[np.ndarray, Any]):
    """An env whose steps take 1 ms, but one in twenty takes 30 ms, as if a level had to be loaded."""

    observation_space = Box(-1.0, 1.0, (4,), np.float32)
    action_space = Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed, options=options)
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Sleep, then return a random observation; an episode lasts 100 steps on average."""
        time.sleep(0.03 if self.np_random.random() < 0.05 else 0.001)
        return (
            self._observation(),
            float(action),
            bool(self.np_random.random() < 0.01),
            False,
            {},
        )

    def _observation(self) -> np.ndarray:
        return self.np_random.uniform(-1, 1, 4).astype(np.float32)


def policy(root: TensorDictBase) -> TensorDictBase:
    """Choose an action for each env of a batch of any size."""
    return root.set("action", (root["observation"].sum(-1) > 0).long())


def collect_synchronously(env: ParallelEnv, num_transitions: int) -> float:
    """Step all envs together; return transitions per second."""
    root = env.reset()
    began = time.perf_counter()
    for _ in range(num_transitions // NUM_ENVS):
        _, root = env.step_and_maybe_reset(policy(root))
    return num_transitions / (time.perf_counter() - began)


def collect_as_they_come(
    env: ParallelEnv, num_transitions: int
) -> tuple[float, torch.Tensor]:
    """Act for the first `MIN_ENVS` envs that are ready; return transitions per second, and their number per env."""
    num_of_env = torch.zeros(NUM_ENVS, dtype=torch.int64)
    env.send(policy(env.reset()))
    began = time.perf_counter()
    while (num_received := int(num_of_env.sum())) < num_transitions:
        td = env.recv(min_envs=MIN_ENVS)
        num_of_env[td["env_ids"]] += 1
        env.send(policy(env.current(td["env_ids"])))
    seconds = time.perf_counter() - began
    env.recv()  # the pending envs, so that no env owes an answer
    return num_received / seconds, num_of_env


def main() -> None:
    """Collect both ways from the same envs and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transitions", type=int, default=3600)
    num_transitions = parser.parse_args().transitions
    with ParallelEnv(NUM_ENVS, Uneven, num_workers=NUM_WORKERS, seed=0) as env:
        together = collect_synchronously(env, num_transitions)
        as_they_come, num_of_env = collect_as_they_come(env, num_transitions)
    print(f"synchronous:        {together:7.0f} transitions/s")
    print(
        f"first {MIN_ENVS} of {NUM_ENVS}:      {as_they_come:7.0f} transitions/s ({as_they_come / together:.1f}x)"
    )
    print(f"transitions per env: {num_of_env.tolist()}")


if __name__ == "__main__":
    main()
