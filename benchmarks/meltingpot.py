"""Time resets and steps of Melting Pot substrates, with the installed Lua code and with our copy of it.

    python -m benchmarks.meltingpot commons_harvest__open clean_up [--rounds 3]

Each env has its own process, and kinds take turns. Figures are processor time. `steps/s` is that of episodes of 1,000
steps, with their resets, on one processor.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich import print as show
from rich.table import Table

from envherd.workers.adapters.meltingpot.adapter import MeltingPotAdapter
from envherd.workers.adapters.meltingpot.factory import MeltingPotFactory, must_rebuild

#: Kind -> options of the factory.
KINDS: dict[str, dict[str, Any]] = {
    "installed code": {},
    "copy": {},
    "copy, deterministic": {"deterministic": True},
    "copy, fast_reset": {"fast_reset": True},
}
NUM_RESETS, NUM_STEPS, EPISODE = 3, 300, 1000


def measure(name: str, kind: str) -> dict[str, float]:
    """Return milliseconds of a reset, microseconds of a step, and the peak memory of this process in MiB."""
    adapter = MeltingPotAdapter(MeltingPotFactory(name, **KINDS[kind])())
    rng = np.random.default_rng(0)
    num_players, num_actions = adapter.spec.metadata["agent_count"], adapter.spec.metadata["num_actions"]
    adapter.reset(0)  # imports packages, and compiles Lua
    resets, steps = [], []
    for seed in range(1, 1 + NUM_RESETS):
        began = time.process_time()
        adapter.reset(seed)
        resets.append(time.process_time() - began)
        actions = rng.integers(0, num_actions, (NUM_STEPS, num_players))
        began, count = time.process_time(), 0
        for action in actions:
            count += 1
            _, _, terminated, truncated = adapter.step([action])
            if terminated or truncated:
                break
        steps.append((time.process_time() - began) / count)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"reset_ms": 1e3 * statistics.median(resets), "step_us": 1e6 * statistics.median(steps), "peak_mib": peak}


def measured_apart(name: str, kind: str) -> dict[str, float]:
    """Call `measure` in a separate process."""
    surroundings = dict(os.environ)
    if kind == "installed code":
        surroundings["XDG_CACHE_HOME"] = os.devnull  # so that no copy can be made
    command = [sys.executable, "-m", "benchmarks.meltingpot", name, "--one", kind]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table_of(names: Sequence[str], rounds: int) -> Table:
    """Measure substrates, and return the table."""
    table = Table("substrate", "kind", "reset ms", "step us", "steps/s", "times", "peak MiB")
    for name in names:
        kinds = [kind for kind, options in KINDS.items() if not (options.get("fast_reset") and must_rebuild(name))]
        turns = [{kind: measured_apart(name, kind) for kind in kinds} for _ in range(rounds)]
        first = 0.0
        for kind in kinds:
            median = {key: statistics.median(turn[kind][key] for turn in turns) for key in turns[0][kind]}
            rate = EPISODE / (median["reset_ms"] / 1e3 + EPISODE * median["step_us"] / 1e6)
            first = first or rate
            figures = [median["reset_ms"], median["step_us"], rate, rate / first, median["peak_mib"]]
            table.add_row(name, kind, *(f"{value:,.0f}" if value >= 20 else f"{value:.2f}" for value in figures))
    return table


def main() -> None:
    """Read the command line, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", help="substrates")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.names[0], arguments.one)))
    else:
        show(table_of(arguments.names, arguments.rounds))


if __name__ == "__main__":
    main()
