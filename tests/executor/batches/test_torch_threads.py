"""The caller copies data on one thread, whatever torch may use: torch's threads spin, and workers need processors."""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
NUM_ENVS = 8


def others_us() -> int:
    """Return the processor time of all other threads of this process, in microseconds."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        if task.name != Path("/proc/self").resolve().name:
            total += int((task / "schedstat").read_text().split()[0]) // 1000
    return total


def act(td: Any) -> Any:
    import torch

    return td.set("action", torch.zeros(len(td), dtype=torch.int64))


def collects(**kwargs: Any) -> int:
    from benchmarks.work import SteadyFactory
    from envherd.executor import AsyncCollector, ParallelEnv

    env = ParallelEnv(NUM_ENVS, SteadyFactory((84, 84, 4), "uint8"), num_workers=2)
    with AsyncCollector(env, act, frames_per_batch=128, **kwargs) as collector:
        before = others_us()
        for _ in range(4):
            collector.collect()
        return others_us() - before


def steps() -> int:
    import torch
    from gymnasium.wrappers import TimeLimit
    from tensordict import TensorDict

    from benchmarks.work import SteadyFactory
    from envherd.executor import Collector, ParallelEnv

    make = SteadyFactory((84, 84, 4), "uint8")
    with ParallelEnv(NUM_ENVS, lambda: TimeLimit(make(), 6), num_workers=2) as env:
        before = others_us()
        root = env.reset()
        _, root = env.step_and_maybe_reset(act(root))
        mask = torch.arange(NUM_ENVS) % 2 == 0
        root = env.reset(TensorDict({"_reset": mask}, [NUM_ENVS]))
        env.step(act(root))
        env.send(act(env.current()))
        env.recv(3, max_envs=4)
        env.recv()
        env.rollout(8, act, break_when_any_done=False)
        # Cut short.
        assert env.rollout(8, act, break_when_any_done=True).shape == (NUM_ENVS, 6)
        Collector(env, act, frames_per_batch=32, close_env=False).collect()
        return others_us() - before


CASES = {
    "steps": steps,
    "collector of rows": collects,
    "collector of transitions": functools.partial(collects, layout="flat"),
    "collector with batch sizes": functools.partial(
        collects, batch_sizes=(3, NUM_ENVS)
    ),
}


@pytest.mark.long
def test_no_thread_of_torch_runs():
    code = f"import torch; torch.set_num_threads(4); from {__name__} import CASES"
    script = code + "; print({name: case() for name, case in CASES.items()})"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{dict.fromkeys(CASES, 0)}\n"
