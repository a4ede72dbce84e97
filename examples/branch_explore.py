"""Exploration with branches: envs in well-known places become copies of the env in the rarest place.

What it shows: random actions do not drive MountainCar's car out of its valley. As in Go-Explore, states that were seen
rarely are worth continuing. Every four steps the envs whose cells (position and speed, rounded) were visited most are
replaced by copies of the env whose cell was visited least: `env.branch` forks its worker. The same number of steps
without branches is printed for comparison.

Run: python examples/branch_explore.py
"""

from __future__ import annotations

import argparse
import functools
from collections import Counter

import gymnasium
import torch

from envherd import ParallelEnv

NUM_ENVS, REPEAT = 8, 4  # an action is repeated: single random ones cancel out


def cells_of(observation: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the cell of each env: its position and its speed, rounded."""
    return [
        tuple(row)
        for row in (observation / torch.tensor([0.06, 0.005])).round().int().tolist()
    ]


def explore(num_rounds: int, *, branches: bool) -> tuple[int, float]:
    """Step at random; return the number of cells visited, and the rightmost position (the flag is at 0.5)."""
    make_env = functools.partial(
        gymnasium.make, "MountainCar-v0", max_episode_steps=100_000
    )
    generator = torch.Generator().manual_seed(0)
    visits: Counter[tuple[int, ...]] = Counter()
    rightmost = -1.2
    with ParallelEnv(NUM_ENVS, make_env, num_workers=NUM_ENVS, seed=0) as env:
        root = env.reset()
        for _ in range(num_rounds):
            action = torch.randint(0, 3, (NUM_ENVS,), generator=generator)
            for _ in range(REPEAT):
                data, root = env.step_and_maybe_reset(root.set("action", action))
                visits.update(cells_of(data["next", "observation"]))
                rightmost = max(
                    rightmost, data["next", "observation"][:, 0].max().item()
                )
            if branches:
                counts = [visits[cell] for cell in cells_of(root["observation"])]
                order = sorted(range(NUM_ENVS), key=counts.__getitem__)
                env.branch(order[0], order[-NUM_ENVS // 4 :])
                root = env.current()
    return len(visits), rightmost


def main() -> None:
    """Explore with and without branches, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=80)
    num_rounds = parser.parse_args().rounds
    for name, branches in (("without branches", False), ("with branches", True)):
        num_cells, rightmost = explore(num_rounds, branches=branches)
        steps = NUM_ENVS * num_rounds * REPEAT
        print(
            f"{name:17} {num_cells:4d} cells in {steps} steps, rightmost position {rightmost:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
