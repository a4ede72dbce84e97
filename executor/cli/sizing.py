"""What `envherd size` does, from its options to its exit code."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from envherd.executor.cli.env_names import Factory, factory_for
from envherd.executor.cli.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from envherd.executor.cli.running import complain
from envherd.executor.cli.sizing_report import plain_report, table, yaml_text
from envherd.executor.machine.gpus import Gpu
from envherd.executor.machine.machine import Machine, read_machine
from envherd.executor.options import ExecutorOptions
from envherd.executor.sizing.deciding import DoesNotFit, decide
from envherd.executor.sizing.limits import Goal
from envherd.executor.sizing.model import Model
from envherd.executor.sizing.probing import ProbeLimits
from envherd.executor.sizing.recommending import PROBE_MEMORY_SHARE, Sizing, measure, with_episodes_of
from envherd.executor.sizing.verifying import Check, check, given_resets, span_with_resets, whole_episodes
from envherd.workers.errors import EnvherdError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
#: Seconds for which each setting runs with --verify, at least.
_VERIFY_S = 3.0


class BadOption(EnvherdError, ValueError):
    """An option's value that means nothing."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options, as given."""

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
    budget_s: float = 10.0
    probe_memory: str | None = None
    headroom: float = 0.2
    has_verification: bool = False
    plot: Path | None = None
    json_path: str | None = None
    yaml_path: str | None = None

    @property
    def without_cluster(self) -> list[str]:
        """The options that were given and mean nothing for a cluster."""
        given = {
            "--cpus": self.cpus,
            "--memory": self.memory,
            "--gpu": self.gpu,
            "--target-steps-per-s": self.target_steps_per_s,
            "--episode-steps": self.episode_steps,
            "--verify": self.has_verification or None,
            "--plot": self.plot,
            "--yaml": self.yaml_path,
        }
        return [name for name, value in given.items() if value is not None]

    @property
    def is_for_elsewhere(self) -> bool:
        """Whether it is for another machine than this."""
        return any(value is not None for value in (self.cpus, self.memory, self.gpu))


def run(request: Request) -> int:
    """Size an env and report it; return the exit code. Errors are printed, never raised."""
    console = Console(stderr="-" in (request.json_path, request.yaml_path))
    errors = Console(stderr=True)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # modules named in options are looked for here first, as `python -m` does
    sizing = None
    try:
        factory, goal, limits = _prepare(request)
        if request.cluster is not None:
            return _plan_cluster(request, factory, goal, console)
        sizing = _size(request, factory, goal, limits, console)
        checks = _verify(request, factory, sizing, console) if request.has_verification else []
        _report(request, sizing, checks, console)
    except (EnvherdError, OSError, ImportError) as error:
        complain(errors, error)
        return EXIT_USAGE if sizing is None else EXIT_FAILED
    except KeyboardInterrupt:
        errors.print("interrupted")
        return EXIT_INTERRUPTED
    return 0


def _prepare(request: Request) -> tuple[Factory, Goal, ProbeLimits]:
    """Refuse at once what cannot work."""
    if request.cluster is not None and (without := request.without_cluster):
        raise BadOption(f"--cluster failed: expected none of what is for one machine, got {', '.join(without)}.")
    if request.has_verification and request.is_for_elsewhere:
        raise BadOption(
            "--verify failed: expected a plan for this machine, got one for another (--cpus, --memory, --gpu)."
        )
    if request.plot is not None:
        from envherd.executor.sizing import plotting  # noqa: F401  # says which package is missing
    for text in (request.memory, request.gpu, request.probe_memory):
        parse_size(text or "0")
    goal = Goal(
        num_envs=request.num_envs,
        num_workers=request.num_workers,
        policy_s=request.policy_s,
        target_steps_per_s=request.target_steps_per_s,
        headroom=request.headroom,
    )
    here = read_machine()
    most = parse_size(request.probe_memory) if request.probe_memory else here.memory_available * PROBE_MEMORY_SHARE
    limits = ProbeLimits(budget_s=request.budget_s, memory_bytes=int(most))
    return factory_for(request.env), goal, limits


