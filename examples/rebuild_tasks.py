"""Run many tasks through a few workers: each env is replaced by that of the next task, in the same process.

What it shows: `rebuild` gives a living env other arguments. Between two episodes the old env is closed before the new
one is built, so the memory is that of `num_envs` envs, whatever the number of tasks.

Run: python examples/rebuild_tasks.py
     python examples/rebuild_tasks.py --tasks 40 --megabytes 200
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium
import numpy as np

from envherd import ParallelEnv


class Room(gymnasium.Env[Any, Any]):
    """A walk to a place that the task determines, with a scene of some megabytes."""

    observation_space = gymnasium.spaces.Box(-100.0, 100.0, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, task: int = 0, megabytes: int = 50) -> None:
        self.goal = 1 + task % 5
        self.scene = np.ones(megabytes << 17)

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin at 0."""
        super().reset(seed=seed, options=options)
        self.place = 0.0
        return np.array([self.place, self.goal]), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move to the right or to the left."""
        self.place += self.np_random.random() if action else -1.0
        return (
            np.array([self.place, self.goal]),
            -1.0,
            self.place >= self.goal,
            False,
            {},
        )


def main() -> None:
    """Play an episode of each task."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=12)
    parser.add_argument("--megabytes", type=int, default=50)
    given = parser.parse_args()
    common = {"megabytes": given.megabytes}
    peak = 0
    with ParallelEnv(4, Room, num_workers=4, env_kwargs=common, seed=0) as env:
        for first in range(0, given.tasks, 4):
            env.rebuild(env_kwargs=[{"task": first + i, **common} for i in range(4)])
            td = env.reset()
            lengths = np.zeros(4, int)
            # Envs whose episodes have ended wait for the others.
            while not td["done"].all():
                running = (~td["done"][:, 0]).nonzero()[:, 0]
                lengths[running] += 1
                acting = env.current(running)
                env.send(acting.set("action", running * 0 + 1), maybe_reset=False)
                env.recv()
                td = env.current()
            peak = max(
                peak, sum(worker.uss_bytes for worker in env.statistics().workers)
            )
            print(f"tasks {first}-{first + 3}: episodes of {lengths.tolist()} steps")
    print(
        f"largest memory of the workers: {peak / 2**20:.0f} MB, of which scenes {4 * given.megabytes} MB"
    )


if __name__ == "__main__":
    main()
