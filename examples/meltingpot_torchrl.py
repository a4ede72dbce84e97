"""Independent PPO on Melting Pot with TorchRL's actor, advantage and loss, over our `ParallelEnv` and `Collector`.

A batch is a TensorDict with the keys of TorchRL's `MeltingpotEnv`, so TorchRL's modules accept it unchanged. One
network acts for all agents, and another one values each agent's view. `meltingpot_ippo.py` is the same with a
handwritten loss.

Run: python examples/meltingpot_torchrl.py [--substrate commons_harvest__open] [--seed 1] [--steps 60000]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, TensorDictModule
from torch import Tensor, nn
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from envherd import (
    Collector,
    EpisodeLogger,
    ExecutorOptions,
    MeltingPotFactory,
    ParallelEnv,
    SmallPictures,
)

NUM_ENVS, NUM_STEPS = 4, 100
EPOCHS, NUM_MINIBATCHES = 2, 4
LEARNING_RATE, GAMMA, LAMBDA, MAX_GRAD_NORM = 1e-3, 0.98, 0.95, 0.5
VIEW = ("agents", "observation", "RGB")
#: Keys in the batch of entries that TorchRL's modules expect at its root: here they are per agent.
KEYS = {
    "value": ("agents", "state_value"),
    "reward": ("agents", "reward"),
    "done": ("agents", "done"),
    "terminated": ("agents", "terminated"),
    "advantage": ("agents", "advantage"),
    "value_target": ("agents", "value_target"),
}


class Network(nn.Module):
    """A small convolution over pictures uint8 `[..., H, W, C]`; returns `[..., num_outputs]`."""

    def __init__(
        self, shape: tuple[int, ...], num_outputs: int, last_gain: float
    ) -> None:
        super().__init__()
        height, width, channels = shape
        self.body = nn.Sequential(
            nn.Conv2d(channels, 16, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * (height - 2) * (width - 2), 64),
            nn.ReLU(),
        )
        self.last = nn.Linear(64, num_outputs)
        nn.init.orthogonal_(self.last.weight, last_gain)

    def forward(self, picture: Tensor) -> Tensor:
        """Return the outputs for each picture."""
        seen = self.body(picture.flatten(0, -4).permute(0, 3, 1, 2) / 255.0)
        return self.last(seen).unflatten(0, picture.shape[:-3])


def make_networks(env: ParallelEnv) -> tuple[ProbabilisticActor, ValueOperator]:
    """Return the policy and the value of all agents."""
    shape = next(leaf.shape for leaf in env.observation_spec if leaf.key == VIEW)[1:]
    logits = Network(shape, env.spec.metadata["num_actions"], 0.01)
    actor = ProbabilisticActor(
        TensorDictModule(logits, in_keys=[VIEW], out_keys=[("agents", "logits")]),
        in_keys=[("agents", "logits")],
        out_keys=[("agents", "action")],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
        log_prob_key=("agents", "log_prob"),
        default_interaction_type=InteractionType.RANDOM,
    )
    return actor, ValueOperator(
        Network(shape, 1, 1.0), in_keys=[VIEW], out_keys=[KEYS["value"]]
    )


def improve(
    loss_module: ClipPPOLoss,
    advantage: GAE,
    optimizer: torch.optim.Optimizer,
    data: TensorDictBase,
) -> None:
    """Train on one batch `[N, T]`; at a truncation the value of the last observation is used."""
    following = data["next"]
    for name in ("done", "terminated"):
        following["agents", name] = (
            following[name].unsqueeze(-2).expand(following["agents", "reward"].shape)
        )
    following["agents", "reward"] = following["agents", "reward"].float()
    with torch.no_grad():
        advantage(data)
    flat = data.reshape(-1)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(flat)).chunk(NUM_MINIBATCHES):
            losses = loss_module(flat[rows])
            optimizer.zero_grad()
            (
                losses["loss_objective"]
                + losses["loss_critic"]
                + losses["loss_entropy"]
            ).backward()
            nn.utils.clip_grad_norm_(loss_module.parameters(), MAX_GRAD_NORM)
            optimizer.step()


def train(
    substrate: str, seed: int, num_steps: int, max_steps: int
) -> list[tuple[int, float, float]]:
    """Train, and print a line for each batch in which episodes ended; return steps, return per agent and seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    factory = MeltingPotFactory(
        substrate, keys=("RGB",), world_rgb=False, max_steps=max_steps
    )
    logger, curve, began = EpisodeLogger(window=20), [], time.monotonic()
    options = ExecutorOptions(episode_statistics=True)
    with ParallelEnv(
        NUM_ENVS, SmallPictures(factory, shrink=8), seed=seed, options=options
    ) as env:
        actor, critic = make_networks(env)
        advantage = GAE(
            gamma=GAMMA, lmbda=LAMBDA, value_network=critic, average_gae=True
        )
        advantage.set_keys(**KEYS)
        loss_module = ClipPPOLoss(
            actor, critic, clip_epsilon=0.2, entropy_coeff=0.02, critic_coeff=0.5
        )
        loss_module.set_keys(
            **KEYS, action=("agents", "action"), sample_log_prob=("agents", "log_prob")
        )
        optimizer = torch.optim.Adam(loss_module.parameters(), LEARNING_RATE, eps=1e-5)
        frames = NUM_ENVS * NUM_STEPS
        with Collector(
            env, actor, frames_per_batch=frames, total_frames=num_steps, close_env=False
        ) as collector:
            for data in collector:
                improve(loss_module, advantage, optimizer, data)
                if logger.add(data):
                    curve.append(
                        (logger.num_steps, logger.mean_return, time.monotonic() - began)
                    )
                    steps, mean, seconds = curve[-1]
                    rate = steps / seconds
                    print(
                        f"steps {steps:8d}  return per agent {mean:7.2f}  {rate:5.0f} steps/s",
                        flush=True,
                    )
    return curve


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--substrate", default="commons_harvest__open")
    parser.add_argument("--episode", type=int, default=250, help="steps of an episode")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60_000, help="env steps in all")
    parser.add_argument(
        "--curve",
        type=Path,
        help="write steps, return per agent and seconds to this JSON file",
    )
    arguments = parser.parse_args()
    curve = train(
        arguments.substrate, arguments.seed, arguments.steps, arguments.episode
    )
    if arguments.curve is not None:
        arguments.curve.write_text(json.dumps(curve))


if __name__ == "__main__":
    main()