def _plan_cluster(request: Request, factory: Factory, goal: Goal, console: Console) -> int:
    from envherd.executor.cli.cluster_sizing import json_text, plan_with, table

    assert request.cluster is not None
    most = parse_size(request.probe_memory) if request.probe_memory else None
    plan = plan_with(factory, request.cluster, goal, (request.budget_s, most), console)
    console.print(table(request.env, request.cluster, plan))
    if request.json_path is not None:
        _write(request.json_path, json_text(request.env, request.cluster, plan))
    return 0


def _size(request: Request, factory: Factory, goal: Goal, limits: ProbeLimits, console: Console) -> Sizing:
    machine = planned(read_machine(), request)
    options = ExecutorOptions()
    with _bar(console) as show:
        measured, overhead = measure(factory, None, limits, options, show)
    if request.episode_steps is not None:
        measured = with_episodes_of(measured, request.episode_steps)
    try:
        advice = decide(measured, overhead, machine, goal, options.num_frames)
    except DoesNotFit as error:
        mib = 2**20
        first, further = measured.first_env_bytes / mib, measured.further_env_bytes / mib
        raise DoesNotFit(
            f"{error} Measured: {measured.shared_bytes / mib:,.0f} MiB shared, {first:,.0f} MiB for the first env of a "
            f"worker, {further:,.0f} for each further one."
        ) from None
    return Sizing(machine=machine, measured=measured, overhead=overhead, advice=advice)


@contextlib.contextmanager
def _bar(console: Console) -> Iterator[Callable[[str, float], None]]:
    columns = (TextColumn("measuring: {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("start", total=1.0)

        def show(stage: str, share: float) -> None:
            progress.update(task, description=stage, completed=share)

        yield show


def planned(here: Machine, request: Request) -> Machine:
    """Return the machine to plan for: this one, with what the options say instead."""
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
    """Return bytes: `2GiB`, `512M`, `1.5 g`; units of 1000, or of 1024 with an i.

    Raises:
        BadOption: anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match.group(2) not in _UNITS:
        raise BadOption(f"size failed: expected a number and a unit, e.g. 256GiB or 512MB, got {text!r}.")
    return int(float(match.group(1)) * _UNITS[match.group(2)])


def _verify(request: Request, factory: Factory, sizing: Sizing, console: Console) -> list[Check]:
    checks, advice = [], sizing.advice
    whole = whole_episodes(sizing.measured, advice.prediction)
    model = Model(sizing.measured, sizing.overhead, sizing.machine, policy_s=request.policy_s)
    for setting, predicted in ((advice.setting, advice.prediction), *advice.neighbours):
        span_s = _VERIFY_S if whole > 1 else span_with_resets(sizing.measured, predicted, _VERIFY_S)
        with console.status(f"running {setting.num_envs} envs on {setting.num_workers} workers, {setting.mode}"):
            one = check(setting, predicted, factory, policy_s=request.policy_s, span_s=span_s, episode_steps=whole)
        checks.append(one if whole > 1 else given_resets(one, model))
    return checks


def _report(request: Request, sizing: Sizing, checks: list[Check], console: Console) -> None:
    console.print(table(request.env, sizing, checks, is_elsewhere=request.is_for_elsewhere))
    if request.plot is not None:
        from envherd.executor.sizing.plotting import draw

        draw(request.plot, request.env, sizing, checks)
        console.print(f"plot: {request.plot}")
    if request.json_path is not None:
        _write(request.json_path, json.dumps(plain_report(request.env, sizing, checks), indent=2) + "\n")
    if request.yaml_path is not None:
        _write(request.yaml_path, yaml_text(request.env, sizing))


def _write(path: str, text: str) -> None:
    if path == "-":
        sys.stdout.write(text)
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
