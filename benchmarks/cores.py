"""Predict a machine with 128 processors by `cores_model`, and check the model against measurements on this machine.

    python -m benchmarks.cores --write      # from benchmarks/results/bench.json to docs/reports/scaling.md

The costs come from the suite's growth laws ("growth"), the check from its workloads.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import ROOT, ours
from benchmarks import growth as growth_laws
from benchmarks.cores_model import MODES, Costs, Mode, Outcome, Setting, Work, simulate
from benchmarks.page import RESULTS
from benchmarks.parts import write_part

PLOT = "scaling_cores.png"
CORES = (1, 2, 4, 8, 16, 32, 64, 128)
SHOWN = (2, 8, 32, 128)
ENVS_PER_WORKER = 4
WORKS = (
    Work(name="20 us, 16 bytes", step_s=20e-6),
    Work(name="200 us, 16 bytes", step_s=200e-6),
    Work(name="1 ms, 28 KB", step_s=1e-3, row_bytes=28_224),
    Work(name="1 ms, 28 KB, lognormal", step_s=1e-3, law="lognormal", row_bytes=28_224),
    Work(name="10 ms, 28 KB, lognormal", step_s=10e-3, law="lognormal", row_bytes=28_224),
    Work(name="10 ms, 28 KB, 1 % x 100", step_s=10e-3, law="spikes", row_bytes=28_224),
)
#: Workload of the suite -> its envs' work.
CHECKED = {
    "w200": Work(name="200 us", step_s=200e-6),
    "w1000": Work(name="1 ms", step_s=1e-3),
    "lognormal": Work(name="200 us, lognormal", step_s=200e-6, law="lognormal"),
    "spikes": Work(name="200 us, 1 % x 100", step_s=200e-6, law="spikes"),
}
_BY_MODE: dict[Mode, str] = {"sync": ours.OURS, "first-K": ours.FIRST_K}
_COLORS: dict[Mode, str] = {"sync": "#3465a4", "first-K": "#c2185b", "two groups": "#4e9a06"}


def costs_of(results: Mapping[str, Any]) -> Costs:
    """Return the model's costs, from the growth laws of a run.

    The caller's slopes with N, with W (up to the number of processors) and with bytes are its costs of an env, a ring
    and a byte. The remaining slope of all processes with N is the worker's cost of an env. A wake-up costs half of a
    batch's time that the known sequential work does not explain, because there is one on each side.
    """
    growth = results["growth"]
    envs, workers, parts = growth["envs"][ours.OURS], growth["workers"][ours.OURS], growth["parts"][growth_laws.NARROW]
    fixed_us, env_us, _ = envs["caller_fit"]
    ring_us = max(0.0, _slope_within(workers, results["machine"]["usable_cores"]))
    byte_us = max(0.0, growth["bytes"][ours.OURS]["caller_fit"][1])
    worker_env_us = max(0.1, envs["cpu_fit"][1] - env_us)
    part_us, part_env_us, _ = parts["caller_fit"]
    num_workers = results["machine"]["usable_cores"]
    batch_us = max(1.0, fixed_us - num_workers * ring_us)
    known_us = fixed_us + 8 * env_us + 8 / num_workers * worker_env_us
    wall_us = envs["wall_us"][envs["x"].index(8)]
    return Costs(
        batch_s=batch_us * 1e-6,
        env_s=env_us * 1e-6,
        byte_s=byte_us * 1e-6,
        ring_s=ring_us * 1e-6,
        part_s=max(1.0, part_us) * 1e-6,
        part_env_s=max(0.0, part_env_us - ring_us) * 1e-6,
        worker_env_s=worker_env_us * 1e-6,
        wake_s=max(1.0, (wall_us - known_us) / 2) * 1e-6,
    )


def _slope_within(row: Mapping[str, Any], cores: int) -> float:
    """Return the caller's cost of a further worker in us, from the points at which each worker has a processor."""
    points = [(x, y) for x, y in zip(row["x"], row["caller_us"], strict=True) if x <= cores]
    (first, low), (last, high) = points[0], points[-1]
    return float((high - low) / (last - first)) if last > first else float(row["caller_fit"][1])


