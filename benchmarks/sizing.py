"""Check the choices of `envherd size` against an exhaustive sweep, for eight envs.

Each env is sized with a fixed number of envs. Then `SerialEnv`, every number of workers up to twice the cores, and
first-K on the cores and on the chosen number run in rounds. The result is the choice's speed relative to the sweep's
best (median and quartiles of the rounds), and the time of sizing.

Run: python -m benchmarks.sizing [--quick] [--env NAME ...] [--rounds N] [--render] [--write]

Start it with fewer processors (`taskset -c 0`), or in a control group with a CPU quota, to measure under that
condition; the results of each condition are kept separately.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from rich.console import Console

from benchmarks import ROOT
from benchmarks.parts import write_part
from benchmarks.report import Sheet, to_markdown, to_rich
from envherd.executor import ExecutorOptions, MeltingPotFactory, SerialEnv
from envherd.executor.batched import BatchedEnv
from envherd.executor.machine.machine import read_machine
from envherd.executor.sizing.driving import Driver, Subject
from envherd.executor.sizing.measurement import Measurement
from envherd.executor.sizing.recommending import recommend
from envherd.executor.sizing.settings import Goal, Setting
from envherd.workers.adapters.env_names import factory_for

RESULTS = Path(__file__).parent / "results" / "sizing.json"
NUM_ENVS = 8
#: Seconds that a call of an executor may take.
_PATIENCE_S = 120.0


class Synthetic(gymnasium.Env[np.ndarray, Any]):
    """An env whose steps compute for a given time; an episode has 200 steps."""

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

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:  # noqa: ARG002  # not used
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
    """Return an env of which 3 % of the steps take 20 ms."""
    return Synthetic("tailed")


def hog() -> Synthetic:
    """Return an env with 64 MiB of private memory."""
    return Synthetic("hog")


def threads() -> Synthetic:
    """Return an env that multiplies matrices, with as many threads as it may use."""
    return Synthetic("threads")


#: Episode length for which a sweep sees many ends.
_HORIZON = 200
ENVS: dict[str, Any] = {
    "CartPole": factory_for("gymnasium:CartPole-v1"),
    "1 ms": even,
    "heavy-tailed": tailed,
    "memory hog": hog,
    "multi-threaded": threads,
    **{
        name: MeltingPotFactory(substrate, max_steps=_HORIZON)
        for name, substrate in (
            ("clean_up", "clean_up"),
            ("commons_harvest", "commons_harvest__open"),
            ("prisoners_dilemma", "prisoners_dilemma_in_the_matrix__arena"),
        )
    },
}
#: Figures of the probe that the rule uses.
PROBE = (
    *("step_mean_s", "step_median_s", "step_p99_s", "cpu_per_step_s"),
    *("reset_median_s", "end_share", "episode_steps"),
)
QUICK = ("CartPole", "1 ms", "heavy-tailed")


def condition() -> str:
    """Return a text on the resources of this process."""
    machine = read_machine()
    allowed = f"{len(machine.cpus)} of {os.cpu_count()} processors"
    return f"a CPU quota of {machine.cores:g}, {allowed}" if machine.is_throttled else allowed


def run_one(name: str, num_rounds: int, span_s: float) -> dict[str, Any]:
    """Size an env and sweep it; return the figures."""
    factory, began = ENVS[name], time.monotonic()
    sizing = recommend(factory, goal=Goal(num_envs=NUM_ENVS))
    took_s, chosen = time.monotonic() - began, sizing.advice.setting
    cores = math.ceil(sizing.machine.cores)
    grid = [Setting(num_envs=NUM_ENVS, num_workers=count) for count in range(min(NUM_ENVS, 2 * cores) + 1)]
    first_k = [replace(one, mode="first-k") for one in grid if one.num_workers in (cores, max(1, chosen.num_workers))]
    least_steps = 2 * _HORIZON * NUM_ENVS if isinstance(factory, MeltingPotFactory) else 0
    settings = list(dict.fromkeys([*grid, *first_k, chosen]))
    rates = sweep(factory, settings, sizing.measured, num_rounds, span_s, least_steps)
    typical = {setting: float(np.median(values)) for setting, values in rates.items()}
    return {
        "env": name,
        "chosen": str(chosen),
        "best": str(max(typical, key=typical.__getitem__)),
        "sized_steps_per_s": sizing.advice.predicted.steps_per_s,
        "measured_steps_per_s": typical[chosen],
        "share_of_best": [float(share) for share in np.percentile(shares_of_best(rates, chosen), (25, 50, 75))],
        "took_s": took_s,
        "contention": sizing.measured.contention,
        "probe": {"cores": sizing.machine.cores, **{key: getattr(sizing.measured, key) for key in PROBE}},
    }


def sweep(
    factory: Any,
    settings: Sequence[Setting],
    measured: Measurement,
    num_rounds: int,
    span_s: float,
    least_steps: int = 0,
) -> dict[Setting, list[float]]:
    """Run settings in rounds, all alive together; return the env-steps per second of each, by round.

    Args:
        factory: of the env.
        settings: to compare.
        measured: of the env; converts the steps and resets of a turn of whole episodes to an amount of work.
        num_rounds: in each, every setting has one turn.
        span_s: seconds of a turn.
        least_steps: least env-steps of a turn: two whole episodes, if resets are long and simultaneous.
    """
    subject, order = Subject(factory, {}, ExecutorOptions()), random.Random(0)
    rates: dict[Setting, list[float]] = {setting: [] for setting in settings}
    with contextlib.ExitStack() as stack:
        stack.enter_context(subject.helper())
        drivers: dict[int, Driver] = {}

        def begin(one: Setting) -> BatchedEnv:
            if not one.num_workers:
                return SerialEnv(NUM_ENVS, factory, seed=0)
            return subject.start(one, _PATIENCE_S)

        for one in settings:
            if one.num_workers not in drivers:
                driver = Driver(functools.partial(begin, one), span_s)
                drivers[one.num_workers] = stack.enter_context(contextlib.closing(driver))
        for _ in range(num_rounds):
            for setting in order.sample(list(settings), len(settings)):
                turn = drivers[setting.num_workers].turn(setting.mode, least_steps)
                steps = measured.whole_steps(turn.steps, turn.resets) if least_steps else turn.steps
                rates[setting].append(steps / turn.seconds)
    return rates


def shares_of_best(rates: Mapping[Any, Sequence[float]], chosen: Any) -> list[float]:
    """Return a setting's speed relative to the best one, in each round.

    Among equally fast settings the largest figure exceeds the others by chance. So the best setting is determined from
    all other rounds, and compared in this one.

    Args:
        rates: setting -> steps per second in each round.
        chosen: the setting.
    """
    shares = []
    for i in range(len(rates[chosen])):
        others = {setting: np.median([*own[:i], *own[i + 1 :]] or own) for setting, own in rates.items()}
        shares.append(rates[chosen][i] / rates[max(others, key=others.__getitem__)][i])
    return shares


def as_sheet(where: str, rows: list[dict[str, Any]]) -> Sheet:
    """Return the figures of all envs under one condition as a table."""
    columns = ("env", "chosen", "sized/s", "measured/s", "best", "of best", "took", "contention")
    cells = [
        (
            row["env"],
            row["chosen"],
            f"{row['sized_steps_per_s']:,.0f}",
            f"{row['measured_steps_per_s']:,.0f}",
            row["best"],
            "{1:.0%} ({0:.0%} to {2:.0%})".format(*row["share_of_best"]),
            f"{row['took_s']:.1f} s",
            f"{row['contention']:.0%}",
        )
        for row in rows
    ]
    return Sheet(f"The choice against a sweep: {where}", columns, cells)


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three envs, few rounds; kept nowhere")
    parser.add_argument("--env", action="append", choices=ENVS, help="only these; results of the others stay")
    parser.add_argument("--render", action="store_true", help="measure nothing: show what was measured before")
    parser.add_argument("--write", action="store_true", help="write the table to docs/reports/sizing.md")
    parser.add_argument("--rounds", type=int, default=8, help="of a sweep, a second for each setting")
    arguments = parser.parse_args()
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not arguments.render:
        names = arguments.env or (QUICK if arguments.quick else tuple(ENVS))
        plan = (3, 0.3) if arguments.quick else (arguments.rounds, 1.0)
        where = condition()
        known = {row["env"]: row for row in kept.get(where, [])}
        for name in names:
            known[name] = run_one(name, *plan)
            kept[where] = [known[name] for name in ENVS if name in known]
            if not arguments.quick:
                RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    sheets = [as_sheet(where, rows) for where, rows in kept.items()]
    for sheet in sheets:
        Console(width=150).print(to_rich(sheet))
    if arguments.write:
        lines = [line for sheet in sheets for line in (f"**{sheet.title}**", "", *to_markdown(sheet).split("\n"), "")]
        write_part(ROOT / "docs" / "reports" / "sizing.md", "benchmarks/sizing.py", lines[:-1])


if __name__ == "__main__":
    main()
