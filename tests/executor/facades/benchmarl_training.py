"""Two iterations of a BenchMARL experiment on Melting Pot, with evaluation and video, in the facade's workers.

`python -m tests.executor.facades.benchmarl_training FOLDER ALGORITHM SUBSTRATE`. In a separate process, because
BenchMARL leaves shared memory and a thread behind.
"""

from __future__ import annotations

import io
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import benchmarl.experiment.experiment
import psutil
import torch
from benchmarl.algorithms import IppoConfig, MappoConfig
from benchmarl.environments import MeltingPotTask, Task
from benchmarl.experiment import Experiment, ExperimentConfig
from benchmarl.models import CnnConfig
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from envherd.executor.facades.benchmarl import installed
from envherd.executor.facades.torchrl import ParallelEnv

ALGORITHMS = {"ippo": IppoConfig, "mappo": MappoConfig}
NUM_ENVS = 2
FRAMES = 6
#: Shorter than an iteration, so that envs are reset inside a batch.
MAX_STEPS = 2


def small_config(folder: str) -> ExperimentConfig:
    """Return the config of two iterations of six frames, each followed by a recorded evaluation."""
    config = ExperimentConfig.get_from_yaml()
    config.parallel_collection = True
    config.on_policy_n_envs_per_worker = NUM_ENVS
    config.on_policy_collected_frames_per_batch = config.on_policy_minibatch_size = FRAMES
    config.on_policy_n_minibatch_iters = 1
    config.max_n_iters, config.max_n_frames = 2, None
    config.evaluation = config.render = True
    config.evaluation_interval, config.evaluation_episodes = FRAMES, 1
    config.create_json = True
    config.loggers = ["tensorboard"]
    config.save_folder = folder
    return config


def small_model() -> CnnConfig:
    """Return a small network."""
    model = CnnConfig.get_from_yaml()
    model.cnn_num_cells, model.cnn_kernel_sizes, model.cnn_strides, model.cnn_paddings = [4], [8], [8], [0]
    model.mlp_num_cells, model.mlp_layer_class = [8], torch.nn.Linear
    return model


def short_task(substrate: str) -> Task:
    """Return BenchMARL's task of a substrate, with episodes of `MAX_STEPS`."""
    task = MeltingPotTask[substrate.upper()].get_from_yaml()
    task.config["max_steps"] = MAX_STEPS
    return task


def main(folder: str, algorithm: str, substrate: str) -> None:
    """Train, and check the envs, the data, the policy and the logs."""
    with installed(num_processes=1):
        experiment = Experiment(
            task=short_task(substrate),
            algorithm_config=ALGORITHMS[algorithm].get_from_yaml(),
            model_config=small_model(),
            critic_model_config=small_model(),
            seed=0,
            config=small_config(folder),
        )
    assert benchmarl.experiment.experiment.ParallelEnv is not ParallelEnv
    env = experiment.collector.env.base_env
    assert isinstance(env, ParallelEnv)
    before = [parameter.clone() for parameter in experiment.policy.parameters()]
    workers = list(env._workers)
    assert all(worker.is_alive() for worker in workers)
    collected: list[Any] = []
    experiment._on_batch_collected = collected.append
    experiment.run()
    check_batches(collected)
    assert experiment.n_iters_performed == 2
    assert experiment.total_frames == 2 * FRAMES
    assert any((was != now).any() for was, now in zip(before, experiment.policy.parameters(), strict=True))
    assert env.is_closed
    assert not any(psutil.pid_exists(worker.pid) for worker in workers)
    (logger,) = experiment.logger.loggers
    logger.experiment.close()  # BenchMARL leaves that to the end of the process
    check_logs(Path(folder))


def check_batches(batches: list) -> None:
    """Check that both envs' episodes end in every batch, and that between ends a root is the `next` before it."""
    assert len(batches) == 2
    for batch in batches:
        assert batch.shape == (NUM_ENVS, FRAMES // NUM_ENVS)
        ended = batch["next", "done"].flatten(1)
        assert ended.any(dim=1).all()
        before, after = batch["next", "RGB"][:, :-1], batch["RGB"][:, 1:]
        same = (before == after).flatten(2).all(dim=2)
        assert same[~ended[:, :-1]].all()


def check_logs(folder: Path) -> None:
    """Check that both evaluations were recorded and their returns written."""
    # Hyperparameters are in a separate file.
    files = (EventAccumulator(str(path)).Reload() for path in folder.rglob("events.out.tfevents.*"))
    (logged,) = (file for file in files if file.Tags()["images"])
    films = [Image.open(io.BytesIO(film.encoded_image_string)) for film in logged.Images("eval_video")]
    assert len(films) == 2
    for film in films:
        assert len(film.convert("L").getcolors(2**16) or ()) > 1  # not a picture of one color
    assert len(logged.Scalars("eval_reward_episode_reward_mean")) == 2
    assert list(folder.rglob("*.json"))


if __name__ == "__main__":
    main(*sys.argv[1:])
