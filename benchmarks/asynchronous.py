"""Envs that advance independently: the speed with threads in a worker, and envherd compared with TorchRL.

    python -m benchmarks.asynchronous threads      # envs that wait, one worker each and many threads in one
    python -m benchmarks.asynchronous pools        # send and recv next to TorchRL's AsyncEnvPool
    python -m benchmarks.asynchronous collectors   # AsyncCollector next to TorchRL's AsyncBatchedCollector
    python -m benchmarks.asynchronous policy       # a policy of 2 ms over 64 envs of 5 ms

The machine should be idle. TorchRL starts a process for each env, or for four of them, and each of them imports all of
TorchRL: before it gives a figure for 32 envs, two processors are busy for a minute or more.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete

from envherd.executor import AsyncCollector, ExecutorOptions, ParallelEnv

#: No-op envs, and envs with steps of 1 ms and resets of 200 ms: number of envs, seconds of a step, of a reset.
SERIES = {"free": (8, 0.0, 0.0), "slow resets": (32, 0.001, 0.2)}
#: Number of envs in one of TorchRL's processes.
ENVS_PER_WORKER = (1, 4)


class Waiting(gymnasium.Env[np.ndarray, Any]):
    """An env that sleeps in each step and reset, like one behind a socket; episodes of 50 steps."""

    observation_space = Box(-1.0, 1.0, (4,), np.float32)
    action_space = Discrete(2)

    def __init__(self, step_s: float, reset_s: float = 0.0) -> None:
        self._step_s, self._reset_s, self._num_steps = step_s, reset_s, 0
        self._observation = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed, options=options)
        if self._reset_s:
            time.sleep(self._reset_s)
        self._num_steps = 0
        return self._observation, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Wait."""
        if self._step_s:
            time.sleep(self._step_s)
        self._num_steps += 1
        return self._observation, float(action), self._num_steps >= 50, False, {}


def zeros(root: Any, delay_s: float = 0.0) -> Any:
    """Return constant actions after a delay."""
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


def ceiling(num_envs: int, step_s: float, reset_s: float, seconds: float) -> float:
    """Return the steps per second of waiting envs, each on its own thread of this process."""
    counts = [0] * num_envs
    began = threading.Barrier(num_envs)

    def drive(place: int) -> None:
        env = Waiting(step_s, reset_s)
        env.reset()
        began.wait()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            counts[place] += 1
            if env.step(0)[2]:
                env.reset()

    driving = [threading.Thread(target=drive, args=(place,)) for place in range(num_envs)]
    for thread in driving:
        thread.start()
    for thread in driving:
        thread.join()
    return sum(counts) / seconds


def ours(  # noqa: PLR0913  # what differs between the tables
    num_envs: int,
    step_s: float,
    reset_s: float = 0.0,
    *,
    num_workers: int,
    has_threads: bool,
    policy_s: float,
    seconds: float,
    min_batch: int = 1,
    affinity: tuple[int, ...] | None = None,
) -> Any:
    """Return envherd's transitions per second, memory per env (PSS, MiB), seconds to start, and statistics."""
    began = time.perf_counter()
    make = functools.partial(Waiting, step_s, reset_s)
    options = ExecutorOptions(env_threads=has_threads, affinity=affinity)
    with ParallelEnv(num_envs, make, num_workers=num_workers, options=options) as env:
        started = time.perf_counter() - began
        policy = functools.partial(zeros, delay_s=policy_s)
        collector = AsyncCollector(
            env, policy, frames_per_batch=4 * num_envs, layout="flat", min_batch=min_batch, close_env=False
        )
        rate = _rate(lambda: len(collector.collect()), seconds)
        memory = sum(worker.pss_bytes for worker in env.statistics().workers) / num_envs / 2**20
        found = collector.statistics()
        collector.close()
    return rate, memory, started, found


