"""BenchMARL on Melting Pot with envs in envherd's workers: two additional lines.

BenchMARL builds its envs, networks and losses from its configs. `installed` replaces TorchRL's batched env by ours.

Needs BenchMARL 1.5, which requires TorchRL 0.10 or 0.11:
    pip install "envherd[meltingpot]" "benchmarl>=1.5,<1.6"

Run: python examples/benchmarl_meltingpot.py [--substrate commons_harvest__open] [--algorithm ippo] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import deque
from pathlib import Path

from benchmarl.algorithms import IppoConfig, MappoConfig
from benchmarl.environments import MeltingPotTask
from benchmarl.experiment import Callback, Experiment, ExperimentConfig
from benchmarl.models import CnnConfig
from tensordict import TensorDictBase
from torch import nn

from envherd.benchmarl import installed

NUM_ENVS, NUM_STEPS = 4, 100
EPOCHS, NUM_MINIBATCHES = 2, 4
ALGORITHMS = {"ippo": IppoConfig, "mappo": MappoConfig}


class Curve(Callback):
    """Prints and keeps the mean return per player of the last 20 episodes."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[tuple[int, float, float]] = []
        self._returns: deque[float] = deque(maxlen=20)
        self._num_steps, self._began = 0, time.monotonic()

    def on_batch_collected(self, batch: TensorDictBase) -> None:
        """Take the returns of the episodes that ended in a batch `[N, T]`."""
        self._num_steps += batch.numel()
        ended = batch["next", "done"].squeeze(-1)
        if not ended.any():
            return
        self._returns.extend(batch["next", "agents", "episode_reward"][ended].mean((-2, -1)).tolist())
        mean, seconds = sum(self._returns) / len(self._returns), time.monotonic() - self._began
        self.points.append((self._num_steps, mean, seconds))
        rate = self._num_steps / seconds
        print(f"steps {self._num_steps:8d}  return per player {mean:7.2f}  {rate:5.0f} steps/s", flush=True)


def settings(num_steps: int, lr: float, folder: str) -> ExperimentConfig:
    """Return BenchMARL's settings: small batches, as in the other examples."""
    config = ExperimentConfig.get_from_yaml()
    config.parallel_collection = True  # else BenchMARL steps its envs one after another
    config.on_policy_n_envs_per_worker = NUM_ENVS
    config.on_policy_collected_frames_per_batch = NUM_ENVS * NUM_STEPS
    config.on_policy_minibatch_size = NUM_ENVS * NUM_STEPS // NUM_MINIBATCHES
    config.on_policy_n_minibatch_iters = EPOCHS
    config.max_n_iters, config.max_n_frames = None, num_steps
    config.lr, config.gamma = lr, 0.98
    config.evaluation = config.render = config.create_json = False
    config.loggers, config.save_folder = [], folder
    return config


def network() -> CnnConfig:
    """Return two convolutions: one over each cell of the map (8x8 pixels), and one over 3x3 cells."""
    config = CnnConfig.get_from_yaml()
    config.cnn_num_cells, config.cnn_kernel_sizes, config.cnn_strides, config.cnn_paddings = (
        [8, 16],
        [8, 3],
        [8, 1],
        [0, 0],
    )
    config.cnn_activation_class = config.mlp_activation_class = nn.ReLU
    config.mlp_num_cells, config.mlp_layer_class = [64], nn.Linear
    return config


def train(arguments: argparse.Namespace) -> list[tuple[int, float, float]]:
    """Train; return steps, return per player and seconds for each batch in which episodes ended."""
    task = MeltingPotTask[arguments.substrate.upper()].get_from_yaml()
    task.config["max_steps"] = arguments.episode
    learner = ALGORITHMS[arguments.algorithm].get_from_yaml()
    learner.entropy_coef, learner.lmbda = 0.02, 0.95
    curve = Curve()
    with tempfile.TemporaryDirectory() as folder:
        with installed():  # the envs of experiments that are built in this block live in envherd's workers
            experiment = Experiment(
                task=task,
                algorithm_config=learner,
                model_config=network(),
                critic_model_config=network(),
                seed=arguments.seed,
                config=settings(arguments.steps, arguments.lr, folder),
                callbacks=[curve],
            )
        experiment.run()
    return curve.points


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--substrate", default="commons_harvest__open")
    parser.add_argument("--algorithm", choices=sorted(ALGORITHMS), default="ippo")
    parser.add_argument("--episode", type=int, default=250, help="steps of an episode")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--lr", type=float, default=1e-4, help="learning rate; BenchMARL's pictures are not scaled to 0..1"
    )
    parser.add_argument("--steps", type=int, default=20_000, help="env steps in all")
    parser.add_argument("--curve", type=Path, help="write steps, return per player and seconds to this JSON file")
    arguments = parser.parse_args()
    points = train(arguments)
    if arguments.curve is not None:
        arguments.curve.write_text(json.dumps(points))


if __name__ == "__main__":
    main()
