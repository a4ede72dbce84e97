"""Does `envherd size` advise well? Prediction against measurement, and the choice against an exhaustive sweep.

For each env: it is sized; then every setting of a grid (number of workers, with the number of envs fixed) runs
for some seconds, in random order. Reported: predicted and measured steps per second and memory of the choice,
and what share of the sweep's best it makes. Settings that ran while others used the machine are marked.

Run: python -m envherd.benchmarks.sizing [--quick] [--env NAME ...]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from rich.console import Console

from envherd.benchmarks.gate import MOST_OTHERS
from envherd.benchmarks.report import Sheet, to_rich
from envherd.executor.env_names import factory_for
from envherd.executor.machine import read_machine
from envherd.executor.sizing.deciding import Goal
from envherd.executor.sizing.model import Model, Setting
from envherd.executor.sizing.recommending import recommend, with_episodes_of
from envherd.executor.sizing.verifying import check

RESULTS = Path(__file__).parent / "results" / "sizing.json"
NUM_ENVS = 8


class Synthetic(gymnasium.Env[np.ndarray, Any]):
    """An env whose step computes for a given time; an episode has 200 steps."""

    observation_space = Box(-1.0, 1.0, (16,), np.float32)
    action_space = Discrete(4)

    def __init__(self, kind: str = "even") -> None:
        self._kind = kind
        self._steps = 0
        self._own = np.ones((64 << 20) if kind == "hog" else 1, np.uint8)
        self._large = np.ones((400, 400), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:  # noqa: ARG002
        """Start an episode."""
        super().reset(seed=seed)
        self._steps = 0
        return np.zeros(16, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:  # noqa: ARG002  # any will do
        """Compute for a while."""
        seconds = 1e-3
        if self._kind == "tailed":
            seconds = 20e-3 if self.np_random.random() < 0.03 else 0.5e-3
        if self._kind == "threads":
            self._large @ self._large
        else:
            end = time.thread_time() + seconds
            while time.thread_time() < end:
                pass
        self._steps += 1
        return np.zeros(16, np.float32), 0.0, self._steps >= 200, False, {}


def even() -> Synthetic:
    """Return an env whose steps take 1 ms."""
    return Synthetic()


def tailed() -> Synthetic:
    """Return one of whose steps 3 % take 20 ms."""
    return Synthetic("tailed")


def hog() -> Synthetic:
    """Return one that has 64 MiB of its own."""
    return Synthetic("hog")


def threads() -> Synthetic:
    """Return one that multiplies matrices, with as many threads as it is given."""
    return Synthetic("threads")


ENVS: dict[str, tuple[Any, int | None]] = {
    "CartPole": ("gymnasium:CartPole-v1", None),
    "1 ms": (even, None),
    "heavy-tailed": (tailed, None),
    "memory hog": (hog, None),
    "multi-threaded": (threads, None),
    "clean_up": ("meltingpot:clean_up", 1000),
    "commons_harvest": ("meltingpot:commons_harvest__open", 1000),
    "prisoners_dilemma": ("meltingpot:prisoners_dilemma_in_the_matrix__arena", 1000),
}
QUICK = ("CartPole", "1 ms", "heavy-tailed")


def run_one(name: str, budget_s: float, span_s: float) -> dict[str, Any]:
    """Size an env and sweep it; return the figures."""
    made, episode = ENVS[name]
    factory = factory_for(made) if isinstance(made, str) else made
    sizing = recommend(factory, goal=Goal(num_envs=NUM_ENVS), budget_s=budget_s)
    measured = sizing.measured
    if episode is not None and measured.end_share == 0 and span_s > 60:  # shorter sweeps see no episode end either
        measured = with_episodes_of(measured, episode)
    model = Model(measured, sizing.overhead, sizing.machine)
    chosen = sizing.advice.setting
    most = min(NUM_ENVS, 2 * int(np.ceil(sizing.machine.cores)))
    grid = {Setting(num_envs=NUM_ENVS, num_workers=count) for count in range(1, most + 1)} | {chosen}
    order = sorted(grid, key=str)
    random.Random(0).shuffle(order)
    checks = {setting: check(setting, model.predict(setting), factory, span_s=span_s) for setting in order}
    best = max(checks.values(), key=lambda one: one.steps_per_s)
    mine = checks[chosen]
    return {
        "env": name,
        "chosen": f"{chosen.num_workers} workers, {chosen.mode}",
        "best": f"{best.setting.num_workers} workers, {best.setting.mode}",
        "predicted_steps_per_s": mine.predicted.steps_per_s,
        "measured_steps_per_s": mine.steps_per_s,
        "share_of_best": mine.steps_per_s / best.steps_per_s,
        "predicted_memory_bytes": mine.predicted.memory_bytes,
        "measured_memory_bytes": mine.memory_bytes,
        "others_share": max(one.others_share for one in checks.values()),
        "sweep": [one.to_plain() for one in checks.values()],
    }


def as_sheet(rows: list[dict[str, Any]]) -> Sheet:
    """Return the figures of all envs as a table."""
    columns = ("env", "chosen", "predicted/s", "measured/s", "off by", "memory off by", "best", "of best", "others")
    cells = [
        (
            row["env"],
            row["chosen"],
            f"{row['predicted_steps_per_s']:,.0f}",
            f"{row['measured_steps_per_s']:,.0f}",
            f"{row['predicted_steps_per_s'] / row['measured_steps_per_s'] - 1:+.0%}",
            f"{row['predicted_memory_bytes'] / row['measured_memory_bytes'] - 1:+.0%}",
            row["best"],
            f"{row['share_of_best']:.0%}",
            f"{row['others_share']:.0%}" + (" (noisy)" if row["others_share"] > MOST_OTHERS else ""),
        )
        for row in rows
    ]
    return Sheet("Sizing: prediction and choice against measurement", columns, cells)


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three envs, half a second for each setting")
    parser.add_argument("--env", action="append", choices=ENVS, help="only these")
    arguments = parser.parse_args()
    names = arguments.env or (QUICK if arguments.quick else tuple(ENVS))
    budget_s, span_s = (2.0, 0.5) if arguments.quick else (10.0, 5.0)
    rows = [run_one(name, budget_s, span_s) for name in names]
    Console(width=150).print(to_rich(as_sheet(rows)))
    if not arguments.quick:
        machine = read_machine()
        RESULTS.write_text(json.dumps({"cores": machine.cores, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
