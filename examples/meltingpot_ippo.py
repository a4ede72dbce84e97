"""Independent PPO on Melting Pot: every agent learns from its own rewards, with shared or separate parameters.

What it shows:
- `SmallPictures` shrinks each agent's view in the worker: 88x88 pixels become 11x11, one pixel for each cell.
- `PerPlayer` makes one policy of the agents' policies: one network for all of them, or with `--separate` one for each.
- `policy.split(data)` gives each network the rows of its agents, with which it is trained as in any PPO.
- `--asynchronous` collects with an `AsyncCollector`: while the networks learn from a batch, the envs make the next one,
  and no env waits for another. The data are then one version older than the weights, which PPO's ratio corrects.
- `--sparse` is for games in which most steps have no reward: larger batches.
- `--checkpoint` makes the training resumable: run the same command again, and it continues.

Run: python examples/meltingpot_ippo.py [--substrate commons_harvest__open] [--separate] [--asynchronous] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from envherd import (
    AsyncCollector,
    Collector,
    EpisodeLogger,
    ExecutorOptions,
    MeltingPotFactory,
    ParallelEnv,
    PerPlayer,
    SmallPictures,
)

LEARNING_RATE, LAMBDA, CLIP, VALUE_WEIGHT, MAX_GRAD_NORM = 1e-3, 0.95, 0.2, 0.5, 0.5
USUAL = SimpleNamespace(
    num_envs=4,
    num_steps=100,
    epochs=2,
    num_minibatches=4,
    gamma=0.98,
    entropy_weight=0.02,
)
SPARSE = SimpleNamespace(
    num_envs=16,
    num_steps=256,
    epochs=4,
    num_minibatches=8,
    gamma=0.99,
    entropy_weight=0.01,
)


class Agent(nn.Module):
    """A small convolution with two heads: the policy and the value of one agent."""

    def __init__(self, shape: torch.Size, num_actions: int) -> None:
        super().__init__()
        height, width, channels = shape
        self.body = nn.Sequential(
            nn.Conv2d(channels, 16, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * (height - 2) * (width - 2), 64),
            nn.ReLU(),
        )
        self.actor, self.critic = nn.Linear(64, num_actions), nn.Linear(64, 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)

    def think(self, picture: Tensor) -> tuple[torch.distributions.Categorical, Tensor]:
        """Return the distribution of actions `[B]` and the values `[B]` of pictures `[B, H, W, C]`."""
        seen = self.body(picture.permute(0, 3, 1, 2) / 255.0)
        logits = self.actor(seen)
        return torch.distributions.Categorical(
            logits=logits, validate_args=False
        ), self.critic(seen).squeeze(-1)

    def forward(self, rows: TensorDictBase) -> TensorDictBase:
        """Act for the rows of some agents."""
        distribution, value = self.think(rows["observation", "RGB"])
        action = distribution.sample()
        return (
            rows.set("action", action)
            .set("log_prob", distribution.log_prob(action))
            .set("value", value)
        )


def make_env(substrate: str, num_steps: int) -> SmallPictures:
    """Return the factory: only the agents' views are rendered, and stored with one pixel for each cell of 8x8."""
    return SmallPictures(
        MeltingPotFactory(
            substrate, keys=("RGB",), world_rgb=False, max_steps=num_steps
        ),
        shrink=8,
    )


def make_policy(env: ParallelEnv, *, separate: bool) -> PerPlayer:
    """Return one network for all agents, or one for each."""
    shape = next(leaf.shape for leaf in env.observation_spec if leaf.key[-1] == "RGB")[
        1:
    ]
    num_players, num_actions = (
        env.spec.metadata["agent_count"],
        env.spec.metadata["num_actions"],
    )
    agents = [
        Agent(torch.Size(shape), num_actions)
        for _ in range(num_players if separate else 1)
    ]
    return PerPlayer(
        dict(enumerate(agents)) if separate else {"*": agents[0]}, env.spec
    )


def make_collector(
    env: ParallelEnv,
    policy: PerPlayer,
    total: int,
    settings: SimpleNamespace,
    *,
    is_asynchronous: bool,
) -> Collector | AsyncCollector:
    """Return a collector of batches `[num_envs, num_steps]`; the asynchronous one collects while the caller learns."""
    frames = settings.num_envs * settings.num_steps
    batches: dict[str, Any] = {
        "frames_per_batch": frames,
        "total_frames": total,
        "close_env": False,
    }
    if is_asynchronous:
        return AsyncCollector(
            env, policy, steps_per_row=settings.num_steps, in_background=1, **batches
        )
    return Collector(env, policy, **batches)