def send_and_recv(num_envs: int, step_s: float, reset_s: float, seconds: float, num_workers: int) -> float:
    """Return the transitions per second of `send` and `recv`, the first that are ready."""
    make, options = functools.partial(Waiting, step_s, reset_s), ExecutorOptions(env_threads=step_s > 0)
    with ParallelEnv(num_envs, make, num_workers=num_workers, options=options) as env:
        env.reset()
        env.send(zeros(env.current()))

        def turn() -> int:
            env_ids = env.recv(1, max_envs=num_envs, with_root=False)["env_ids"]
            env.send(zeros(env.current(env_ids)), env_ids)
            return len(env_ids)

        rate = _rate(turn, seconds)
        env.recv()
    return rate


def pool(num_envs: int, step_s: float, reset_s: float, seconds: float, envs_per_worker: int) -> float:
    """Return the transitions per second of TorchRL's `AsyncEnvPool`."""
    from torchrl.envs import AsyncEnvPool

    makers = [functools.partial(wrapped, functools.partial(Waiting, step_s, reset_s))] * num_envs
    env = AsyncEnvPool(makers, backend="multiprocessing", exchange="shm", envs_per_worker=envs_per_worker)
    try:
        env.async_reset_send(env_index=list(range(num_envs)))
        env.async_step_and_maybe_reset_send(zeros(env.async_reset_recv(min_get=num_envs)))

        def turn() -> int:
            _, root = env.async_step_and_maybe_reset_recv(min_get=1)
            env.async_step_and_maybe_reset_send(zeros(root))
            return len(root)

        rate = _rate(turn, seconds)
        env.async_step_and_maybe_reset_recv(min_get=num_envs)
    finally:
        env.close()
    return rate


def torchrls(make: Callable[[], Any], num_envs: int, frames: int, **kwargs: Any) -> Any:
    """Return TorchRL's `AsyncBatchedCollector` of batches of a number of frames."""
    from torchrl.collectors import AsyncBatchedCollector

    makers = [functools.partial(wrapped, make)] * num_envs
    return AsyncBatchedCollector(
        makers, frames_per_batch=frames, env_backend="multiprocessing", max_batch_size=num_envs, **kwargs
    )


class _Zero(torch.nn.Module):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.zeros(observation.shape[:-1], dtype=torch.int64)


def wrapped(make: Callable[[], Any]) -> Any:
    """Return TorchRL's wrapper of a Gymnasium env, in a process with one thread of torch."""
    from torchrl.envs.libs import gym

    gym._has_sb3 = False  # noqa: SLF001  # else each process imports it, and TensorFlow with it: 1 GiB, some seconds
    torch.set_num_threads(1)
    return gym.GymWrapper(make(), categorical_action_encoding=True)


def threads(seconds: float, num_workers: int) -> None:
    """Print the speed with threads in a worker for envs that wait for 5 ms."""
    print("| envs | workers | threads | transitions/s | of the envs' limit | MiB per env | start s |")
    for num_envs in (64, 256):
        for count, has_threads in ((num_envs, False), (1, True), (num_workers, True)):
            rate, memory, started, _ = ours(
                num_envs, 0.005, num_workers=count, has_threads=has_threads, policy_s=0.0, seconds=seconds
            )
            limit = rate / (num_envs / 0.005)
            cells = (
                num_envs,
                count,
                has_threads,
                f"{rate:,.0f}",
                f"{limit:.2f}",
                f"{memory:.2f}",
                f"{started:.1f}",
            )
            print(f"| {' | '.join(map(str, cells))} |")


def pools(seconds: float, num_workers: int) -> None:
    """Print `send` and `recv` next to TorchRL's pool."""

    def rates(num_envs: int, step_s: float, reset_s: float) -> Iterator[float | None]:
        yield ceiling(num_envs, step_s, reset_s, seconds) if step_s else None
        yield send_and_recv(num_envs, step_s, reset_s, seconds, num_workers)
        for count in ENVS_PER_WORKER:
            yield pool(num_envs, step_s, reset_s, seconds, count)

    print("| envs | alone | `send`, `recv` | TorchRL's, 1 per worker | TorchRL's, 4 per worker |")
    for name, case in SERIES.items():
        _print_rates(f"{case[0]} {name}", rates(*case))


