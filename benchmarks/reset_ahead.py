"""The gain of reset-ahead: Melting Pot with resets and a slow policy; with more cores, by a model.

Both executors, with one worker per env, are alive together and take turns in short slots; the ratio within a round is
reported. The policy sleeps, as if it waited for a GPU, and reset-ahead can use that processor time. With more cores
than envs there is more of it; `batch_s` models that from the costs measured here.

`--waiting` simulates enough cores: the same with a tenth of the times, and with envs that wait instead of computing.

Run: python -m benchmarks.reset_ahead [--quick] [--waiting] [--envs 4] [--length 60] [--policy-ms 20]
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.accounting import pressure_line, usage_of
from envherd.executor import ExecutorOptions, MeltingPotFactory, ParallelEnv
from envherd.workers.adapters.base import StepValues
from envherd.workers.testing import CountingEnv

RESULTS = Path(__file__).parent / "results" / "reset_ahead.json"
SUBSTRATE = "commons_harvest__open"
#: Steps by which the episodes of neighbouring envs differ in length, so that they do not all end together.
STAGGER = 3


@dataclass(frozen=True)
class Costs:
    """The parts of a batch's time, in seconds.

    Attributes:
        step_s: of one env, processor time.
        reset_s: of one env, likewise.
        overhead_s: of the executor, for a batch; wall time on a quiet machine.
        hand_over_s: of a reset whose episode is ready, likewise.
        policy_s: for a batch.
    """

    step_s: float
    reset_s: float
    overhead_s: float
    hand_over_s: float
    policy_s: float


def batch_s(costs: Costs, num_envs: int, length: float, cores: float, *, is_ahead: bool) -> float:
    """Return mean seconds per batch with one worker per env.

    Episodes of `length` steps end independently of each other. A batch waits for its slowest env. Without reset-ahead,
    every batch in which an episode has ended waits for a reset. With it, a batch waits only if the next episode is not
    ready yet. In both cases the cores must do all the work.

    Args:
        costs: measured.
        num_envs: N.
        length: of an episode, in steps.
        cores: for the workers.
        is_ahead: whether episodes are prepared ahead.
    """
    any_ended = 1 - (1 - 1 / length) ** num_envs
    steps_s = costs.policy_s + costs.overhead_s + costs.step_s * max(1.0, num_envs / cores)
    if not is_ahead:
        together = num_envs / length / any_ended  # resets in a batch with at least one
        return steps_s + any_ended * costs.reset_s * max(1.0, together / cores)
    work_s = num_envs * (costs.step_s + costs.reset_s / length) / cores  # resets use the time of the policy
    return max(steps_s + any_ended * costs.hand_over_s, costs.reset_s / length, work_s)


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


def tenth_of(costs: Costs) -> Costs:
    """Return the costs of an env and a policy that take a tenth of the time."""
    return replace(costs, step_s=costs.step_s / 10, reset_s=costs.reset_s / 10, policy_s=costs.policy_s / 10)


def lengths_of(num_envs: int, length: int) -> list[int]:
    """Return how many steps an episode of each env has."""
    return [length + STAGGER * i for i in range(num_envs)]


def make(num_envs: int, length: int, options: ExecutorOptions, waiting: Costs | None = None) -> ParallelEnv:
    """Build an executor and reset it; its envs are substrates, or `WaitingEnv`s with given times."""
    lengths = lengths_of(num_envs, length)
    factories: list[Callable[[], Any]] = [MeltingPotFactory(SUBSTRATE, max_steps=steps) for steps in lengths]
    if waiting is not None:
        factories = [functools.partial(WaitingEnv, steps, waiting.step_s, waiting.reset_s) for steps in lengths]
    env = ParallelEnv(num_envs, factories, num_workers=num_envs, seed=0, options=options)
    env.reset()
    return env


def run_slot(env: ParallelEnv, num_steps: int, policy_s: float) -> dict[str, float]:
    """Make some steps; return their times."""
    before, began = env.statistics(), time.perf_counter()
    root = env.current()
    for _ in range(num_steps):
        action = env.rand_action(root)
        time.sleep(policy_s)
        root = env.step_and_maybe_reset(action)[1]
    wall_s, after = time.perf_counter() - began, env.statistics()
    cpu_s = sum(one.cpu_s for one in (*after.workers, *after.spares))
    cpu_s -= sum(one.cpu_s for one in (*before.workers, *before.spares))
    return {
        "batch_s": wall_s / num_steps,
        "cpu_s_per_step": cpu_s / (num_steps * env.num_envs),
        "resets": after.resets - before.resets,
        "resets_ahead": after.resets_ahead - before.resets_ahead,
    }


def ran_s(pid: int) -> float:
    """Return the seconds that a process has run."""
    return usage_of([pid]).run_ns / 1e9


def measure_costs(num_envs: int, length: int, policy_s: float) -> Costs:
    """Measure one env alone, and the executor with no-op envs."""
    with make(1, length, ExecutorOptions()) as env:
        pid = env.statistics().workers[0].pid
        resets, steps = [], []
        for _ in range(3):
            began = ran_s(pid)
            env.rollout(length, auto_reset=False)
            steps.append((ran_s(pid) - began) / length)
            began = ran_s(pid)
            env.reset()
            resets.append(ran_s(pid) - began)
    with ParallelEnv(num_envs, CountingEnv, seed=0, options=ExecutorOptions(reset_ahead=True)) as idle:
        root = idle.reset()
        plain: list[float] = []
        handing: list[float] = []
        for _ in range(400):
            action = idle.rand_action(root)
            began = time.perf_counter()
            td, root = idle.step_and_maybe_reset(action)
            took = time.perf_counter() - began
            (handing if td["next", "done"].any() else plain).append(took)
    overhead_s = statistics.quantiles(plain, n=10)[0]
    hand_over_s = max(0.0, statistics.quantiles(handing, n=10)[0] - overhead_s)
    return Costs(statistics.median(steps), statistics.median(resets), overhead_s, hand_over_s, policy_s)


def study(num_rounds: int) -> dict[str, Any]:
    """Run both with 8 envs that wait, so that processors are not short.

    Returns:
        "a tenth" and "the whole", the fraction of the times of env and policy -> "speedup", the measured factor of
        resets ahead, and "modelled"; "measured": see `measure`. The executor's own time is not scaled.
    """
    num_envs, length, policy_s = 8, 60, 20e-3
    costs = measure_costs(num_envs, length, policy_s)
    report = {}
    for name, waiting, rounds in (
        ("a tenth", tenth_of(costs), num_rounds),
        ("the whole", costs, max(2, num_rounds // 5)),
    ):
        found = measure(num_envs, length, rounds, waiting.policy_s, waiting)
        speedup = found.pop("speedup")
        report[name] = {"speedup": speedup, "modelled": _modelled(waiting, num_envs, length), "measured": found}
    return report


def _modelled(waiting: Costs, num_envs: int, length: int) -> float:
    """Return the modelled speed-up of resets ahead with enough processors."""
    plain, ahead = (batch_s(waiting, num_envs, length, 10**6, is_ahead=flag) for flag in (False, True))
    return plain / ahead


def measure(num_envs: int, length: int, rounds: int, policy_s: float, waiting: Costs | None) -> dict[str, Any]:
    """Run both in turns; return the medians over rounds."""
    kinds = {"sync": ExecutorOptions(), "sync, reset_ahead": ExecutorOptions(reset_ahead=True)}
    slots: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    envs: dict[str, ParallelEnv] = {}
    num_steps = length + STAGGER * num_envs
    try:
        for name, options in kinds.items():
            envs[name] = make(num_envs, length, options, waiting)
        for index in range(rounds):
            for name in sorted(kinds, reverse=bool(index % 2)):
                slots[name].append(run_slot(envs[name], num_steps, policy_s))
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


def show(console: Console, found: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print the measurements."""
    scaled = " in a tenth of the times, waiting" if arguments.waiting else ""
    table = Table(
        title=f"{SUBSTRATE} x {arguments.envs}{scaled}, episodes of {arguments.length} steps and more, "
        f"a policy of {arguments.policy_ms / (10 if arguments.waiting else 1):g} ms; {arguments.rounds} rounds",
        title_justify="left",
    )
    for name in ("", "ms/batch", "env-steps/s", "CPU ms/env-step", "resets", "of these ready"):
        table.add_column(name, justify="right" if name else "left")
    for name in ("sync", "sync, reset_ahead"):
        row = found[name]
        table.add_row(
            name,
            f"{row['batch_s'] * 1e3:.1f}",
            f"{arguments.envs / row['batch_s']:,.0f}",
            f"{row['cpu_s_per_step'] * 1e3:.2f}",
            f"{row['resets']:.0f}",
            f"{row['resets_ahead']:.0f}",
        )
    console.print(table)
    console.print(f"reset-ahead makes {found['speedup']:.2f} times the steps (median of rounds)")