def advantages_of(agent: Agent, rows: TensorDictBase, gamma: float) -> Tensor:
    """Return generalised advantages `[N, T, p]`; at a truncation the value of the last observation is used."""
    reward, done, terminated = (
        rows["next", key].squeeze(-1) for key in ("reward", "done", "terminated")
    )
    following = torch.cat(
        [rows["value"][:, 1:], torch.zeros_like(rows["value"][:, :1])], 1
    )
    is_cut = done.clone()
    # The next row is not in this batch, or belongs to another episode.
    is_cut[:, -1] = True
    with torch.no_grad():
        following[is_cut] = agent.think(rows["next", "observation", "RGB"][is_cut])[1]
    errors = reward.float() + gamma * following * ~terminated - rows["value"]
    advantages, later = torch.zeros_like(errors), torch.zeros_like(errors[:, 0])
    for step in reversed(range(errors.shape[1])):
        later = errors[:, step] + gamma * LAMBDA * ~done[:, step] * later
        advantages[:, step] = later
    return advantages


def update(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    rows: TensorDictBase,
    settings: SimpleNamespace,
) -> None:
    """Train one network on the rows `[N, T, p]` of its agents."""
    advantages = advantages_of(agent, rows, settings.gamma)
    targets = (advantages + rows["value"]).flatten()
    advantages = (
        (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ).flatten()
    picture = rows["observation", "RGB"].flatten(0, 2)
    action, log_prob = rows["action"].flatten(), rows["log_prob"].flatten()
    for _ in range(settings.epochs):
        for chosen in torch.randperm(len(action)).chunk(settings.num_minibatches):
            distribution, value = agent.think(picture[chosen])
            ratio, gain = (
                (distribution.log_prob(action[chosen]) - log_prob[chosen]).exp(),
                advantages[chosen],
            )
            policy_loss = -torch.min(
                ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain
            ).mean()
            value_loss = (value - targets[chosen]).square().mean()
            loss = policy_loss + VALUE_WEIGHT * value_loss
            loss = loss - settings.entropy_weight * distribution.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
            optimizer.step()


def train(arguments: argparse.Namespace) -> None:
    """Train, print a line for each batch in which episodes ended, and save after it."""
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    settings = SPARSE if arguments.sparse else USUAL
    logger, curve, path = EpisodeLogger(window=20), [], arguments.checkpoint
    num_before, seconds_before, began = 0, 0.0, time.monotonic()
    make, options = (
        make_env(arguments.substrate, arguments.episode),
        ExecutorOptions(episode_statistics=True),
    )
    with ParallelEnv(
        settings.num_envs, make, seed=arguments.seed, options=options
    ) as env:
        policy = make_policy(env, separate=arguments.separate)
        optimizers = [
            torch.optim.Adam(part.policy.parameters(), LEARNING_RATE, eps=1e-5)
            for part in policy.parts
        ]
        if path is not None and path.exists():
            kept = torch.load(path)
            policy.load_state_dict(kept["policy"])
            for optimizer, state in zip(optimizers, kept["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            curve = kept["curve"]
            num_before, _, seconds_before = curve[-1]
            env.set_seed(arguments.seed + num_before)  # different episodes than before
        total = arguments.steps - num_before
        if total <= 0:
            return
        with make_collector(
            env, policy, total, settings, is_asynchronous=arguments.asynchronous
        ) as collector:
            for data in collector:
                for (part, rows), optimizer in zip(
                    policy.split(data), optimizers, strict=True
                ):
                    update(part.policy, optimizer, rows, settings)
                if isinstance(collector, AsyncCollector):
                    collector.update_policy_()
                if not logger.add(data):
                    continue
                steps, seconds = (
                    num_before + logger.num_steps,
                    seconds_before + time.monotonic() - began,
                )
                curve.append((steps, logger.mean_return, seconds))
                rate = logger.num_steps / (seconds - seconds_before)
                print(
                    f"steps {steps:8d}  return per agent {logger.mean_return:7.2f}  {rate:5.0f} steps/s",
                    flush=True,
                )
                if path is not None:
                    save(path, policy, optimizers, curve)
            if isinstance(collector, AsyncCollector):
                found = collector.statistics()
                print(
                    f"bound by the {found.bound_by}; the data were {found.lag_mean:.1f} versions old on average"
                )


def save(
    path: Path,
    policy: PerPlayer,
    optimizers: list[torch.optim.Adam],
    curve: list[tuple[float, ...]],
) -> None:
    """Save a checkpoint, and the curve as JSON: steps, return per agent, and seconds."""
    optimizer_states = [optimizer.state_dict() for optimizer in optimizers]
    kept = {
        "policy": policy.state_dict(),
        "optimizers": optimizer_states,
        "curve": curve,
    }
    torch.save(kept, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)
    path.with_suffix(".json").write_text(json.dumps(curve))


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--substrate", default="commons_harvest__open")
    parser.add_argument(
        "--separate", action="store_true", help="one network for each agent"
    )
    parser.add_argument(
        "--asynchronous", action="store_true", help="collect while the networks learn"
    )
    parser.add_argument(
        "--sparse", action="store_true", help="settings for rewards that come seldom"
    )
    parser.add_argument("--episode", type=int, default=250, help="steps of an episode")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300_000, help="env steps in all")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="continue from this file if it exists, and save to it",
    )
    train(parser.parse_args())


if __name__ == "__main__":
    main()
