"""What a parallel step costs besides the env: envs that do nothing, stepped by us and by others, in one run.

See benchmarks/README.md for how to read the numbers.

Run: python benchmarks/step_overhead.py [--quick]
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from harness import NUM_ENVS, NUM_WORKERS, Pool, Run, measure, summarise

from envherd.executor import ParallelEnv, SerialEnv

OURS, GYMNASIUM, TORCHRL = "envherd", "Gymnasium AsyncVectorEnv", "TorchRL ParallelEnv"
#: How many times the throughput of a peer is wanted, on the tiny env.
TARGETS = {GYMNASIUM: 8.0, TORCHRL: 30.0}
ROLLOUT_STEPS = 64


class Idle(gymnasium.Env[np.ndarray, Any]):
    """An env that costs nothing: always the same observation, never an end."""

    action_space = Discrete(2)
    observation: np.ndarray

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Return the observation."""
        super().reset(seed=seed, options=options)
        return self.observation, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:  # noqa: ARG002  # it does nothing
        """Return the observation."""
        return self.observation, 0.0, False, False, {}


class Tiny(Idle):
    """Four floats."""

    observation_space = Box(-1.0, 1.0, (4,), np.float32)
    observation = np.zeros(4, np.float32)


class Image(Idle):
    """Four stacked frames of 84 x 84 bytes."""

    observation_space = Box(0, 255, (84, 84, 4), np.uint8)
    observation = np.zeros((84, 84, 4), np.uint8)


WORKLOADS: dict[str, type[Idle]] = {"tiny": Tiny, "image": Image}


def _envherd(make_env: Callable[[], Idle], *, copy: bool = True, is_serial: bool = False) -> Pool:
    kind: Any = SerialEnv if is_serial else ParallelEnv
    env = kind(NUM_ENVS, make_env, num_workers=NUM_WORKERS, seed=0, copy=copy)
    actions = torch.zeros(NUM_ENVS, dtype=torch.int64)
    root = env.reset()

    def step() -> None:
        nonlocal root
        _, root = env.step_and_maybe_reset(root.set("action", actions))

    return step, env.close, 1


def _envherd_rollout(make_env: Callable[[], Idle]) -> Pool:
    env = ParallelEnv(NUM_ENVS, make_env, num_workers=NUM_WORKERS, seed=0)
    actions = torch.zeros(NUM_ENVS, dtype=torch.int64)
    env.reset()

    def collect() -> None:
        env.rollout(
            ROLLOUT_STEPS, lambda root: root.set("action", actions), auto_reset=False, break_when_any_done=False
        )

    return collect, env.close, ROLLOUT_STEPS


def _gymnasium(make_env: Callable[[], Idle]) -> Pool:
    env = gymnasium.vector.AsyncVectorEnv([make_env] * NUM_ENVS)
    actions = np.zeros(NUM_ENVS, np.int64)
    env.reset()
    return lambda: env.step(actions), env.close, 1


def _sb3(make_env: Callable[[], Idle]) -> Pool:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    env = SubprocVecEnv([make_env] * NUM_ENVS, start_method="fork")  # others only start more slowly
    actions = np.zeros(NUM_ENVS, np.int64)
    env.reset()
    return lambda: env.step(actions), env.close, 1


def _torchrl(make_env: Callable[[], Idle]) -> Pool:
    from torchrl.envs import GymWrapper
    from torchrl.envs import ParallelEnv as TorchRLParallelEnv

    make = functools.partial(_wrap_for_torchrl, GymWrapper, make_env)
    env = TorchRLParallelEnv(NUM_ENVS, make, mp_start_method="fork")  # others only start more slowly
    actions = torch.zeros(NUM_ENVS, dtype=torch.int64)
    root = env.reset()

    def step() -> None:
        nonlocal root
        _, root = env.step_and_maybe_reset(root.set("action", actions))

    return step, env.close, 1


def _wrap_for_torchrl(wrapper: Any, make_env: Callable[[], Idle]) -> Any:
    return wrapper(make_env(), categorical_action_encoding=True)


CONTENDERS: dict[str, Callable[[Callable[[], Idle]], Pool]] = {
    GYMNASIUM: _gymnasium,
    TORCHRL: _torchrl,
    "SB3 SubprocVecEnv": _sb3,
    OURS: _envherd,
    "envherd copy=False": functools.partial(_envherd, copy=False),
    f"envherd rollout({ROLLOUT_STEPS})": _envherd_rollout,
    "envherd SerialEnv": functools.partial(_envherd, is_serial=True),
}


def _rival(_name: str) -> str:
    return OURS


def main() -> None:
    """Measure, print, and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="default: all")
    run = Run("step_overhead", parser)
    for workload in run.arguments.workload or WORKLOADS:
        builders = {name: functools.partial(build, WORKLOADS[workload]) for name, build in CONTENDERS.items()}
        summary = summarise(measure(builders, run.plan), _rival)
        run.add(workload, f"{workload}: {NUM_ENVS} envs that cost nothing", summary)
        if workload == "tiny":
            run.judge(summary, TARGETS)
    run.finish()


if __name__ == "__main__":
    main()
