"""What the facades cost: CartPole, eight envs, each host library's own vector env beside ours under its API.

Every pool steps real `CartPole-v1` envs with the same actions and resets those that end, as each API does
it. See benchmarks/README.md for how to read the numbers.

Run: python benchmarks/facades.py [--quick]
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from harness import NUM_ENVS, Pool, Run, measure, summarise

TORCHRL, SB3, GYMNASIUM = "TorchRL ParallelEnv", "SB3 SubprocVecEnv", "Gymnasium AsyncVectorEnv"
SERIAL = "Gymnasium SyncVectorEnv"
#: Each peer, and the facade that takes its place.
FACADE_OF = {TORCHRL: "envherd as TorchRL", SB3: "envherd as SB3", GYMNASIUM: "envherd as Gymnasium"}
#: What `envherd size` advises for envs that take a few microseconds on two cores: the caller needs one of them.
NUM_WORKERS = 1
TARGETS = {TORCHRL: 5.0, SB3: 5.0, GYMNASIUM: 5.0}


def make_env() -> gymnasium.Env[Any, Any]:
    """Build one CartPole."""
    return gymnasium.make("CartPole-v1")


def _make_torchrl_env() -> Any:
    from torchrl.envs import GymWrapper

    return GymWrapper(make_env(), categorical_action_encoding=True)


def _torchrl(kind: Callable[..., Any], **kwargs: Any) -> Pool:
    env = kind(NUM_ENVS, _make_torchrl_env, **kwargs)
    actions = torch.tensor([0, 1] * (NUM_ENVS // 2))
    root = env.reset()

    def step() -> None:
        nonlocal root
        _, root = env.step_and_maybe_reset(root.set("action", actions))

    return step, env.close, 1


def _torchrl_own() -> Pool:
    from torchrl.envs import ParallelEnv

    return _torchrl(ParallelEnv, mp_start_method="fork")  # others only start more slowly


def _torchrl_facade() -> Pool:
    from envherd.executor.facades.torchrl import ParallelEnv

    return _torchrl(ParallelEnv, num_processes=NUM_WORKERS)


def _arrays(env: Any) -> Pool:
    actions = np.array([0, 1] * (NUM_ENVS // 2))
    env.reset()
    return functools.partial(env.step, actions), env.close, 1


def _sb3_own() -> Pool:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    return _arrays(SubprocVecEnv([make_env] * NUM_ENVS, start_method="fork"))  # others only start more slowly


def _sb3_facade() -> Pool:
    from envherd.executor.facades.sb3 import SubprocVecEnv

    return _arrays(SubprocVecEnv([make_env] * NUM_ENVS, num_workers=NUM_WORKERS))


def _gymnasium_own(kind: str) -> Pool:
    return _arrays(getattr(gymnasium.vector, kind)([make_env] * NUM_ENVS))


def _gymnasium_facade() -> Pool:
    from envherd.executor.facades.gymnasium import AsyncVectorEnv

    return _arrays(AsyncVectorEnv([make_env] * NUM_ENVS, num_workers=NUM_WORKERS))


CONTENDERS: dict[str, Callable[[], Pool]] = {
    GYMNASIUM: functools.partial(_gymnasium_own, "AsyncVectorEnv"),
    SB3: _sb3_own,
    TORCHRL: _torchrl_own,
    FACADE_OF[GYMNASIUM]: _gymnasium_facade,
    FACADE_OF[SB3]: _sb3_facade,
    FACADE_OF[TORCHRL]: _torchrl_facade,
    SERIAL: functools.partial(_gymnasium_own, "SyncVectorEnv"),
}


def _rival(name: str) -> str:
    return FACADE_OF.get(name, FACADE_OF[GYMNASIUM] if name == SERIAL else name)


def main() -> None:
    """Measure, print, and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    run = Run("facades", parser)
    summary = summarise(measure(CONTENDERS, run.plan), _rival)
    run.add("cartpole", f"CartPole: {NUM_ENVS} envs", summary)
    run.judge(summary, TARGETS)
    run.finish()


if __name__ == "__main__":
    main()
