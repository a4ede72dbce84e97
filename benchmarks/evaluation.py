"""What an evaluation of a suite takes: `evaluate`, and two schemes made by hand, on stand-ins for robot tasks.

    python -m benchmarks.evaluation            # three rounds of each scheme, in turn: about three minutes
    python -m benchmarks.evaluation --rounds 1 --tasks 4

Each task takes 1 s and 300 MB to build, and episodes of 5 to 20 steps of 50 ms. Envs sleep, so that other load on the
machine counts less. Every run has a fresh process. Its memory is the largest sum of the PSS of all its processes,
sampled each 50 ms, less that of the process before it began.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDictBase

from envherd.executor import ParallelEnv
from envherd.executor.show.evaluate import evaluate
from envherd.workers.processes import memory_of

EPISODES, WORKERS = 4, 2
BUILD_S, STEP_S, BUILD_BYTES = 1.0, 0.05, 300 * 10**6
_SAMPLE_S = 0.05


class Robot(gymnasium.Env[np.ndarray, Any]):
    """A stand-in for a task of a robot suite."""

    observation_space = Box(-np.inf, np.inf, (8,), np.float32)
    action_space = Discrete(2)

    def __init__(self, task: int) -> None:
        self.task, self._num_steps, self._length = task, 0, 0
        self._assets = np.ones(BUILD_BYTES, np.uint8)
        time.sleep(BUILD_S)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode, whose length depends on the seed."""
        super().reset(seed=seed, options=options)
        self._num_steps, self._length = 0, int(self.np_random.integers(5, 21))
        return np.zeros(8, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Take 50 ms."""
        time.sleep(STEP_S)
        self._num_steps += 1
        has_ended = self._num_steps >= self._length
        return np.zeros(8, np.float32), float(action), has_ended, False, {"success": bool(self._length % 2)}


def policy(td: TensorDictBase) -> TensorDictBase:
    """Always 1."""
    return td.set("action", torch.ones(td.batch_size, dtype=torch.int64))


def tasks(number: int) -> list[Callable[[], Robot]]:
    """Return the factories."""
    return [functools.partial(Robot, task) for task in range(number)]


def by_evaluate(number: int) -> int:
    """Use `evaluate`; return the number of episodes."""
    found = evaluate(policy, tasks(number), EPISODES, num_workers=WORKERS)
    return sum(one.num_episodes for one in found.tasks.values())


def all_at_once(number: int) -> int:
    """Build the envs of all tasks, and step them until each has played its episodes."""
    with ParallelEnv(tasks(number), num_workers=WORKERS, seed=0) as env:
        return _play(env, EPISODES)


def one_by_one(number: int) -> int:
    """Build an env in each worker for one task after the other."""
    total = 0
    for make_env in tasks(number):
        with ParallelEnv(WORKERS, make_env, num_workers=WORKERS, seed=0) as env:
            total += _play(env, EPISODES // WORKERS)
    return total


def _play(env: ParallelEnv, share: int) -> int:
    """Step until each env has played `share` episodes; return their number."""
    ended = torch.zeros(env.num_envs, dtype=torch.int64)
    root = env.reset()
    while int(ended.min()) < share:
        td, root = env.step_and_maybe_reset(policy(root))
        ended += td["next", "done"].flatten()
    return int(ended.clamp(max=share).sum())


SCHEMES = {"evaluate": by_evaluate, "all at once": all_at_once, "one by one": one_by_one}


def measure(name: str, number: int) -> dict[str, Any]:
    """Run a scheme in this process.

    Returns:
        "wall_s", "peak_bytes" and "episodes".
    """
    own, peak, is_over = os.getpid(), 0, threading.Event()
    base = memory_of(own)["pss"]

    def sample() -> None:
        nonlocal peak
        while not is_over.wait(_SAMPLE_S):
            peak = max(peak, memory_of(own)["pss"])

    sampler = threading.Thread(target=sample)
    sampler.start()
    began = time.perf_counter()
    episodes = SCHEMES[name](number)
    wall_s = time.perf_counter() - began
    is_over.set()
    sampler.join()
    return {"wall_s": wall_s, "peak_bytes": peak - base, "episodes": episodes}


def main() -> None:
    """Run the schemes in turn, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=12)
    parser.add_argument("--one", choices=SCHEMES, help="run this scheme here, and print its figures as JSON")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one, given.tasks)))
        return
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SCHEMES}
    for _ in range(given.rounds):
        for name, runs in found.items():
            command = [sys.executable, "-m", "benchmarks.evaluation", "--one", name, "--tasks", str(given.tasks)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            runs.append(json.loads(done.stdout))
            print(name, runs[-1], "load", os.getloadavg()[0], file=sys.stderr)
    print(f"{given.tasks} tasks x {EPISODES} episodes, {WORKERS} workers, {given.rounds} rounds\n")
    print("| scheme | wall, s: median (all) | peak memory, MB | episodes |\n|---|---|---|---|")
    for name, runs in found.items():
        walls = sorted(run["wall_s"] for run in runs)
        memory = max(run["peak_bytes"] for run in runs) / 1e6
        times = f"{statistics.median(walls):.1f} ({', '.join(f'{wall:.1f}' for wall in walls)})"
        print(f"| {name} | {times} | {memory:,.0f} | {runs[0]['episodes']} |")


if __name__ == "__main__":
    main()
