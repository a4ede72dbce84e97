"""Does `envherd size` advise well? Prediction against measurement, and the choice against an exhaustive sweep.

For each env: it is sized; then every setting of a grid (number of workers, with the number of envs fixed; first-K and
two groups on the chosen number) runs for some seconds, in random order. Reported: predicted and measured steps per
second and memory of the choice, what share of the sweep's best it makes, and how much faster than synchronous batches
the other modes are. Settings that ran while others used the machine are marked. An env for
which the machine was another one in the sweep than when the env was sized (a virtual one may be) is sized and swept
again, and the attempt in which it changed least is kept.

Run: python -m envherd.benchmarks.sizing [--quick] [--env NAME ...] [--render] [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from rich.console import Console

from envherd.benchmarks.gate import MOST_OTHERS
from envherd.benchmarks.parts import write_part
from envherd.benchmarks.report import Sheet, to_markdown, to_rich
from envherd.executor import MeltingPotFactory
from envherd.executor.cli.env_names import factory_for
from envherd.executor.machine.machine import read_machine
from envherd.executor.sizing.deciding import MODE_GAIN
from envherd.executor.sizing.limits import Goal
from envherd.executor.sizing.model import Model, Prediction, Setting
from envherd.executor.sizing.modes import MODES, Mode
from envherd.executor.sizing.recommending import recommend
from envherd.executor.sizing.verifying import Check, Trial, whole_episodes

RESULTS = Path(__file__).parent / "results" / "sizing.json"
NUM_ENVS = 8
#: Of what the machine could do when an env was sized, by how much it may differ in the sweep.
_MOST_CHANGE = 0.1
#: Turns over which a setting's memory is taken: an env's may differ from one episode to the next.
_MEMORY_TURNS = 3
#: What each processor does for half a second to say how fast it is.
_COUNTING = """
import time
count, end = 0, time.perf_counter() + 0.5
while time.perf_counter() < end:
    for _ in range(1000):
        count += 1
