"""`envherd size ENV`: measures an env, and recommends numbers of envs and workers, with reasons."""

from __future__ import annotations

import contextlib
import gc
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from envherd.executor.cli.exit_codes import EXIT_INTERRUPTED
from envherd.executor.cli.option_values import Env, EnvKwargs, Quiet, picture, text_file

if TYPE_CHECKING:
    from envherd.executor.cli.env_names import Factory
    from envherd.executor.machine.machine import Machine
    from envherd.executor.sizing.recommending import Sizing
    from envherd.executor.sizing.settings import Goal

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def _size(text: str | None) -> str | None:
    """Check a size; the callback of options that take one."""
    if text is not None:
        parse_size(text)
    return text


@dataclass(frozen=True, kw_only=True)
class Size:
    """Measure ENV on this machine and recommend workers, envs and a way to step them, with reasons.

    The recommendation considers CPU affinity, CPU quota, memory limit, open files and the current load.
    """

    env: Env
    envs: Annotated[int | None, typer.Option(min=1, help="Fix the number of envs; default: chosen.")] = None
    workers: Annotated[int | None, typer.Option(min=1, help="Fix the number of workers; default: chosen.")] = None
    policy_ms: Annotated[float, typer.Option(min=0.0, help="Milliseconds that the policy takes per batch.")] = 0.0
    target_steps_per_s: Annotated[
        float | None, typer.Option(min=0.0, help="Recommend the smallest setting with this many env-steps per second.")
    ] = None
    episode_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of an episode; default: measured. Set it for very long episodes.")
    ] = None
    cpus: Annotated[int | None, typer.Option(min=1, help="Plan for a machine with this many cores.")] = None
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", callback=_size, help="Plan for this much available memory, e.g. 256GiB."),
    ] = None
    gpu: Annotated[
        str | None, typer.Option(metavar="SIZE", callback=_size, help="Plan for a GPU with this much memory.")
    ] = None
    budget: Annotated[float, typer.Option(min=0.5, help="Maximum seconds of the measurement.")] = 20.0
    headroom: Annotated[float, typer.Option(min=0.0, max=0.9, help="Share of the memory to leave free.")] = 0.2
    env_kwargs: EnvKwargs = None
    plot: Annotated[
        Path | None, typer.Option(metavar="PATH", callback=picture(".png"), help="Write a chart (PNG).")
    ] = None
    json: Annotated[
        str | None, typer.Option(metavar="PATH", callback=text_file, help="Write the report as JSON; - prints it.")
    ] = None
    quiet: Quiet = False

    def run(self) -> int:
        """Size the env and report it; return the exit code. `carry_out` handles errors of the env."""
        try:
            with Console(stderr=True, quiet=self.quiet).status("starting"), quick_imports():
                from envherd.executor.cli.commands import carry_out
                from envherd.executor.sizing import recommending  # noqa: F401  # now, with the rest
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        return carry_out(self._prepare, self._work)

    def _prepare(self) -> tuple[Factory, Goal]:
        """Check the options before anything is measured; return the factory and the goal."""
        from envherd.executor.cli.env_names import factory_for
        from envherd.executor.sizing.settings import Goal

        if self.plot is not None:
            from envherd.executor.sizing import plotting  # noqa: F401  # its error names the missing package
        goal = Goal(
            num_envs=self.envs,
            num_workers=self.workers,
            policy_s=self.policy_ms / 1e3,
            target_steps_per_s=self.target_steps_per_s,
            episode_steps=self.episode_steps,
            headroom=self.headroom,
        )
        return factory_for(self.env), goal

    def _work(self, prepared: tuple[Factory, Goal]) -> int:
        """Size the env and report the result; return the exit code."""
        from envherd.executor.machine.machine import read_machine
        from envherd.executor.sizing.recommending import recommend

        factory, goal = prepared
        console = Console(stderr=self.json == "-", quiet=self.quiet)
        is_here = self.cpus is None and self.memory is None and self.gpu is None
        with Console(stderr=True, quiet=self.quiet).status("starting") as status:
            sizing = recommend(
                factory,
                env_kwargs=self.env_kwargs or None,
                goal=goal,
                budget_s=self.budget,
                machine=None if is_here else planned(read_machine(), self.cpus, self.memory, self.gpu),
                progress=lambda text, share: status.update(f"{text} ({share:.0%} of {self.budget:g} s)"),
            )
        self._report(sizing, console)
        return 0

    def _report(self, sizing: Sizing, console: Console) -> None:
        from envherd.executor.cli.commands import write_text
        from envherd.executor.cli.sizing_report import plain_report, table

        console.print(table(self.env, sizing))
        if self.plot is not None:
            from envherd.executor.sizing.plotting import draw

            draw(self.plot, self.env, sizing)
            console.print(f"plot: {self.plot}")
        write_text(self.json, json.dumps(plain_report(self.env, sizing), indent=2) + "\n")


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Keep imported objects out of garbage collection: imports take a fifth less time, and the exit a second less."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def planned(here: Machine, cpus: int | None, memory: str | None, gpu: str | None) -> Machine:
    """Return the machine to plan for: this one, with the cores, memory and GPU of the options."""
    from envherd.executor.machine.gpus import Gpu

    machine = here
    if cpus is not None:
        ids = tuple(range(cpus))
        cgroup = replace(machine.cgroup, cpu_quota=None)
        machine = replace(machine, cpus=ids, num_cpus=cpus, physical_cores=cpus, cgroup=cgroup)
    if memory is not None:
        size = parse_size(memory)
        cgroup = replace(machine.cgroup, memory_limit=None, memory_room=None)
        machine = replace(machine, memory_total=size, memory_free=size, cgroup=cgroup)
    if gpu is not None:
        machine = replace(machine, gpus=(Gpu("planned", parse_size(gpu), None),))
    return machine


def parse_size(text: str) -> int:
    """Return the bytes of a text such as `2GiB`, `512M` or `1.5 g`. Units are powers of 1000, with an i of 1024.

    Raises:
        typer.BadParameter: the text is not a number with such a unit.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match.group(2) not in _UNITS:
        raise typer.BadParameter(f"expected a number and a unit, e.g. 256GiB or 512MB, got {text!r}.")
    return int(float(match.group(1)) * _UNITS[match.group(2)])
