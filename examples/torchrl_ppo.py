"""TorchRL's PPO on CartPole over our `ParallelEnv`: only the import changes.

TorchRL's collector, advantage and loss see a `torchrl.envs.ParallelEnv`. Time limits are bootstrapped
with the value of the true last observation, which `("next", "observation")` always holds.

Run: python examples/torchrl_ppo.py --seed 1     (half a minute)
Exits with 0 once the mean return of the last 40 episodes is at least 475, else with 1.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import deque

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, TensorDictModule
from torch import nn
from torchrl.envs import EnvBase, GymEnv, RewardSum, TransformedEnv
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from envherd.torchrl import ParallelEnv  # was: from torchrl.envs import ParallelEnv

with warnings.catch_warnings():
    # TorchRL deprecates parts of itself as they are imported.
    warnings.simplefilter("ignore")
    from torchrl.collectors import Collector

NUM_ENVS, NUM_STEPS = 8, 128
EPOCHS, NUM_MINIBATCHES = 8, 4
LEARNING_RATE = 1.5e-3  # falls linearly to 0
GOAL, NUM_COUNTED = 475.0, 40


def make_env() -> EnvBase:
    """Build one CartPole; called inside the workers."""
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def _network(num_outputs: int, last_gain: float) -> nn.Sequential:
    layers = [
        nn.Linear(4, 64),
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


def _actor() -> ProbabilisticActor:
    logits = TensorDictModule(
        _network(2, 0.01), in_keys=["observation"], out_keys=["logits"]
    )
    return ProbabilisticActor(
        logits,
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
        default_interaction_type=InteractionType.RANDOM,
    )


def _improve(
    loss_module: ClipPPOLoss, optimizer: torch.optim.Optimizer, data: TensorDictBase
) -> None:
    flat = data.reshape(-1)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(flat)).chunk(NUM_MINIBATCHES):
            losses = loss_module(flat[rows])
            loss = (
                losses["loss_objective"]
                + losses["loss_critic"]
                + losses["loss_entropy"]
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
            optimizer.step()


def train(seed: int, max_steps: int) -> float:
    """Train until the goal or for `max_steps` env steps; return the mean return of the last episodes."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # more threads would slow down such small networks
    env = TransformedEnv(ParallelEnv(NUM_ENVS, make_env), RewardSum())
    env.set_seed(seed)
    actor, critic = _actor(), ValueOperator(_network(1, 1.0), in_keys=["observation"])
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    loss_module = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=0.2,
        entropy_coeff=0.003,
        critic_coeff=0.5,
        normalize_advantage=True,
    )
    loss_module.set_keys(sample_log_prob="action_log_prob")
    optimizer = torch.optim.Adam(loss_module.parameters(), LEARNING_RATE, eps=1e-5)
    frames_per_batch = NUM_ENVS * NUM_STEPS
    schedule = torch.optim.lr_scheduler.LinearLR(
        optimizer, 1.0, 0.0, max_steps // frames_per_batch
    )
    collector = Collector(
        env, actor, frames_per_batch=frames_per_batch, total_frames=max_steps
    )
    returns: deque[float] = deque(maxlen=NUM_COUNTED)
    mean = 0.0
    try:
        for number, data in enumerate(collector, 1):
            ended = data["next", "done"].squeeze(-1)
            returns.extend(data["next", "episode_reward"].squeeze(-1)[ended].tolist())
            mean = sum(returns) / max(1, len(returns))
            has_goal = len(returns) == NUM_COUNTED and mean >= GOAL
            if number % 10 == 0 or has_goal:
                print(
                    f"steps {number * frames_per_batch:7d}  mean return {mean:6.1f}",
                    flush=True,
                )
            if has_goal:
                break
            with torch.no_grad():
                advantage(data)
            _improve(loss_module, optimizer, data)
            schedule.step()
    finally:
        collector.shutdown()
    return mean


def main() -> int:
    """Read the command line, train, and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--max-steps",
        type=int,
        default=300_000,
        help="env steps after which it gives up",
    )
    arguments = parser.parse_args()
    mean = train(arguments.seed, arguments.max_steps)
    print(
        f"{'solved' if mean >= GOAL else 'not solved'}: mean return {mean:.1f} (goal {GOAL:g})"
    )
    return 0 if mean >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
