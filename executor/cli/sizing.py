"""Implements `envherd size`, from its options to its exit code."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Column
from rich.text import Text

from envherd.executor.cli.commands import carry_out, write_text
from envherd.executor.cli.env_names import Factory, factory_for
from envherd.executor.cli.sizing_report import plain_report, table, yaml_text
from envherd.executor.machine.gpus import Gpu
from envherd.executor.machine.machine import Machine, read_machine
from envherd.executor.options import ExecutorOptions
from envherd.executor.sizing.forked_host import ForkedHost
from envherd.executor.sizing.opening import subject_of
from envherd.executor.sizing.probing import ProbeLimits
from envherd.executor.sizing.recommending import BUDGET_S, Sizing, decide, measure
from envherd.executor.sizing.search import Progress
from envherd.executor.sizing.settings import Goal
from envherd.workers.errors import EnvherdError

if TYPE_CHECKING:
    from envherd.executor.cluster.planning import ClusterPlan

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class BadOption(EnvherdError, ValueError):
    """The value of an option is not valid."""


@dataclass(frozen=True, kw_only=True)
class SizeRequest:
    """The options of the command line."""

    env: str
    num_envs: int | None = None
    num_workers: int | None = None
    cluster: str | None = None
    policy_s: float = 0.0
    target_steps_per_s: float | None = None
    episode_steps: int | None = None
    cpus: int | None = None
    memory: str | None = None
    gpu: str | None = None
    budget_s: float = BUDGET_S
    probe_memory: str | None = None
    headroom: float = 0.2
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    has_verify: bool = False
    plot: Path | None = None
    json_path: str | None = None
    yaml_path: str | None = None
    is_quiet: bool = False

    @property
    def without_cluster(self) -> list[str]:
        """The options in use that do not apply to a cluster."""
        given = {
            "--cpus": self.cpus,
            "--memory": self.memory,
            "--gpu": self.gpu,
            "--target-steps-per-s": self.target_steps_per_s,
            "--episode-steps": self.episode_steps,
            "--env-kwargs": self.env_kwargs or None,
            "--plot": self.plot,
            "--yaml": self.yaml_path,
        }
        return [name for name, value in given.items() if value is not None]


def run(request: SizeRequest) -> int:
    """Size an env and report it; return the exit code. `carry_out` handles errors."""
    console = Console(stderr="-" in (request.json_path, request.yaml_path), quiet=request.is_quiet)
    return carry_out(lambda: _prepare(request), lambda prepared: _work(request, console, *prepared))


def _prepare(request: SizeRequest) -> tuple[Factory, Goal, int | None]:
    """Check the options before anything is measured; return factory, goal and memory limit of the measurement."""
    if request.has_verify:
        raise BadOption(
            "--verify failed: expected no such option: every setting in the table is run now. A longer --budget runs "
            "more turns of each."
        )
    if request.cluster is not None and (without := request.without_cluster):
        raise BadOption(f"--cluster failed: expected none of what is for one machine, got {', '.join(without)}.")
    if request.plot is not None:
        from envherd.executor.sizing import plotting  # noqa: F401  # its error names the missing package
    for text in (request.memory, request.gpu, request.probe_memory):
        parse_size(text or "0")
    goal = Goal(
        num_envs=request.num_envs,
        num_workers=request.num_workers,
        policy_s=request.policy_s,
        target_steps_per_s=request.target_steps_per_s,
        episode_steps=request.episode_steps,
        headroom=request.headroom,
    )
    return factory_for(request.env), goal, parse_size(request.probe_memory) if request.probe_memory else None


def _work(request: SizeRequest, console: Console, factory: Factory, goal: Goal, most_bytes: int | None) -> int:
    """Size an env and report the result; return the exit code."""
    if request.cluster is not None:
        from envherd.executor.cli.cluster_sizing import plan_with

        plan = plan_with(factory, request.cluster, goal, (request.budget_s, most_bytes), console)
        return _report_cluster(request, plan, console)
    sizing = _size(request, factory, goal, most_bytes, Console(stderr=True, quiet=request.is_quiet))
    return _report(request, sizing, console)


def _report_cluster(request: SizeRequest, plan: ClusterPlan, console: Console) -> int:
    from envherd.executor.cli.cluster_sizing import json_text, table

    assert request.cluster is not None
    console.print(table(request.env, request.cluster, plan))
    write_text(request.json_path, json_text(request.env, request.cluster, plan))
    return 0


def _size(request: SizeRequest, factory: Factory, goal: Goal, most_bytes: int | None, errors: Console) -> Sizing:
    here, options = read_machine(), ExecutorOptions()
    there = planned(here, request)
    limits = ProbeLimits(budget_s=request.budget_s, memory_bytes=most_bytes)
    # Forked only while this process has one thread; otherwise `measure` uses a worker process.
    forked = ForkedHost() if threading.active_count() == 1 and goal.num_workers is None else None
    with contextlib.closing(forked) if forked is not None else contextlib.nullcontext(), _progress(errors) as show:
        subject = subject_of(factory, request.env_kwargs or None, options)
        measured, here_then, found = measure(subject, goal, limits, options, show, forked)
    return decide(measured, here_then, found, goal, here_then if there == here else there, options.num_frames)


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    """Show the progress: a bar on a terminal, otherwise a line for each step and round."""
    if not console.is_terminal:
        latest = ""

        def say(text: str, _share: float) -> None:
            nonlocal latest
            if (step := text.partition(", best")[0]) != latest:
                console.print(Text(text), soft_wrap=True)
            latest = step

        yield say
        return
    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    columns = (BarColumn(12), TimeElapsedColumn(), TextColumn("{task.description}", table_column=rest))
    with Bar(*columns, console=console, transient=True, expand=True) as progress:
        task = progress.add_task("start", total=1.0)

        def show(text: str, share: float) -> None:
            progress.update(task, description=text, completed=share)

        yield show


def planned(here: Machine, request: SizeRequest) -> Machine:
    """Return the machine to plan for: this one, with the cores, memory and GPU of the options."""
    machine = here
    if request.cpus is not None:
        cgroup = replace(machine.cgroup, cpu_quota=None)
        cpus = tuple(range(request.cpus))
        machine = replace(
            machine, cpus=cpus, num_cpus=len(cpus), physical_cores=len(cpus), numa_nodes=(cpus,), cgroup=cgroup
        )
    if request.memory is not None:
        size = parse_size(request.memory)
        cgroup = replace(machine.cgroup, memory_limit=None, memory_room=None)
        machine = replace(machine, memory_total=size, memory_free=size, cgroup=cgroup)
    if request.gpu is not None:
        machine = replace(machine, gpus=(Gpu("planned", parse_size(request.gpu), None),))
    return machine


def parse_size(text: str) -> int:
    """Return the bytes of a text such as `2GiB`, `512M` or `1.5 g`. Units are powers of 1000, with an i of 1024.

    Raises:
        BadOption: the text is not a number with such a unit.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match.group(2) not in _UNITS:
        raise BadOption(f"size failed: expected a number and a unit, e.g. 256GiB or 512MB, got {text!r}.")
    return int(float(match.group(1)) * _UNITS[match.group(2)])


def _report(request: SizeRequest, sizing: Sizing, console: Console) -> int:
    console.print(table(request.env, sizing))
    if request.plot is not None:
        from envherd.executor.sizing.plotting import draw

        draw(request.plot, request.env, sizing)
        console.print(f"plot: {request.plot}")
    write_text(request.json_path, json.dumps(plain_report(request.env, sizing), indent=2) + "\n")
    if request.yaml_path is not None:
        write_text(request.yaml_path, yaml_text(request.env, sizing))
    return 0
