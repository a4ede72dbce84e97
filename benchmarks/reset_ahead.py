"""The gain of reset-ahead where processors are not short: envs and a policy that wait for Melting Pot's times.

Both executors, with one worker per env, are alive together and take turns in short slots; the ratio within a round is
reported. Envs and the policy sleep, as if each had a processor, and reset-ahead uses the time of the policy.
"""

from __future__ import annotations

import functools
import statistics
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.accounting import usage_of
from envherd.executor import ExecutorOptions, MeltingPotFactory, ParallelEnv
from envherd.workers.adapters.base import StepValues
from envherd.workers.testing import CountingEnv

SUBSTRATE = "commons_harvest__open"
NUM_ENVS, LENGTH, POLICY_S = 8, 60, 20e-3
#: Steps by which the episodes of neighbouring envs differ in length, so that they do not all end together.
STAGGER = 3


@dataclass(frozen=True)
class Times:
    """Seconds of a step and of a reset of one env, and of the policy for a batch."""

    step_s: float
    reset_s: float
    policy_s: float


class WaitingEnv(CountingEnv):
    """Sleeps for the time that another env would compute."""

    def __init__(self, steps: int, step_s: float, reset_s: float) -> None:
        super().__init__(steps)
        self._step_s, self._reset_s = step_s, reset_s

    def reset(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Wait, and begin an episode."""
        time.sleep(self._reset_s)
        return super().reset(*args, **kwargs)

    def step(self, action: list[Any]) -> StepValues:
        """Wait, and count."""
        time.sleep(self._step_s)
        return super().step(action)


def study(num_rounds: int) -> dict[str, Any]:
    """Run both ways with 8 envs that wait.

    Returns:
        "a tenth" and "the whole", the fraction of the times of env and policy -> "speedup", the factor of resets
        ahead, and "measured": see `_measure`. The executor's own time is not scaled.
    """
    whole = _times_of_substrate()
    tenth = Times(whole.step_s / 10, whole.reset_s / 10, whole.policy_s / 10)
    report = {}
    for name, times, rounds in (("a tenth", tenth, num_rounds), ("the whole", whole, max(2, num_rounds // 5))):
        found = _measure(times, rounds)
        report[name] = {"speedup": found.pop("speedup"), "measured": found}
    return report


def _times_of_substrate() -> Times:
    """Return the processor times of the substrate, and the policy's time."""
    with ParallelEnv(1, MeltingPotFactory(SUBSTRATE, max_steps=LENGTH), num_workers=1, seed=0) as env:
        env.reset()
        pid = env.statistics().workers[0].pid
        resets, steps = [], []
        for _ in range(3):
            began = _ran_s(pid)
            env.rollout(LENGTH, auto_reset=False)
            steps.append((_ran_s(pid) - began) / LENGTH)
            began = _ran_s(pid)
            env.reset()
            resets.append(_ran_s(pid) - began)
    return Times(statistics.median(steps), statistics.median(resets), POLICY_S)


def _ran_s(pid: int) -> float:
    return usage_of([pid]).run_ns / 1e9


def _measure(times: Times, num_rounds: int) -> dict[str, Any]:
    """Run both in turns; return the medians over rounds."""
    kinds = {"sync": ExecutorOptions(), "sync, reset_ahead": ExecutorOptions(reset_ahead=True)}
    slots: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    envs: dict[str, ParallelEnv] = {}
    factories = [
        functools.partial(WaitingEnv, LENGTH + STAGGER * i, times.step_s, times.reset_s) for i in range(NUM_ENVS)
    ]
    try:
        for name, options in kinds.items():
            envs[name] = ParallelEnv(NUM_ENVS, factories, num_workers=NUM_ENVS, seed=0, options=options)
            envs[name].reset()
        for index in range(num_rounds):
            for name in sorted(kinds, reverse=bool(index % 2)):
                slots[name].append(_run_slot(envs[name], times.policy_s))
    finally:
        for env in envs.values():
            env.close()
    found: dict[str, Any] = {
        name: {key: statistics.median(slot[key] for slot in own) for key in own[0]} for name, own in slots.items()
    }
    plain, ahead = slots.values()
    found["speedup"] = statistics.median(
        one["batch_s"] / other["batch_s"] for one, other in zip(plain, ahead, strict=True)
    )
    return found


def _run_slot(env: ParallelEnv, policy_s: float) -> dict[str, float]:
    """Make steps until every env has ended an episode; return their times."""
    num_steps = LENGTH + STAGGER * NUM_ENVS
    before, began = env.statistics(), time.perf_counter()
    root = env.current()
    for _ in range(num_steps):
        action = env.rand_action(root)
        time.sleep(policy_s)
        root = env.step_and_maybe_reset(action)[1]
    wall_s, after = time.perf_counter() - began, env.statistics()
    return {
        "batch_s": wall_s / num_steps,
        "resets": after.resets - before.resets,
        "resets_ahead": after.resets_ahead - before.resets_ahead,
    }
