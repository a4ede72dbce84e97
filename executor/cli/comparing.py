"""Implements `envherd compare`, from its options to its exit code."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from envherd.benchmarks import ours, peers
from envherd.benchmarks.pools import Contender, Job
from envherd.benchmarks.ratios import per_round
from envherd.benchmarks.rounds import Entry, Plan, measure
from envherd.benchmarks.summary import summarise
from envherd.executor.cli.commands import carry_out, write_text
from envherd.executor.cli.env_names import factory_for, full_name
from envherd.executor.cli.exit_codes import EXIT_FAILED
from envherd.executor.cli.media import require_matplotlib
from envherd.executor.machine.machine import usable_cores
from envherd.workers.errors import FactoryError

SCHEMA = "envherd.compare/1"
#: Total seconds after which no further round begins.
_LIMIT_S = 900.0
_SHOWN = (
    ours.OURS,
    ours.SERIAL,
    peers.GYMNASIUM_ASYNC,
    peers.GYMNASIUM_SYNC,
    peers.SB3_SUBPROC,
    peers.SB3_DUMMY,
    peers.TORCHRL_PARALLEL,
)
#: Keys of a library in the JSON.
_REPORTED = ("status", "steps_per_s", "envherd_is", "cpu_us_per_step", "processes", "rounds")


@dataclass(frozen=True, kw_only=True)
class CompareRequest:
    """The options of the command line."""

    env: str
    num_envs: int = 8
    num_workers: int | None = None
    num_rounds: int = 5
    seconds: float = 1.0
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    plot: Path | None = None
    is_quiet: bool = False
    json_path: str | None = None


def run(request: CompareRequest) -> int:
    """Measure every library and print a table; return the exit code. `carry_out` handles errors."""
    return carry_out(lambda: _job(request), lambda job: _compare(request, job))


def _compare(request: CompareRequest, job: Job) -> int:
    """Measure, draw and write; return the exit code."""
    console = Console(stderr=request.json_path == "-", quiet=request.is_quiet)
    with console.status("") as status:
        entries, _ = measure(
            [(one, job) for one in _contenders(job)],
            Plan(request.num_rounds, request.seconds, num_tries=1, limit_s=_LIMIT_S),
            status.update,
        )
    found = summarise(entries, ours.OURS, judged_by="rounds", pressure_at_rest=None)
    _add_ratios(entries, found)
    console.print(_table(request, job, found))
    for line in _failures(found):
        Console(stderr=console.stderr or request.is_quiet).print(line, style="red", soft_wrap=True, markup=False)
    if request.plot is not None:
        _draw(request.plot, request, found)
    write_text(request.json_path, _json(request, job, found))
    return 0 if found[ours.OURS]["status"] == "measured" else EXIT_FAILED


def _job(request: CompareRequest) -> Job:
    """Return the job that every library runs.

    Raises:
        FactoryError: no such env, or the other libraries do not run its family.
        MediaError: a chart is requested, and matplotlib is not installed.
    """
    if request.plot is not None:
        require_matplotlib()
    name = full_name(request.env)
    factory, family = factory_for(name), name.partition(":")[0]
    if family not in ("gymnasium", "python", "meltingpot"):
        raise FactoryError(
            f"compare failed: expected a Gymnasium env or a Melting Pot substrate, which other libraries also run, got "
            f"{name}. `envherd size` measures envs of other families."
        )
    if family == "meltingpot" and request.env_kwargs:
        raise FactoryError(
            "compare failed: expected no --env-kwargs with Melting Pot, which TorchRL's env does not take."
        )
    return Job(
        make_env=functools.partial(factory, **request.env_kwargs) if request.env_kwargs else factory,
        num_envs=request.num_envs,
        num_workers=min(request.num_envs, request.num_workers or usable_cores()),
        family="meltingpot" if family == "meltingpot" else "gymnasium",
    )


def _contenders(job: Job) -> list[Contender]:
    known = {one.name: one for one in (*ours.CONTENDERS, *peers.CONTENDERS)}
    return [known[name] for name in _SHOWN if job.family in known[name].families]


def _table(request: CompareRequest, job: Job, found: dict[str, dict[str, Any]]) -> Table:
    title = f"{request.env}, {job.num_envs} envs, {job.num_workers} envherd workers"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("library", no_wrap=True)
    for name in ("env-steps/s", "envherd is", "CPU us/step"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, one in _by_speed(found):
        if one["status"] == "measured":
            ratio = one["envherd_is"]
            spread = "" if name == ours.OURS else f"{ratio[1]:.2f}x ({ratio[0]:.2f}-{ratio[2]:.2f})"
            table.add_row(name, f"{one['steps_per_s']:,.0f}", spread, f"{one['cpu_us_per_step']:,.1f}")
        elif one["status"] == "not installed":
            table.add_row(name, "-", "not installed", "-", style="dim")
        else:
            table.add_row(name, "-", "failed", "-", style="red")
    return table


def _failures(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line of text for each library that failed."""
    return [
        f"{name}: {' '.join(one['status'].split())[:300]}"
        for name, one in found.items()
        if one["status"] not in ("measured", "not installed")
    ]


def _add_ratios(entries: list[Entry], found: dict[str, dict[str, Any]]) -> None:
    """Add `envherd_is` to each measured library: envherd's speed divided by its own, as quartiles over the rounds."""
    speeds = {entry.contender.name: [turn.slot.steps_per_s for turn in entry.turns] for entry in entries}
    for name, one in found.items():
        if one["status"] == "measured":
            count = min(len(speeds[name]), len(speeds[ours.OURS]))
            one["envherd_is"] = per_round(speeds[ours.OURS][:count], speeds[name][:count]) or (math.nan,) * 3


def _by_speed(found: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    return sorted(found.items(), key=lambda item: -float(item[1].get("steps_per_s", 0.0)))


def _draw(path: Path, request: CompareRequest, found: dict[str, dict[str, Any]]) -> None:
    """Write a chart with one bar for each measured library."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [(name, one["steps_per_s"]) for name, one in reversed(_by_speed(found)) if one["status"] == "measured"]
    figure = Figure(figsize=(7.0, 1.2 + 0.4 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colors = ["#2a6fb0" if name in (ours.OURS, ours.SERIAL) else "#9aa7b5" for name, _ in shown]
    bars = axes.barh([name for name, _ in shown], [speed for _, speed in shown], color=colors)
    axes.bar_label(bars, [f" {speed:,.0f}" for _, speed in shown])
    axes.margins(x=0.15)
    axes.set_xlabel("env-steps/s")
    axes.set_title(f"{request.env}, {request.num_envs} envs")
    figure.savefig(path, dpi=120)


def _json(request: CompareRequest, job: Job, found: dict[str, dict[str, Any]]) -> str:
    plain = {
        "schema": SCHEMA,
        "env": request.env,
        "num_envs": job.num_envs,
        "num_workers": job.num_workers,
        "libraries": {name: {k: v for k, v in one.items() if k in _REPORTED} for name, one in _by_speed(found)},
    }
    return json.dumps(plain, indent=2) + "\n"
