"""Evaluate several tasks with a policy for each: success rates with intervals.

What it shows: `evaluate` builds the env of a task when a worker comes to it and drops it afterwards, so that a suite of
many tasks needs the memory of `num_workers` envs. All episodes are fixed before they begin, and each counts once.

Run: python examples/evaluate_suite.py
     python examples/evaluate_suite.py --episodes 50
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import torch
from tensordict import TensorDictBase

from envherd import BatchedEnv, EpisodeRecord, evaluate


def make_env(length: float) -> gymnasium.Env[Any, Any]:
    """Return a CartPole with a pole of this length."""
    env = gymnasium.make("CartPole-v1", max_episode_steps=200)
    env.unwrapped.length = length  # type: ignore[attr-defined]  # of CartPole
    return env


def policy_for(
    task: str, env: BatchedEnv
) -> Callable[[TensorDictBase], TensorDictBase]:
    """Return the policy of a task: here one gain by the length in its name; a checkpoint of the task, say."""
    weights = torch.zeros(*env.spec.observation[0].shape)
    weights[2:] = torch.tensor([1.0, 0.5 + float(task.split()[1])])
    return lambda td: td.set("action", (td["observation"] @ weights > 0).long())


def stands(_info: Mapping[str, Any], episode: EpisodeRecord) -> bool:
    """Return whether an episode was a success."""
    return episode.length == 200


def main() -> None:
    """Evaluate and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=10)
    given = parser.parse_args()
    tasks = {
        f"pole {length}": functools.partial(make_env, length)
        for length in (0.05, 0.5, 2.0)
    }
    found = evaluate(
        None,
        tasks,
        given.episodes,
        policy_for=policy_for,
        success=stands,
        num_workers=2,
    )
    for name, one in found.tasks.items():
        print(f"{name:10} success {one.success}  length {one.length}")
    print(f"all tasks  success {found.success}, {found.num_failed} episodes failed")


if __name__ == "__main__":
    main()
