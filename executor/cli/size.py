"""`envherd size ENV`: measures an env, and recommends numbers of envs and workers, with reasons."""

from __future__ import annotations

import json
from dataclasses import replace

from rich.console import Console

from envherd.executor.cli.commands import carry_out, write_text
from envherd.executor.cli.env_names import Factory, factory_for
from envherd.executor.cli.options import Size
from envherd.executor.cli.sizing_report import plain_report, table
from envherd.executor.machine.gpus import Gpu
from envherd.executor.machine.machine import Machine, read_machine
from envherd.executor.sizing.recommending import recommend
from envherd.executor.sizing.settings import Goal


def run(options: Size) -> int:
    """Size the env and report it; return the exit code."""
    return carry_out(lambda: _prepare(options), lambda prepared: _work(options, *prepared))


def _prepare(options: Size) -> tuple[Factory, Goal]:
    """Check the options before anything is measured; return the factory and the goal."""
    if options.plot is not None:
        from envherd.executor.sizing import plotting  # noqa: F401  # its error names the missing package
    goal = Goal(
        num_envs=options.envs,
        num_workers=options.workers,
        policy_s=options.policy_ms / 1e3,
        target_steps_per_s=options.target_steps_per_s,
        episode_steps=options.episode_steps,
        headroom=options.headroom,
    )
    return factory_for(options.env), goal


def _work(options: Size, factory: Factory, goal: Goal) -> int:
    """Size the env and report the result; return the exit code."""
    console = Console(stderr=options.json == "-", quiet=options.quiet)
    is_here = options.cpus is None and options.memory is None and options.gpu is None
    with Console(stderr=True, quiet=options.quiet).status("starting") as status:
        sizing = recommend(
            factory,
            env_kwargs=options.env_kwargs or None,
            goal=goal,
            budget_s=options.budget,
            machine=None if is_here else planned(read_machine(), options.cpus, options.memory, options.gpu),
            progress=lambda text, share: status.update(f"{text} ({share:.0%} of {options.budget:g} s)"),
        )
    console.print(table(options.env, sizing))
    if options.plot is not None:
        from envherd.executor.sizing.plotting import draw

        draw(options.plot, options.env, sizing)
        console.print(f"plot: {options.plot}")
    write_text(options.json, json.dumps(plain_report(options.env, sizing), indent=2) + "\n")
    return 0


def planned(here: Machine, cpus: int | None, memory: int | None, gpu: int | None) -> Machine:
    """Return the machine to plan for: this one, with the cores, memory and GPU of the options."""
    machine = here
    if cpus is not None:
        ids = tuple(range(cpus))
        cgroup = replace(machine.cgroup, cpu_quota=None)
        machine = replace(machine, cpus=ids, num_cpus=cpus, physical_cores=cpus, cgroup=cgroup)
    if memory is not None:
        cgroup = replace(machine.cgroup, memory_limit=None, memory_room=None)
        machine = replace(machine, memory_total=memory, memory_free=memory, cgroup=cgroup)
    if gpu is not None:
        machine = replace(machine, gpus=(Gpu("planned", gpu, None),))
    return machine
