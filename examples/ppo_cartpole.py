"""PPO on CartPole-v1 in one file: how a learner uses a parallel env, and how it bootstraps correctly.

What it shows:
- `env.rollout(T, policy, auto_reset=False, break_when_any_done=False)` collects `[N, T]` without losing a step. It
  resets envs that end, and the keys that the policy adds (here the log-probability) are in the data.
- `("next", "observation")` is always the true observation after a step, also if the env was reset right after it. So a
  time limit (`truncated`) is bootstrapped with the value of the state that was reached, and only after a fall
  (`terminated`) the value is 0.
- With `episode_statistics=True`, `("next", "episode", "return")` is the return of the episode so far; `EpisodeLogger`
  takes it from the episodes that ended.

Run: python examples/ppo_cartpole.py --seed 1
Exits with 0 once the mean return of the last 40 episodes is at least 475, else with 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from envherd import EpisodeLogger, ExecutorOptions, ParallelEnv

NUM_ENVS, NUM_STEPS = 8, 128
EPOCHS, NUM_MINIBATCHES = 8, 4
LEARNING_RATE = 1.5e-3  # falls linearly to 0
GAMMA, LAMBDA = 0.99, 0.95
CLIP, VALUE_WEIGHT, ENTROPY_WEIGHT, MAX_GRAD_NORM = 0.2, 0.5, 0.003, 0.5
GOAL, NUM_COUNTED = 475.0, 40


def make_env() -> gymnasium.Env[Any, Any]:
    """Build one env; called inside the workers."""
    return gymnasium.make("CartPole-v1")


class Agent(nn.Module):
    """A policy and a value function, two small networks side by side."""

    def __init__(self, num_inputs: int, num_actions: int) -> None:
        super().__init__()
        self.actor = _network(num_inputs, num_actions, last_gain=0.01)
        self.critic = _network(num_inputs, 1, last_gain=1.0)

    def distribution(self, observation: Tensor) -> torch.distributions.Categorical:
        """Return the distribution of actions `[...]` for observations `[..., 4]`."""
        return torch.distributions.Categorical(
            logits=self.actor(observation), validate_args=False
        )

    def forward(self, root: TensorDictBase) -> TensorDictBase:
        """Act: a policy takes a batch and returns it with the action and all keys to keep."""
        distribution = self.distribution(root["observation"])
        action = distribution.sample()
        return root.set("action", action).set("log_prob", distribution.log_prob(action))


def _network(num_inputs: int, num_outputs: int, last_gain: float) -> nn.Sequential:
    layers = [
        nn.Linear(num_inputs, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, num_outputs),
    ]
    for layer, gain in (
        (layers[0], 2**0.5),
        (layers[2], 2**0.5),
        (layers[4], last_gain),
    ):
        nn.init.orthogonal_(layer.weight, gain)  # type: ignore[arg-type]  # these three are Linear
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return nn.Sequential(*layers)


@torch.no_grad()
def advantages_and_targets(agent: Agent, data: TensorDictBase) -> tuple[Tensor, Tensor]:
    """Return generalised advantages and value targets, `[N, T]` each.

    After `terminated` no reward follows, so the next value is 0. After `done` the next row belongs to another episode,
    so the sum of later errors stops. With only `truncated`, the value of the true next observation replaces the missing
    rewards.
    """
    values = agent.critic(data["observation"]).squeeze(-1)
    next_values = agent.critic(data["next", "observation"]).squeeze(-1)
    reward, done, terminated = (
        data["next", key].squeeze(-1) for key in ("reward", "done", "terminated")
    )
    errors = reward + GAMMA * next_values * ~terminated - values
    advantages = torch.zeros_like(errors)
    following = torch.zeros(len(errors))
    for step in reversed(range(errors.shape[1])):
        following = errors[:, step] + GAMMA * LAMBDA * ~done[:, step] * following
        advantages[:, step] = following
    return advantages, advantages + values


def update(
    agent: Agent, optimizer: torch.optim.Optimizer, data: TensorDictBase
) -> None:
    """Train the agent on one rollout: the clipped objective, several passes in minibatches."""
    advantages, targets = advantages_and_targets(agent, data)
    observation, action, log_prob = (
        data[key].flatten(0, 1) for key in ("observation", "action", "log_prob")
    )
    advantages, targets = advantages.flatten(), targets.flatten()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(action)).chunk(NUM_MINIBATCHES):
            distribution = agent.distribution(observation[rows])
            ratio = (distribution.log_prob(action[rows]) - log_prob[rows]).exp()
            gain = (advantages[rows] - advantages[rows].mean()) / (
                advantages[rows].std() + 1e-8
            )
            policy_loss = -torch.min(
                ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain
            ).mean()
            value_loss = (
                (agent.critic(observation[rows]).squeeze(-1) - targets[rows])
                .square()
                .mean()
            )
            entropy = distribution.entropy().mean()
            loss = policy_loss + VALUE_WEIGHT * value_loss - ENTROPY_WEIGHT * entropy
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
            optimizer.step()


def has_goal(logger: EpisodeLogger) -> bool:
    """Return whether the goal is reached over enough episodes."""
    return len(logger.last) == NUM_COUNTED and logger.mean_return >= GOAL


def train(seed: int, max_steps: int) -> EpisodeLogger:
    """Train until the goal or for `max_steps` env steps; print a line every ten updates."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # more threads would slow down such small networks
    # EpisodeLogger(SummaryWriter(...)) plots it.
    logger, began = EpisodeLogger(window=NUM_COUNTED), time.monotonic()
    options = ExecutorOptions(episode_statistics=True)
    with ParallelEnv(NUM_ENVS, make_env, seed=seed, options=options) as env:
        # The spec has them: env.observation_spec[0].shape, env.action_spec[0].domain.n.
        agent = Agent(num_inputs=4, num_actions=2)
        num_updates = max_steps // (NUM_ENVS * NUM_STEPS)
        optimizer = torch.optim.Adam(agent.parameters(), LEARNING_RATE, eps=1e-5)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, num_updates)
        ended = torch.ones(NUM_ENVS, 1, dtype=torch.bool)
        for number in range(1, num_updates + 1):
            # Only those: the others continue.
            env.reset(TensorDict({"_reset": ended}, [NUM_ENVS]))
            data = env.rollout(
                NUM_STEPS, agent, auto_reset=False, break_when_any_done=False
            )
            ended = data["next", "done"][:, -1]
            logger.add(data)
            if number % 10 == 0 or has_goal(logger):
                steps, seconds = number * NUM_ENVS * NUM_STEPS, time.monotonic() - began
                print(
                    f"steps {steps:7d}  mean return {logger.mean_return:6.1f}  {seconds:5.1f} s",
                    flush=True,
                )
            if has_goal(logger):
                break
            update(agent, optimizer, data)
            schedule.step()
    return logger


def main() -> int:
    """Read the command line, train, and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--max-steps",
        type=int,
        default=400_000,
        help="env steps after which it gives up",
    )
    arguments = parser.parse_args()
    logger = train(arguments.seed, arguments.max_steps)
    verdict = "solved" if has_goal(logger) else "not solved"
    print(
        f"{verdict}: mean return {logger.mean_return:.1f} over the last {len(logger.last)} episodes (goal {GOAL:g})"
    )
    return 0 if has_goal(logger) else 1


if __name__ == "__main__":
    sys.exit(main())
