"""An actor-critic that learns from data older than its weights, corrected by V-trace.

What it shows: an `AsyncCollector` collects the next batch while the learner works on the present one, so the weights
that acted are a version or two behind. Each transition holds the log-probability of its action under those weights;
V-trace (Espeholt et al., 2018) weights the transitions by the ratio of their probabilities under the present policy and
under the policy that acted.

Run: python examples/vtrace_cartpole.py [--frames 1000000]    (some minutes; stops at a mean return of 475)
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from typing import Any

import gymnasium
import torch
from torch import nn

from envherd import AsyncCollector, ParallelEnv

NUM_ENVS, STEPS_PER_ROW, DISCOUNT = 16, 32, 0.99
GOAL = 475.0


class ActorCritic(nn.Module):
    """A policy and its value function.

    Called with a root batch, it acts and writes the log-probability of the action.
    """

    def __init__(self) -> None:
        super().__init__()
        # The spec has these numbers: env.observation_spec[0].shape, env.action_spec[0].domain.n.
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, root: Any) -> Any:
        """Draw an action for each row."""
        chosen = torch.distributions.Categorical(logits=self.actor(root["observation"]))
        root["action"] = chosen.sample()
        return root.set("log_prob", chosen.log_prob(root["action"]))


def vtrace(
    data: Any, log_prob: torch.Tensor, critic: nn.Module
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the targets of the values and the advantages of a batch, float32 `[B, T]` each."""
    following = data["next"]
    value, next_value = (
        critic(data["observation"])[..., 0],
        critic(following["observation"])[..., 0],
    )
    reward, done = following["reward"][..., 0], following["done"][..., 0].float()
    bootstrap = DISCOUNT * next_value * (1 - following["terminated"][..., 0].float())
    weight = (log_prob - data["log_prob"]).exp().clamp(max=1.0)
    error = weight * (reward + bootstrap - value)
    correction = torch.zeros_like(value[:, 0])
    corrections = []
    # The correction of a step ends with its episode.
    for t in reversed(range(value.shape[1])):
        correction = (
            error[:, t] + DISCOUNT * (1 - done[:, t]) * weight[:, t] * correction
        )
        corrections.append(correction)
    corrected = torch.stack(corrections[::-1], 1)
    later = torch.cat([corrected[:, 1:], torch.zeros_like(corrected[:, :1])], 1) * (
        1 - done
    )
    return value + corrected, weight * (reward + bootstrap + DISCOUNT * later - value)


def main() -> None:
    """Train until the mean return of the last 100 episodes is 475, or until the frames are used up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    running, returns = torch.zeros(NUM_ENVS), deque[float](maxlen=100)
    began, mean = time.monotonic(), 0.0
    env = ParallelEnv(
        NUM_ENVS,
        lambda: gymnasium.make("CartPole-v1"),
        num_workers=2,
        seed=arguments.seed,
    )
    with AsyncCollector(
        env,
        model,
        frames_per_batch=NUM_ENVS * STEPS_PER_ROW,
        steps_per_row=STEPS_PER_ROW,
        total_frames=arguments.frames,
        in_background=1,
    ) as collector:
        for data in collector:
            # Rows of an env, in their order.
            for row in data[data["step"][:, 0].argsort()].unbind(0):
                env_id = int(row["env_ids"][0])
                for reward, done in zip(
                    row["next", "reward"][:, 0].tolist(),
                    row["next", "done"][:, 0].tolist(),
                    strict=True,
                ):
                    running[env_id] += reward
                    if done:
                        returns.append(float(running[env_id]))
                        running[env_id] = 0.0
            chosen = torch.distributions.Categorical(
                logits=model.actor(data["observation"])
            )
            log_prob = chosen.log_prob(data["action"])
            with torch.no_grad():
                target, advantage = vtrace(data, log_prob, model.critic)
            value_loss = (
                (model.critic(data["observation"])[..., 0] - target).pow(2).mean()
            )
            advantage = advantage / (advantage.std() + 1e-6)
            loss = (
                0.5 * value_loss / 100
                - (log_prob * advantage).mean()
                - 0.005 * chosen.entropy().mean()
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            collector.update_policy_()
            mean = sum(returns) / max(1, len(returns))
            if collector.version % 50 == 0:
                print(
                    f"{time.monotonic() - began:6.1f} s  {collector.num_frames:8,} frames  return {mean:6.1f}"
                )
            if mean >= GOAL and len(returns) == returns.maxlen:
                break
        found = collector.statistics()
    print(
        f"Return {mean:.1f} after {collector.num_frames:,} frames and {time.monotonic() - began:.1f} s."
    )
    print(
        f"Bound by the {found.bound_by}; the data were {found.lag_mean:.1f} versions old on average."
    )


if __name__ == "__main__":
    main()
