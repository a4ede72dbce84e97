"""BenchMARL on a Melting Pot substrate, with its own batched env (TorchRL's `ParallelEnv`) and with the facade's.

    python -m benchmarks.benchmarl

Each experiment runs in its own process: IPPO with a CNN, the same config and seed. It needs BenchMARL 1.5, with TorchRL
0.11, and the extra of Melting Pot.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

KINDS = ("BenchMARL", "envherd")
SUBSTRATE = "commons_harvest__open"
NUM_ENVS, NUM_WORKERS = 4, 2
FRAMES, ITERATIONS, MAX_STEPS = 400, 4, 1000
ROUNDS = 1
FIGURES = ("build", "collection", "iteration")


def _experiment(folder: str) -> Any:
    from benchmarl.algorithms import IppoConfig
    from benchmarl.environments import MeltingPotTask
    from benchmarl.experiment import Experiment, ExperimentConfig
    from benchmarl.models import CnnConfig
    from torch.nn import Linear

    config = ExperimentConfig.get_from_yaml()
    config.parallel_collection, config.on_policy_n_envs_per_worker = True, NUM_ENVS
    config.on_policy_collected_frames_per_batch, config.on_policy_minibatch_size = FRAMES, FRAMES // 2
    config.on_policy_n_minibatch_iters = 1
    config.max_n_iters, config.max_n_frames = ITERATIONS, None
    config.evaluation = config.render = config.create_json = False
    config.loggers, config.save_folder = [], folder

    def model() -> Any:
        made = CnnConfig.get_from_yaml()
        made.cnn_num_cells, made.cnn_kernel_sizes, made.cnn_strides, made.cnn_paddings = [16], [8], [8], [0]
        made.mlp_num_cells, made.mlp_layer_class = [32], Linear
        return made

    task = MeltingPotTask[SUBSTRATE.upper()].get_from_yaml()
    task.config["max_steps"] = MAX_STEPS
    return Experiment(
        task=task,
        algorithm_config=IppoConfig.get_from_yaml(),
        model_config=model(),
        critic_model_config=model(),
        seed=0,
        config=config,
    )


def run(kind: str) -> dict[str, Any]:
    """Train for some iterations in this process.

    Returns:
        Seconds: `build` until all envs are reset for the first time; `collection` and `iteration`, the median of the
        iterations after the first; and the rewards of each batch, summed.
    """
    from envherd.executor.facades.benchmarl import installed

    rewards: list[float] = []
    timers: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        with installed(num_processes=NUM_WORKERS) if kind == "envherd" else contextlib.nullcontext():
            experiment = _experiment(folder)
        experiment.collector.env.reset()
        build = time.perf_counter() - start
        logger = experiment.logger
        log, log_collection = logger.log, logger.log_collection

        def note(figures: dict[str, float], *args: Any, **kwargs: Any) -> None:
            if "timers/iteration_time" in figures:
                timers.append(figures)
            log(figures, *args, **kwargs)

        def note_batch(batch: Any, *args: Any, **kwargs: Any) -> Any:
            (group,) = experiment.group_map
            rewards.append(batch["next", group, "reward"].sum().item())
            return log_collection(batch, *args, **kwargs)

        logger.log, logger.log_collection = note, note_batch
        experiment.run()
    medians = {
        name: statistics.median(one[f"timers/{name}_time"] for one in timers[1:])
        for name in ("collection", "iteration")
    }
    return {"build": build, **medians, "rewards": rewards}


def main() -> None:
    """Run both in turn, `ROUNDS` times, and print; with the name of one, run that and print JSON."""
    if sys.argv[1:]:
        sys.stdout.write(json.dumps(run(sys.argv[1])) + "\n")
        return
    ran: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for _ in range(ROUNDS):
        for kind in KINDS:
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.benchmarl", kind]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            ran[kind].append(json.loads(done.stdout.splitlines()[-1]))
    for kind, results in ran.items():
        for name in FIGURES:
            seconds = ", ".join(f"{one[name]:.2f}" for one in results)
            print(f"{kind:10} {name:11} {seconds} s")
        print(f"{kind:10} rewards     {results[0]['rewards']}")


if __name__ == "__main__":
    main()
