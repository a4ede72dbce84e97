"""Check the choices of `envherd size` against a sweep, for six kinds of envs.

Each env is sized with a fixed number of envs. Then `SerialEnv`, several numbers of workers, and first-K run in turns,
in random order within each round. The result is the choice's speed relative to the sweep's best: the median and the
quartiles over rounds. If other programs use the machine, the time in which processes wait for a processor is left out.

Run: python -m benchmarks.sizing [--env NAME ...] [--rounds N] [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks import ROOT
from benchmarks.parts import write_part
from benchmarks.report import Sheet, to_markdown, to_rich
from benchmarks.work import SteadyFactory
from envherd.executor import ExecutorOptions, MeltingPotFactory, SerialEnv
from envherd.executor.machine.machine import Others, read_machine
from envherd.executor.sizing.probe import Driver, Subject
from envherd.executor.sizing.recommending import recommend
from envherd.executor.sizing.rule import Goal, Measurement, Setting
from envherd.workers.adapters.env_names import factory_for

RESULTS = Path(__file__).parent / "results" / "sizing.json"
NUM_ENVS = 8
#: Seconds that a call of an executor may take, and of a turn.
_PATIENCE_S, _SPAN_S = 300.0, 0.3
ENVS: dict[str, Any] = {
    "no-op": SteadyFactory(),
    "CartPole": factory_for("gymnasium:CartPole-v1"),
    "HalfCheetah": factory_for("gymnasium:HalfCheetah-v5"),
    "ALE Pong": factory_for("gymnasium:ALE/Pong-v5"),
    "commons_harvest__open": MeltingPotFactory("commons_harvest__open"),
    "10 ms sleep": SteadyFactory(sleep_s=0.01),
}
SETTINGS = (
    *(Setting(num_envs=NUM_ENVS, num_workers=count) for count in (0, 1, 2, 4, 8)),
    *(
        Setting(num_envs=NUM_ENVS, num_workers=count, mode="first-k")
        for count in (2, 8)
    ),
)
#: Figures of the probe that the rule uses.
PROBE = (
    "step_mean_s",
    "step_median_s",
    "step_p99_s",
    "cpu_per_step_s",
    "reset_mean_s",
    "end_share",
)


def run_one(name: str, num_rounds: int) -> dict[str, Any]:
    """Size an env and sweep it; return the figures."""
    began, others = time.monotonic(), Others(read_machine().cpus)
    sizing = recommend(ENVS[name], goal=Goal(num_envs=NUM_ENVS))
    took_s, chosen = time.monotonic() - began, sizing.chosen.setting
    settings = dict.fromkeys((*SETTINGS, chosen))
    rates = sweep(ENVS[name], list(settings), sizing.measured, num_rounds)
    typical = {setting: float(np.median(values)) for setting, values in rates.items()}
    best = max(typical, key=typical.__getitem__)
    return {
        "env": name,
        "cores": sizing.machine.cores,
        "chosen": str(chosen),
        "sized_steps_per_s": sizing.chosen.steps_per_s,
        "best": str(best),
        "steps_per_s": {str(one): rate for one, rate in typical.items()},
        "share_of_best": [
            float(share)
            for share in np.percentile(shares_of_best(rates, chosen), (25, 50, 75))
        ],
        "took_s": took_s,
        "others": others.share(),
        "date": time.strftime("%d %b %Y"),
        "probe": {key: getattr(sizing.measured, key) for key in PROBE},
    }


def sweep(
    factory: Any,
    settings: Sequence[Setting],
    measured: Measurement,
    num_rounds: int,
) -> dict[Setting, list[float]]:
    """Run settings in rounds, all alive together; return the env-steps per second of each, by round.

    Args:
        factory: of the env.
        settings: to compare.
        measured: of the env; converts the steps and resets of a turn to an amount of work.
        num_rounds: in each, every setting has one turn.
    """
    subject, order = Subject(factory, {}, ExecutorOptions()), random.Random(0)
    turns: dict[Setting, list[Any]] = {setting: [] for setting in settings}
    drivers: dict[int, Driver] = {}
    with subject.helper(), contextlib.ExitStack() as stack:
        for count in dict.fromkeys(one.num_workers for one in settings):
            env = (
                subject.start(NUM_ENVS, count, _PATIENCE_S)
                if count
                else SerialEnv(NUM_ENVS, factory, seed=0)
            )
            drivers[count] = Driver(stack.enter_context(env), _SPAN_S)
        for _ in range(num_rounds):
            for setting in order.sample(settings, len(settings)):
                turns[setting].append(drivers[setting.num_workers].turn(setting.mode))
    work = measured.whole_steps
    return {
        setting: [work(one.steps, one.resets) / one.seconds for one in made]
        for setting, made in turns.items()
    }


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
        others = {
            setting: np.median([*own[:i], *own[i + 1 :]] or own)
            for setting, own in rates.items()
        }
        shares.append(rates[chosen][i] / rates[max(others, key=others.__getitem__)][i])
    return shares


def as_sheet(rows: Sequence[Mapping[str, Any]]) -> Sheet:
    """Return the figures of all envs as a table."""
    columns = (
        "8 envs",
        "chosen",
        "best",
        "chosen / best",
        "sized/s",
        "measured/s",
        "took",
        "other programs",
    )
    cells = [
        (
            row["env"],
            row["chosen"],
            row["best"],
            "{1:.2f} ({0:.2f} to {2:.2f})".format(*row["share_of_best"]),
            f"{row['sized_steps_per_s']:,.0f}",
            f"{row['steps_per_s'][row['chosen']]:,.0f}",
            f"{row['took_s']:.0f} s",
            f"{row['others']:.0%}",
        )
        for row in rows
    ]
    return Sheet("The choice against a sweep", columns, cells)


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--env",
        action="append",
        choices=ENVS,
        help="only these; results of the others stay",
    )
    parser.add_argument(
        "--rounds", type=int, default=20, help="of a sweep; 0 measures nothing"
    )
    parser.add_argument(
        "--write", action="store_true", help="write the table to docs/reports/sizing.md"
    )
    arguments = parser.parse_args()
    known = {row["env"]: row for row in json.loads(RESULTS.read_text())}
    for name in (arguments.env or ENVS) if arguments.rounds else ():
        known[name] = run_one(name, arguments.rounds)
        RESULTS.write_text(
            json.dumps([known[one] for one in ENVS if one in known], indent=1) + "\n"
        )
    sheet = as_sheet([known[one] for one in ENVS if one in known])
    Console(width=170).print(to_rich(sheet))
    if arguments.write:
        write_part(
            ROOT / "docs/reports/sizing.md",
            "benchmarks/sizing.py",
            to_markdown(sheet).split("\n"),
        )


if __name__ == "__main__":
    main()