def show_model(console: Console, costs: Costs, length: int) -> list[dict[str, Any]]:
    """Print the model's figures for other machines."""
    table = Table(
        title=f"modelled: step {costs.step_s * 1e3:.1f} ms, reset {costs.reset_s * 1e3:.0f} ms, hand-over "
        f"{costs.hand_over_s * 1e6:.0f} us, executor {costs.overhead_s * 1e6:.0f} us, episodes of {length} steps",
        title_justify="left",
    )
    names = ("envs", "cores", "policy ms", "sync ms/batch", "reset_ahead ms/batch", "times the steps")
    for name in names:
        table.add_column(name, justify="right")
    rows = []
    for num_envs, cores in ((8, 2), (8, 8), (8, 16), (32, 64), (64, 128)):
        for policy_s in (0.0, costs.policy_s):
            own = replace(costs, policy_s=policy_s)
            plain, ahead = (batch_s(own, num_envs, length, cores, is_ahead=flag) for flag in (False, True))
            values = (num_envs, cores, policy_s * 1e3, plain * 1e3, ahead * 1e3, plain / ahead)
            rows.append(dict(zip(names, values, strict=True)))
            table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in values))
    console.print(table)
    return rows


def main() -> None:
    """Measure, model, print, and write the results."""
    from benchmarks.suite import describe_machine  # which runs `study` itself

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds with 2 envs, and no JSON")
    parser.add_argument("--waiting", action="store_true", help="a tenth of the times, and envs that only wait")
    parser.add_argument("--envs", type=int, default=4)
    parser.add_argument("--length", type=int, default=60, help="steps of an episode of env 0")
    parser.add_argument("--policy-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.envs = 2, 2
    console = Console(width=120)
    report: dict[str, Any] = {"machine": describe_machine(), "pressure": [pressure_line()]}
    costs = measure_costs(arguments.envs, arguments.length, arguments.policy_ms / 1e3)
    waiting = tenth_of(costs) if arguments.waiting else None
    policy_s = (waiting or costs).policy_s
    report["measured"] = found = measure(arguments.envs, arguments.length, arguments.rounds, policy_s, waiting)
    report["costs"], report["modelled"] = asdict(costs), show_model(console, costs, arguments.length)
    show(console, found, arguments)
    report["pressure"].append(pressure_line())
    console.print(f"CPU pressure before and after: {report['pressure'][0]} | {report['pressure'][1]}")
    if waiting is not None:
        console.print(f"the model says {_modelled(waiting, arguments.envs, arguments.length):.2f} times")
    if not arguments.quick and waiting is None:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")
        console.print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
