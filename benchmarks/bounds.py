"""Measured upper bounds of the machine: a serial loop, and free-running processes."""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.pools import Contender, Job, Pool
from benchmarks.watching import die_with_parent
from benchmarks.work import import_melting_pot

IDEAL, SERIAL, INSTALLED = (
    "measured ideal",
    "serial loop",
    "serial loop of substrate.build",
)
#: Seconds that the owner of free-running processes sleeps at a time.
_NAP_S = 5e-3
_NUM_DRAWN = 64


def stepper(job: Job) -> Callable[[], bool]:
    """Build one env, and return a function that steps it, resets it when it ends, and returns whether it ended."""
    env = job.make_env()
    env.reset()
    if job.family == "meltingpot":
        return _dm_stepper(env, job.episode or sys.maxsize)

    def step() -> bool:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
        return bool(terminated or truncated)

    action = env.action_space.sample()
    return step


def _dm_stepper(env: Any, episode: int) -> Callable[[], bool]:
    drawn = [
        [random.randrange(int(spec.num_values)) for spec in env.action_spec()]
        for _ in range(_NUM_DRAWN)
    ]
    turn = 0

    def step() -> bool:
        nonlocal turn
        turn += 1
        has_ended = (
            bool(env.step(drawn[turn % _NUM_DRAWN]).last()) or turn % episode == 0
        )
        if has_ended:
            env.reset()
        return has_ended

    return step


def serial_loop(job: Job) -> Pool:
    """Step the envs one after the other in this process: the lower bound for a useful pool."""
    steppers = [stepper(job) for _ in range(job.num_envs)]
    ended = 0

    def step() -> int:
        nonlocal ended
        for one in steppers:
            ended += one()
        return len(steppers)

    return Pool(step, lambda: None, lambda: ended)


def installed_loop(job: Job) -> Pool:
    """Step Melting Pot's own envs one after the other: the installed Lua code, without envherd."""
    import_melting_pot()
    from meltingpot import substrate

    name = job.make_env.name  # type: ignore[attr-defined]  # its factory
    roles = substrate.get_config(name).default_player_roles
    return serial_loop(
        replace(job, make_env=functools.partial(substrate.build, name, roles=roles))
    )


def free_running(job: Job) -> Pool:
    """Step the envs in `num_workers` processes without any communication; they are stopped outside their slots."""
    context = multiprocessing.get_context("fork")
    counts = multiprocessing.RawArray("q", 16 * 2 * job.num_workers)
    words: Any = np.frombuffer(counts, np.int64).reshape(job.num_workers, 2, 16)
    processes = [
        context.Process(
            target=_run_freely, args=(job, words[worker], len(block)), daemon=True
        )
        for worker, block in enumerate(
            np.array_split(np.arange(job.num_envs), job.num_workers)
        )
    ]
    for process in processes:
        process.start()
    while not words[:, 0, 0].all():
        if not all(process.is_alive() for process in processes):
            raise RuntimeError("a free-running process ended while it built its envs")
        time.sleep(0.01)

    def signal_all(number: int) -> None:
        for process in processes:
            os.kill(int(process.pid or 0), number)

    seen = 0

    def step() -> int:
        nonlocal seen
        before = seen
        time.sleep(_NAP_S)
        seen = int(words[:, 0, 0].sum())
        return seen - before

    def wake() -> None:
        nonlocal seen
        signal_all(signal.SIGCONT)
        seen = int(words[:, 0, 0].sum())

    def close() -> None:
        for process in processes:
            process.kill()
            process.join()
            process.close()

    pool = Pool(
        step,
        close,
        lambda: int(words[:, 1, 0].sum()),
        wake,
        lambda: signal_all(signal.SIGSTOP),
    )
    pool.rest()
    return pool


def _run_freely(job: Job, words: Any, num_envs: int) -> None:
    die_with_parent()
    steppers = [stepper(job) for _ in range(num_envs)]
    steps, ended = memoryview(words[0]), memoryview(words[1])
    while True:
        for step in steppers:
            if step():
                ended[0] += 1
            steps[0] += 1


CONTENDERS = (
    Contender(
        name=IDEAL,
        build=free_running,
        kind="bound",
        families=("gymnasium", "meltingpot"),
    ),
    Contender(
        name=SERIAL,
        build=serial_loop,
        kind="bound",
        families=("gymnasium", "meltingpot"),
    ),
    Contender(
        name=INSTALLED, build=installed_loop, kind="bound", families=("meltingpot",)
    ),
)
