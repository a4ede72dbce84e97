"""Rollouts on the nodes of a Ray cluster: each node runs its envs and a copy of the policy, and returns `[n, T]`.

What it shows: `RayRollouts.stream` returns rollouts in the order of their arrival, each with the version of its
weights. New weights are sent once for all nodes. The learner makes a few steps of policy gradient, so that the weights
change.

Run: python examples/ray_rollouts.py [--address HOST:PORT]    (without an address, on two shares of this machine)
"""

from __future__ import annotations

import argparse
import itertools

import gymnasium
import torch
from tensordict import TensorDictBase
from torch import nn

from envherd import RayRollouts

NUM_ENVS, NUM_STEPS, NUM_BATCHES = 8, 64, 12


class Policy(nn.Module):
    """Two layers over the observation, and a random action from their distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))

    def distribution(self, td: TensorDictBase) -> torch.distributions.Categorical:
        """Return the distribution of the action."""
        return torch.distributions.Categorical(logits=self.net(td["observation"]))

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Set the action."""
        return td.set("action", self.distribution(td).sample())


def learn(
    policy: Policy, optimizer: torch.optim.Optimizer, data: TensorDictBase
) -> None:
    """Make actions before an episode's end less likely, the last ones the most."""
    ended = data["next", "terminated"].squeeze(-1).float()
    to_go = ended.flip(1).cumsum(1).flip(1)
    loss = (
        policy.distribution(data).log_prob(data["action"]) * (to_go - to_go.mean())
    ).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def make_env() -> gymnasium.Env:
    """Build one env; called on its node."""
    return gymnasium.make("CartPole-v1")


def main() -> None:
    """Learn from the rollouts of two nodes in the order of their arrival."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address")
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    where = {
        "num_nodes": 2,
        "resources_per_node": {"CPU": 1},
        "address": parser.parse_args().address,
    }
    with RayRollouts(NUM_ENVS, make_env, seed=0, **where) as rollouts:
        for data in itertools.islice(rollouts.stream(NUM_STEPS, policy), NUM_BATCHES):
            learn(policy, optimizer, data)
            version = int(data["policy_version"][0, 0])
            print(
                f"{tuple(data.shape)} of version {version}, {rollouts.version - version} behind"
            )
        whole = rollouts.rollout(NUM_STEPS, policy, auto_reset=False)
        print(
            f"{tuple(whole.shape)} of version {rollouts.version}, from all nodes at once"
        )


if __name__ == "__main__":
    main()
