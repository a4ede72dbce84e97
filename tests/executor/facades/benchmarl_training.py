"""Two iterations of BenchMARL's IPPO on Melting Pot; `python -m tests.executor.facades.benchmarl_training FOLDER`.

In a process of its own, as BenchMARL leaves shared memory and a thread behind.
"""

from __future__ import annotations

import sys
import warnings

warnings.simplefilter("ignore")

import benchmarl.experiment.experiment
import psutil
import torch.nn
from benchmarl.algorithms import IppoConfig
from benchmarl.environments import MeltingPotTask
from benchmarl.experiment import Experiment, ExperimentConfig
from benchmarl.models import CnnConfig

from envherd.executor.facades.benchmarl import installed
from envherd.executor.facades.torchrl import ParallelEnv


def small_config(folder: str) -> ExperimentConfig:
    """Return the config of two iterations of six frames."""
    config = ExperimentConfig.get_from_yaml()
    config.parallel_collection = True
    config.on_policy_n_envs_per_worker = 2
    config.on_policy_collected_frames_per_batch = config.on_policy_minibatch_size = 6
    config.on_policy_n_minibatch_iters = 1
    config.max_n_iters, config.max_n_frames = 2, None
    config.evaluation = config.render = config.create_json = False
    config.loggers = []
    config.save_folder = folder
    return config


def small_model() -> CnnConfig:
    """Return a network that does not take long."""
    model = CnnConfig.get_from_yaml()
    model.cnn_num_cells, model.cnn_kernel_sizes, model.cnn_strides, model.cnn_paddings = [4], [8], [8], [0]
    model.mlp_num_cells, model.mlp_layer_class = [8], torch.nn.Linear
    return model


def main(folder: str) -> None:
    """Train, and check what came of it."""
    with installed(num_processes=1):
        experiment = Experiment(
            task=MeltingPotTask.COMMONS_HARVEST__OPEN.get_from_yaml(),
            algorithm_config=IppoConfig.get_from_yaml(),
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
    experiment.run()
    assert experiment.n_iters_performed == 2
    assert experiment.total_frames == 12
    assert any((was != now).any() for was, now in zip(before, experiment.policy.parameters(), strict=True))
    assert env.is_closed
    assert not any(psutil.pid_exists(worker.pid) for worker in workers)


if __name__ == "__main__":
    main(sys.argv[1])