def check(results: Mapping[str, Any]) -> Iterator[tuple[str, Mode, float, float]]:
    """Yield workload, mode, and the measured and predicted rate in env-steps/s.

    Envs take a fixed number of instructions, not of seconds, so an env's time is read from the measured ideal of the
    same run.
    """
    cores = results["machine"]["usable_cores"]
    costs = costs_of(results)
    for workload, work in CHECKED.items():
        rows = results.get("workloads", {}).get(workload, {}).get("contenders", {})
        ideal = rows.get("measured ideal", {}).get("steps_per_s")
        if not ideal:
            continue
        took = Work(name=work.name, step_s=cores / ideal, law=work.law)
        for mode, name in _BY_MODE.items():
            if rows.get(name, {}).get("status") != "measured":
                continue
            setting = Setting(mode=mode, num_workers=cores, envs_per_worker=8 // cores, cores=cores)
            yield work.name, mode, rows[name]["steps_per_s"], simulate(costs, took, setting, 40_000).steps_per_s


def outcome(costs: Costs, work: Work, mode: Mode, cores: int) -> Outcome:
    """Return the outcome of a machine with `cores` processors and a worker on each but the caller's."""
    workers = max(1, cores - 1)
    return simulate(
        costs, work, Setting(mode=mode, num_workers=workers, envs_per_worker=ENVS_PER_WORKER, cores=cores), 20_000
    )


def lines(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the part of the page as Markdown."""
    costs = costs_of(results)
    yield (
        f"Inputs of the model, in microseconds of the caller's processor: {costs.batch_s * 1e6:.0f} a batch, "
        f"{costs.env_s * 1e6:.2f} an env in it, {costs.ring_s * 1e6:.1f} a worker, {costs.byte_s * 1e9:.2f} for 1,000 "
        f"bytes; {costs.part_s * 1e6:.0f} to receive some envs and send them on, {costs.part_env_s * 1e6:.1f} for each "
        f"of them. A worker takes {costs.worker_env_s * 1e6:.1f} a step in addition to the env's, a wake-up "
        f"{costs.wake_s * 1e6:.0f}."
    )
    yield from ("", "Against the runs on this machine, env-steps/s:", "")
    yield from ("| envs | way | measured | model | model / measured |", "|---|---|---|---|---|")
    for name, mode, measured, modelled in check(results):
        yield f"| {name} | {mode} | {measured:,.0f} | {modelled:,.0f} | {modelled / measured:.2f} |"
    yield from (
        "",
        f"Share of the workers' own speed, {ENVS_PER_WORKER} envs each, a processor for each and one for the",
    )
    yield from ("caller; in brackets the share of the time in which the caller is busy:", "")
    yield "| envs | way | " + " | ".join(f"{count} cores" for count in SHOWN) + " |"
    yield "|---" * (len(SHOWN) + 2) + "|"
    for work in WORKS:
        for mode in MODES:
            found = [outcome(costs, work, mode, count) for count in SHOWN]
            cells = " | ".join(f"{one.of_ideal:.0%} ({one.caller_share:.0%})" for one in found)
            yield f"| {work.name} | {mode} | {cells} |"


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw the share of the workers' own speed against processors, a panel for each kind of env."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    costs = costs_of(results)
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    for index, work in enumerate(WORKS):
        axes = figure.add_subplot(2, 3, index + 1, xscale="log", ylim=(0, 1.05))
        for mode in MODES:
            shares = [outcome(costs, work, mode, count).of_ideal for count in CORES]
            axes.plot(CORES, shares, "o-", color=_COLORS[mode], markersize=3, label=mode)
        axes.set_xscale("log", base=2)
        axes.set_xticks(CORES, [str(count) for count in CORES])
        axes.set_title(work.name, fontsize=10)
        axes.grid(visible=True, alpha=0.3)
        axes.set_xlabel("processors")
    figure.axes[0].set_ylabel("share of the workers' own speed")
    figure.axes[0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main() -> None:
    """Print the part of the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/reports/scaling.md's part and its plot")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text())
    found = list(lines(results))
    print("\n".join(found))
    if arguments.write:
        docs = ROOT / "docs"
        draw(results, docs / "images" / PLOT)
        picture = f"![share of the workers' own speed that is left, by processors](../images/{PLOT})"
        write_part(docs / "reports" / "scaling.md", "benchmarks/cores.py", [*found, "", picture])


if __name__ == "__main__":
    main()
