"""Envs that advance independently: what threads in a worker give, and our collector next to TorchRL's.

    python -m envherd.benchmarks.asynchronous threads      # envs that wait, one worker each and many threads in one
    python -m envherd.benchmarks.asynchronous collectors   # AsyncCollector next to TorchRL's AsyncBatchedCollector
    python -m envherd.benchmarks.asynchronous policy       # a policy of 2 ms over 64 envs of 5 ms, against both limits

The collectors run one after the other, twice, in turn; the better run counts. The machine should be idle.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete

from envherd.executor import AsyncCollector, ExecutorOptions, ParallelEnv


class Waiting(gymnasium.Env[np.ndarray, Any]):
    """An env that sleeps in each step, as one behind a socket does; episodes of 50 steps."""

    observation_space = Box(-1.0, 1.0, (4,), np.float32)
    action_space = Discrete(2)

    def __init__(self, step_s: float) -> None:
        self._step_s, self._num_steps = step_s, 0
        self._observation = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed, options=options)
        self._num_steps = 0
        return self._observation, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Wait."""
        if self._step_s:
            time.sleep(self._step_s)
        self._num_steps += 1
        return self._observation, float(action), self._num_steps >= 50, False, {}


def _zeros(root: Any, delay_s: float = 0.0) -> Any:
    """Act always alike, after a while."""
    if delay_s:
        time.sleep(delay_s)
    return root.set("action", torch.zeros(len(root), dtype=torch.int64))


def _rate(collect: Callable[[], int], seconds: float) -> float:
    """Return transitions per second."""
    collect()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        count += collect()
    return count / (time.perf_counter() - began)


def ours(num_envs: int, step_s: float, *, num_workers: int, has_threads: bool, policy_s: float, seconds: float) -> Any:
    """Return our transitions per second, the workers' memory per env (PSS, MiB), seconds to start, and statistics."""
    began = time.perf_counter()
    make = functools.partial(Waiting, step_s)
    options = ExecutorOptions(env_threads=has_threads)
    with ParallelEnv(num_envs, make, num_workers=num_workers, options=options) as env:
        started = time.perf_counter() - began
        policy = functools.partial(_zeros, delay_s=policy_s)
        collector = AsyncCollector(env, policy, frames_per_batch=4 * num_envs, layout="flat", close_env=False)
        rate = _rate(lambda: len(collector.collect()), seconds)
        memory = sum(worker.pss_bytes for worker in env.statistics().workers) / num_envs / 2**20
        found = collector.statistics()
        collector.close()
    return rate, memory, started, found


def torchrls(num_envs: int, step_s: float, seconds: float, **kwargs: Any) -> float:
    """Return the transitions per second of TorchRL's `AsyncBatchedCollector`."""
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import AsyncBatchedCollector

    collector = AsyncBatchedCollector(
        [functools.partial(_wrapped, step_s)] * num_envs,
        policy=TensorDictModule(_Zero(), in_keys=["observation"], out_keys=["action"]),
        frames_per_batch=4 * num_envs,
        transport="driver",
        env_backend="multiprocessing",
        max_batch_size=num_envs,
        **kwargs,
    )
    try:
        batches = iter(collector)
        return _rate(lambda: next(batches).numel(), seconds)
    finally:
        collector.shutdown()


class _Zero(torch.nn.Module):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.zeros(observation.shape[:-1], dtype=torch.int64)


def _wrapped(step_s: float) -> Any:
    from torchrl.envs import GymWrapper

    torch.set_num_threads(1)
    return GymWrapper(Waiting(step_s), categorical_action_encoding=True)


def threads(seconds: float) -> None:
    """Print what threads in a worker give for envs that wait for 5 ms."""
    print("| envs | workers | threads | transitions/s | of the envs' limit | MiB per env | start s |")
    for num_envs in (64, 256):
        for num_workers, has_threads in ((num_envs, False), (1, True), (2, True)):
            rate, memory, started, _ = ours(
                num_envs, 0.005, num_workers=num_workers, has_threads=has_threads, policy_s=0.0, seconds=seconds
            )
            limit = rate / (num_envs / 0.005)
            cells = (
                num_envs,
                num_workers,
                has_threads,
                f"{rate:,.0f}",
                f"{limit:.2f}",
                f"{memory:.2f}",
                f"{started:.1f}",
            )
            print(f"| {' | '.join(map(str, cells))} |")


def collectors(seconds: float) -> None:
    """Print our collector next to TorchRL's, for 8 envs that cost nothing and 32 that wait for 1 ms."""
    print("| envs | step ms | envherd/s | TorchRL/s, 1 per worker | TorchRL/s, 4 per worker | ratio to the better |")
    for num_envs, step_s in ((8, 0.0), (32, 0.001)):
        num_workers = 2 if not step_s else num_envs
        rates: list[list[float]] = [[], [], []]
        for _ in range(2):
            found = ours(num_envs, step_s, num_workers=num_workers, has_threads=False, policy_s=0.0, seconds=seconds)
            rates[0].append(found[0])
            for place, envs_per_worker in ((1, 1), (2, 4)):
                rates[place].append(
                    torchrls(num_envs, step_s, seconds, env_exchange="shm", envs_per_worker=envs_per_worker)
                )
        best = [max(of_one) for of_one in rates]
        texts = " | ".join(f"{rate:,.0f}" for rate in best)
        print(f"| {num_envs} | {step_s * 1000:g} | {texts} | {best[0] / max(best[1:]):.1f} |")


def policy(seconds: float) -> None:
    """Print what a policy of 2 ms gives over 64 envs of 5 ms, as a share of the lower of two limits."""
    num_envs, step_s, policy_s = 64, 0.005, 0.002
    rate, _, _, found = ours(num_envs, step_s, num_workers=2, has_threads=True, policy_s=policy_s, seconds=seconds)
    # All envs advance in step at best: each waits for its own step and for one call of the policy.
    print(f"{rate:,.0f}/s; bound by the {found.bound_by}; policy busy {found.policy_share:.2f} of the time; ", end="")
    print(f"{found.batch_size_mean:.1f} envs a call; ", end="")
    print(f"answers wait for {found.queue_p50_s * 1e3:.2f} ms (median), {found.queue_p99_s * 1e3:.2f} ms (99 %)")
    print(f"{rate / (num_envs / (step_s + policy_s)):.2f} of {num_envs / (step_s + policy_s):,.0f}/s")


def main() -> None:
    """Run one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=["threads", "collectors", "policy"])
    parser.add_argument("--seconds", type=float, default=5.0, help="for each figure")
    arguments = parser.parse_args()
    {"threads": threads, "collectors": collectors, "policy": policy}[arguments.table](arguments.seconds)


if __name__ == "__main__":
    main()