print(count)
"""


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


#: Episodes short enough for a sweep to see many of their ends.
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
QUICK = ("CartPole", "1 ms", "heavy-tailed")


def capacity(num_processes: int) -> float:
    """Return what so many processes count to together in half a second."""
    command = [sys.executable, "-S", "-c", _COUNTING]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(num_processes)]
    return float(sum(int(process.communicate()[0]) for process in processes))


def run_quietly(name: str, budget_s: float, plan: tuple[int, float], attempts: int) -> dict[str, Any]:
    """Return the figures of the attempt at `run_one` in which the machine changed least."""
    rows: list[dict[str, Any]] = []
    while not rows or (abs(rows[-1]["machine_change"]) > _MOST_CHANGE and len(rows) < attempts):
        rows.append(run_one(name, budget_s, plan))
    return min(rows, key=lambda row: abs(row["machine_change"]))


def run_one(name: str, budget_s: float, plan: tuple[int, float]) -> dict[str, Any]:
    """Size an env and sweep it, `plan`: so many turns of so many seconds of every setting; return the figures."""
    factory, num_cpus = ENVS[name], len(read_machine().cpus)
    at_sizing = [capacity(num_cpus)]
    sizing = recommend(factory, goal=Goal(num_envs=NUM_ENVS), budget_s=budget_s)
    at_sizing.append(capacity(num_cpus))
    model = Model(sizing.measured, sizing.overhead, sizing.machine)
    chosen = sizing.advice.setting
    most = min(NUM_ENVS, 2 * int(np.ceil(sizing.machine.cores)))
    grid = {Setting(num_envs=NUM_ENVS, num_workers=count) for count in range(1, most + 1)}
    grid |= {replace(chosen, mode=mode) for mode in MODES}
    predicted = {setting: model.predict(setting) for setting in sorted(grid, key=str)}
    episode_steps = whole_episodes(sizing.measured, sizing.advice.prediction)
    memory = {
        setting: memory_alone(setting, one, factory, plan[1], episode_steps) for setting, one in predicted.items()
    }
    rounds, in_sweep = sweep(predicted, factory, *plan, episode_steps, num_cpus)
    checks = {setting: _typical(turns, memory[setting]) for setting, turns in rounds.items()}
    best = max(checks.values(), key=lambda one: worth(one.setting, one.steps_per_s))
    mine = checks[chosen]
    rates = {setting: [turn.steps_per_s for turn in turns] for setting, turns in rounds.items()}
    return {
        "env": name,
        "chosen": f"{chosen.num_workers} workers, {chosen.mode}",
        "best": f"{best.setting.num_workers} workers, {best.setting.mode}",
        "predicted_steps_per_s": mine.predicted.steps_per_s,
        "measured_steps_per_s": mine.steps_per_s,
        "share_of_best": share_of_best({one: [worth(one, rate) for rate in own] for one, own in rates.items()}, chosen),
        "modes": {mode: beside_sync(chosen, mode, rates, predicted) for mode in MODES[1:]},
        "predicted_memory_bytes": mine.predicted.memory_bytes,
        "measured_memory_bytes": mine.memory_bytes,
        "others_share": max(one.others_share for one in checks.values()),
        "machine_change": float(np.median(in_sweep) / np.mean(at_sizing) - 1),
        "sweep": [one.to_plain() for one in checks.values()],
    }


def worth(setting: Setting, steps_per_s: float) -> float:
    """Return what a speed counts: other modes than "sync" are more to write, and advised if they gain so much."""
    return steps_per_s if setting.mode == "sync" else steps_per_s / MODE_GAIN


def beside_sync(
    chosen: Setting, mode: Mode, rates: Mapping[Setting, Sequence[float]], predicted: Mapping[Setting, Prediction]
) -> dict[str, float]:
    """Return how many times as fast as "sync" a mode is on as many workers, predicted and measured."""
    one, sync = replace(chosen, mode=mode), replace(chosen, mode="sync")
    return {
        "predicted": predicted[one].steps_per_s / predicted[sync].steps_per_s,
        "measured": float(np.median(np.array(rates[one]) / np.array(rates[sync]))),
    }


def memory_alone(setting: Setting, predicted: Prediction, factory: Any, span_s: float, episode_steps: int) -> int:
    """Return the mean memory of a setting, in a few turns, while no other is alive."""
    with contextlib.closing(Trial(setting, predicted, factory)) as trial:
        return int(np.mean([trial.turn(span_s, episode_steps).memory_bytes for _ in range(_MEMORY_TURNS)]))


def sweep(
    predicted: dict[Setting, Prediction], factory: Any, num_turns: int, span_s: float, episode_steps: int, num_cpus: int
) -> tuple[dict[Setting, list[Check]], list[float]]:
    """Run all settings in turns, in rounds; return the turns of each, by round, and the machine's capacity in each.

    All are alive together, so that their speeds can be compared. Their memory cannot be: pages that pools share
    (libraries) are divided among all of them.
    """
    order, turns, capacities = random.Random(0), {setting: list[Check]() for setting in predicted}, list[float]()
    with contextlib.ExitStack() as stack:
        trials = {
            setting: stack.enter_context(contextlib.closing(Trial(setting, one, factory)))
            for setting, one in predicted.items()
        }
        for _ in range(num_turns):
            for setting in order.sample(list(trials), len(trials)):
                turns[setting].append(trials[setting].turn(span_s, episode_steps))
            capacities.append(capacity(num_cpus))
    return turns, capacities


def share_of_best(rates: Mapping[Any, Sequence[float]], chosen: Any) -> float:
    """Return the median share that a setting makes of the best one, over rounds.

    Of settings that are equally fast, the largest figure is some way above the others by chance. So the best is told by
    all other rounds, and compared in this one.

    Args:
        rates: setting -> steps per second in each round.
        chosen: the setting.
    """
    shares = []
    for i in range(len(rates[chosen])):
        others = {setting: np.median([*own[:i], *own[i + 1 :]] or own) for setting, own in rates.items()}
        shares.append(rates[chosen][i] / rates[max(others, key=others.__getitem__)][i])
    return float(np.median(shares))


def _typical(turns: list[Check], memory_bytes: int) -> Check:
    """Return the median of the better half of turns, in which others used least of the machine, with this memory."""
    quiet = sorted(turns, key=lambda one: one.others_share)[: (len(turns) + 1) // 2]
    rate = float(np.median([one.steps_per_s for one in quiet]))
    return replace(quiet[-1], steps_per_s=rate, memory_bytes=memory_bytes)


def as_sheet(rows: list[dict[str, Any]]) -> Sheet:
    """Return the figures of all envs as a table."""
    columns = (
        "env",
        "chosen",
        "predicted/s",
        "measured/s",
        "off by",
        "memory off by",
        "best",
        "of best",
        "first-K",
        "two groups",
        "others",
        "machine",
    )
    cells = [
        (
            row["env"],
            row["chosen"],
            f"{row['predicted_steps_per_s']:,.0f}",
            f"{row['measured_steps_per_s']:,.0f}",
            f"{row['predicted_steps_per_s'] / row['measured_steps_per_s'] - 1:+.0%}",
            f"{row['predicted_memory_bytes'] / row['measured_memory_bytes'] - 1:+.0%}",
            row["best"],
            f"{min(1.0, row['share_of_best']):.0%}",
            *(_gain(row, mode) for mode in MODES[1:]),
            f"{row['others_share']:.0%}" + (" (noisy)" if row["others_share"] > MOST_OTHERS else ""),
            f"{row['machine_change']:+.0%}" if "machine_change" in row else "",
        )
        for row in rows
    ]
    return Sheet("Sizing: prediction and choice against measurement", columns, cells)


def _gain(row: dict[str, Any], mode: Mode) -> str:
    gain = row.get("modes", {}).get(mode)
    return f"{gain['measured']:.2f} ({gain['predicted']:.2f})" if gain else ""


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three envs, half a second for each setting; kept nowhere")
    parser.add_argument("--env", action="append", choices=ENVS, help="only these; results of the others stay")
    parser.add_argument("--attempts", type=int, default=2, help="at an env, while the machine changes by 10 %% (2)")
    parser.add_argument("--render", action="store_true", help="measure nothing: show what was measured before")
    parser.add_argument("--write", action="store_true", help="write the table to docs/sizing.md")
    arguments = parser.parse_args()
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": []}
    if not arguments.render:
        names = arguments.env or (QUICK if arguments.quick else tuple(ENVS))
        budget_s, plan = (2.0, (1, 0.5)) if arguments.quick else (10.0, (6, 1.5))
        fresh = {name: run_quietly(name, budget_s, plan, arguments.attempts) for name in names}
        known = {row["env"]: row for row in kept["rows"]} | fresh
        kept = {"cores": read_machine().cores, "rows": [known[name] for name in ENVS if name in known]}
        if arguments.quick:
            Console(width=150).print(to_rich(as_sheet([*fresh.values()])))
            return
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    Console(width=150).print(to_rich(as_sheet(kept["rows"])))
    if arguments.write:
        page = Path(__file__).parents[1] / "docs" / "sizing.md"
        write_part(page, "benchmarks/sizing.py", to_markdown(as_sheet(kept["rows"])).split("\n"))


if __name__ == "__main__":
    main()
