"""Train a policy that can be neither copied nor pickled, with TorchRL's PPO loss, on CartPole.

The policy here holds a socket (of a GPU server, a robot or a license, say). A usual training script would copy it in
two places: the collector, when it moves the policy to its device, and the loss, whose constructor deep-copies its
modules. `Collector` does not move it, and within `uncopied(policy)` the loss uses the module itself and swaps its
parameters.

Run: python examples/uncopyable_policy.py  (needs the extra `torchrl`; about a minute)
"""

from __future__ import annotations

import argparse
import socket

import gymnasium
import torch
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from envherd import Collector, EpisodeLogger, ExecutorOptions, ParallelEnv, uncopied

NUM_ENVS, NUM_STEPS, NUM_EPOCHS, MINIBATCH = 8, 128, 5, 256


def make_env() -> gymnasium.Env:
    """Build one CartPole, inside its worker."""
    return gymnasium.make("CartPole-v1")


class Logits(nn.Module):
    """Scores both actions; holds a socket, so `copy.deepcopy` and `pickle` fail."""

    def __init__(self) -> None:
        super().__init__()
        self.connection, self.other_end = socket.socketpair()
        self.layers = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return logits `[..., 2]`."""
        return self.layers(observation)

    def close(self) -> None:
        """Close the socket."""
        self.connection.close()
        self.other_end.close()


def main(num_updates: int) -> float:
    """Train; return the mean return of the last 50 episodes."""
    torch.manual_seed(0)
    logits = Logits()
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(logits, in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
            default_interaction_type="random",
        ),
    )
    critic = TensorDictModule(
        nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1)),
        in_keys=["observation"],
        out_keys=["state_value"],
    )
    with uncopied(logits):
        loss_module = ClipPPOLoss(actor, critic, entropy_coeff=0.01)
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    optimiser = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
    env = ParallelEnv(
        NUM_ENVS,
        make_env,
        num_workers=2,
        seed=0,
        options=ExecutorOptions(episode_statistics=True),
    )
    episodes = EpisodeLogger(window=50)
    try:
        with Collector(
            env,
            actor,
            frames_per_batch=NUM_ENVS * NUM_STEPS,
            total_frames=NUM_ENVS * NUM_STEPS * num_updates,
        ) as collector:
            for index, data in enumerate(collector):
                episodes.add(data)
                with torch.no_grad():
                    advantage(data)
                flat = data.reshape(-1)
                for _ in range(NUM_EPOCHS):
                    for rows in torch.randperm(len(flat)).split(MINIBATCH):
                        losses = loss_module(flat[rows])
                        loss = (
                            losses["loss_objective"]
                            + losses["loss_critic"]
                            + losses["loss_entropy"]
                        )
                        optimiser.zero_grad()
                        loss.backward()
                        optimiser.step()
                if index % 5 == 4:
                    print(
                        f"{collector.num_frames:6d} frames: mean return {episodes.mean_return:6.1f}"
                    )
    finally:
        logits.close()
    return episodes.mean_return


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, default=20)
    wanted, result = 50.0, main(parser.parse_args().updates)
    assert result > wanted, f"expected a mean return over {wanted}, got {result:.1f}"