def collectors(seconds: float, num_workers: int) -> None:
    """Compare our collector with TorchRL's."""
    from tensordict.nn import TensorDictModule

    def rates(num_envs: int, step_s: float, reset_s: float) -> Iterator[float | None]:
        yield ceiling(num_envs, step_s, reset_s, seconds) if step_s else None
        kwargs: Any = {"num_workers": num_workers, "has_threads": step_s > 0, "policy_s": 0.0}
        yield ours(num_envs, step_s, reset_s, seconds=seconds, **kwargs)[0]
        acting = TensorDictModule(_Zero(), in_keys=["observation"], out_keys=["action"])
        for count in ENVS_PER_WORKER:
            collector = torchrls(
                functools.partial(Waiting, step_s, reset_s),
                num_envs,
                4 * num_envs,
                policy=acting,
                transport="driver",
                env_exchange="shm",
                envs_per_worker=count,
            )
            try:
                frames = iter(collector)
                yield _rate(lambda frames=frames: next(frames).numel(), seconds)  # type: ignore[misc]
            finally:
                collector.shutdown()

    print("| envs | alone | `AsyncCollector` | TorchRL's, 1 per worker | TorchRL's, 4 per worker |")
    for name, case in SERIES.items():
        _print_rates(f"{case[0]} {name}", rates(*case))


def _print_rates(name: str, rates: Iterator[float | None]) -> None:
    """Print a row of a table, each figure when it is there."""
    print(f"| {name} |", end="", flush=True)
    for rate in rates:
        print("  |" if rate is None else f" {rate:,.0f} |", end="", flush=True)
    print(flush=True)


def policy(seconds: float, num_workers: int) -> None:
    """Print the speed of a policy of 2 ms over 64 envs of 5 ms, and the limits."""
    num_envs, step_s, policy_s = 64, 0.005, 0.002
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    print("| affinity | min_batch | transitions/s | envs a call | policy busy | answers wait, ms: median | 99 % |")
    for affinity, least in itertools.product((None, cpus), (1, 20, 32, 64)):
        rate, _, _, found = ours(
            num_envs,
            step_s,
            num_workers=num_workers,
            has_threads=True,
            policy_s=policy_s,
            seconds=seconds,
            min_batch=least,
            affinity=affinity,
        )
        waits = f"{found.queue_p50_s * 1e3:.2f} | {found.queue_p99_s * 1e3:.2f}"
        busy = f"{found.batch_size_mean:.1f} | {found.policy_share:.2f}"
        print(f"| {affinity is not None} | {least} | {rate:,.0f} | {busy} | {waits} |", flush=True)
    alone = ceiling(num_envs, step_s, 0.0, seconds)
    delayed = ceiling(num_envs, step_s + policy_s, 0.0, seconds)
    print(f"The envs alone: {alone:,.0f}/s; with 2 ms more a step: {delayed:,.0f}/s; the policy alone: ", end="")
    print(f"{num_envs / policy_s:,.0f}/s.")


TABLES = {"threads": threads, "pools": pools, "collectors": collectors, "policy": policy}


def choose(doc: str | None, tables: Mapping[str, Callable[[float, int], None]], seconds: float, workers: int) -> None:
    """Run one of a script's tables, as its command line says.

    Args:
        doc: the script's.
        tables: name -> function of the seconds for each figure and the number of processes.
        seconds: for each figure, by default.
        workers: processes, by default.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=list(tables))
    parser.add_argument("--seconds", type=float, default=seconds, help="for each figure")
    parser.add_argument("--workers", type=int, default=workers, help="processes of envherd")
    arguments = parser.parse_args()
    tables[arguments.table](arguments.seconds, arguments.workers)


if __name__ == "__main__":
    choose(__doc__, TABLES, seconds=5.0, workers=2)
