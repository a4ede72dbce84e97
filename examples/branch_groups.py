"""Groups of rollouts that begin in the same state, as GRPO and similar methods compare them.

What it shows: a policy gradient weighs the actions of a rollout by its return, compared with the mean of its group. If
the rollouts of a group begin in different states, most of the difference is due to these. `env.branch` forks the worker
of one env in the middle of its episode, and the whole group begins in that state. What is printed is how well the
gradients of single groups agree with their mean (the cosine; 1 is perfect), for equal numbers of steps.

Run: python examples/branch_groups.py
"""

from __future__ import annotations

import argparse
import functools

import gymnasium
import torch
from tensordict import TensorDictBase

from envherd import ParallelEnv

NUM_ENVS = 8  # of a group
LENGTH, EPISODE = 20, 200  # steps of a rollout, and of an episode of Pendulum
NOISE = 0.7  # of the policy's actions
WEIGHTS = torch.tensor([0.0, -1.0, -0.3, 0.0])  # of a linear policy


def features(observation: torch.Tensor) -> torch.Tensor:
    """Return what the policy reads: cosine and sine of the angle, the speed, and a constant."""
    return torch.cat([observation, torch.ones_like(observation[..., :1])], -1)


def gradients(num_groups: int, *, branches: bool) -> torch.Tensor:
    """Return the policy gradient of each group of rollouts, `[num_groups, 4]`."""
    generator, found = torch.Generator().manual_seed(0), []

    def policy(td: TensorDictBase) -> TensorDictBase:
        mean = features(td["observation"]) @ WEIGHTS
        noise = NOISE * torch.randn(mean.shape, generator=generator)
        return td.set("noise", noise).set(
            "action", (mean + noise).clamp(-2, 2).unsqueeze(-1)
        )

    make_env = functools.partial(gymnasium.make, "Pendulum-v1")
    with ParallelEnv(NUM_ENVS, make_env, num_workers=NUM_ENVS, seed=0) as env:
        for group in range(num_groups):
            if group % (EPISODE // LENGTH) == 0:
                env.reset()
            if branches:
                source = group % NUM_ENVS
                env.branch(source, [row for row in range(NUM_ENVS) if row != source])
            data = env.rollout(
                LENGTH, policy, auto_reset=False, break_when_any_done=False
            )
            returns = data["next", "reward"].sum((1, 2))
            advantage = (returns - returns.mean()) / returns.std()
            # Of log-probabilities.
            scores = (features(data["observation"]) * data["noise"].unsqueeze(-1)).sum(
                1
            )
            found.append((advantage.unsqueeze(-1) * scores).mean(0))
    return torch.stack(found)


def main() -> None:
    """Estimate gradients from both kinds of groups, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=40)
    num_groups = parser.parse_args().groups
    for name, branches in (("different states", False), ("the same state", True)):
        found = gradients(num_groups, branches=branches)
        agreement = torch.cosine_similarity(found, found.mean(0), dim=-1).mean()
        steps = NUM_ENVS * num_groups * LENGTH
        print(
            f"groups from {name:16} agreement of gradients {agreement:.2f} in {steps} steps",
            flush=True,
        )


if __name__ == "__main__":
    main()
