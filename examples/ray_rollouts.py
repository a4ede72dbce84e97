"""Remote rollouts: the policy is sent to the envs' nodes, which return whole rollouts. This scales to many nodes.

What it shows: `remote_rollouts()` of a cluster's executor. Each node runs the policy with its envs and returns `[n, T]`
when it is done. New weights are sent with a version, and every rollout reports how many versions old its weights are.
The learner makes a few steps of policy gradient, so that the weights change.

Run: python examples/ray_rollouts.py [--address HOST:PORT]    (without an address, on two nodes started on this machine)
"""

from __future__ import annotations

import argparse
import itertools

import gymnasium
import torch
from ray_step import some_cluster  # type: ignore[import-not-found]  # in the same folder
from tensordict import TensorDictBase
from torch import nn

from envherd import RayParallelEnv

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


def learn(policy: Policy, optimizer: torch.optim.Optimizer, data: TensorDictBase) -> None:
    """Make actions before an episode's end less likely, the last ones the most."""
    ended = data["next", "terminated"].squeeze(-1).float()
    to_go = ended.flip(1).cumsum(1).flip(1)
    loss = (policy.distribution(data).log_prob(data["action"]) * (to_go - to_go.mean())).mean()
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
    with (
        some_cluster(parser.parse_args().address) as address,
        RayParallelEnv(NUM_ENVS, make_env, num_nodes=2, resources_per_node={"CPU": 1}, address=address, seed=0) as env,
    ):
        rollouts = env.remote_rollouts()
        for batch in itertools.islice(rollouts.stream(NUM_STEPS, policy), NUM_BATCHES):
            learn(policy, optimizer, batch.data)
            print(f"{tuple(batch.data.shape)} of version {batch.version}, {batch.staleness} behind")
        whole = rollouts.rollout(NUM_STEPS, policy, auto_reset=False)
        print(f"{tuple(whole.shape)} of version {rollouts.version}, from all nodes at once")


if __name__ == "__main__":
    main()
