"""`envherd size ENV`: measures an env, and recommends numbers of envs and workers, with reasons."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from envherd.executor.cli.commands import carry_out
from envherd.executor.cli.option_values import write_text
from envherd.executor.cli.options import Size
from envherd.executor.machine.gpus import Gpu
from envherd.executor.machine.machine import Machine, read_machine
from envherd.executor.sizing.measurement import Measurement
from envherd.executor.sizing.recommending import Sizing, recommend
from envherd.executor.sizing.settings import Goal, counted, size_text, time_text
from envherd.workers.adapters.env_names import Factory, factory_for

SCHEMA = "envherd.size/5"


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
    if not options.is_planned:
        goal.require_room()
    return factory_for(options.env), goal


def _work(options: Size, factory: Factory, goal: Goal) -> int:
    """Size the env and report the result; return the exit code."""
    console = Console(stderr=options.json == "-", quiet=options.quiet)
    with Console(stderr=True, quiet=options.quiet).status("starting") as status:
        sizing = recommend(
            factory,
            env_kwargs=options.env_kwargs or None,
            goal=goal,
            budget_s=options.budget,
            machine=planned(read_machine(), options.cpus, options.memory, options.gpu) if options.is_planned else None,
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


def table(env: str, sizing: Sizing) -> RenderableType:
    """Return the report as tables for the terminal."""
    return Group(_advice(env, sizing), _reasons(sizing), *_runs(sizing))


def _advice(env: str, sizing: Sizing) -> Table:
    advice = sizing.advice
    setting, one = advice.setting, advice.predicted
    grid = Table(title=Text(env, "bold"), title_justify="left", box=box.ROUNDED, show_header=False)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    words = str(setting)
    if not setting.num_workers:
        envs = counted(setting.num_envs, "env")
        words = f"{envs} in the caller's process: SerialEnv({setting.num_envs}, make_env)"
    grid.add_row("run", Text(words, "bold green"))
    how = "scaled from the probe" if one.is_scaled else "measured"
    grid.add_row("env-steps/s", f"{one.steps_per_s:,.0f} {how} ({one.batch_s * 1e3:,.2f} ms a batch)")
    grid.add_row("memory", f"{size_text(one.memory_bytes)} of {size_text(advice.memory_room_bytes)} available")
    grid.add_row("start-up", f"{one.start_s:,.1f} s")
    grid.add_row("machine", machine_text(sizing.machine))
    grid.add_section()
    for name, value in _measured(sizing.measured):
        grid.add_row(name, value)
    return grid


def machine_text(machine: Machine) -> str:
    """Describe the resources that may be used in one line."""
    parts = [f"{machine.cores:g} of {machine.num_cpus} cores", f"{size_text(machine.memory_available)} memory"]
    if machine.is_throttled:
        parts[0] += " (quota)"
    if machine.cgroup.memory_limit is not None:
        parts[1] += f" (limit {size_text(machine.cgroup.memory_limit)})"
    if machine.files_left is not None:
        parts.append(f"{machine.files_left:,} open files")
    parts.extend(f"{gpu.name} ({size_text(gpu.memory_bytes)})" for gpu in machine.gpus)
    return ", ".join(parts)


def _measured(measured: Measurement) -> list[tuple[str, str]]:
    cpu = f"{time_text(measured.cpu_per_step_s)} of processors"
    if measured.num_threads:
        cpu += f", {measured.hidden_cpu_share:.0%} in {counted(measured.num_threads, 'further thread')}"
    memory = (
        f"{size_text(measured.worker_bytes)} a worker with its first env, "
        f"{size_text(measured.further_env_bytes)} each further env, {size_text(measured.shared_bytes)} shared by all"
    )
    return [
        ("build", f"{time_text(measured.build_s)} first, {time_text(measured.build_further_s)} further"),
        ("reset", f"{time_text(measured.first_reset_s)} first, {time_text(measured.reset_median_s)} later"),
        ("step", f"{time_text(measured.step_median_s)} median, {time_text(measured.step_p99_s)} p99"),
        ("cpu of a step", cpu),
        ("memory of envs", memory),
        ("row of a batch", size_text(measured.row_bytes)),
    ]


def _reasons(sizing: Sizing) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    for index, line in enumerate(sizing.advice.why):
        grid.add_row("why:" if index == 0 else "", Text(line))
    return grid


def _runs(sizing: Sizing) -> list[RenderableType]:
    """Return a table of the settings that were run and of `SerialEnv`, then the refused ones with the reasons."""
    title = Text("compared on this machine", "bold")
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left")
    for name in ("setting", "env-steps/s", "of best", "busy", "memory", "turns"):
        grid.add_column(name, justify="left" if name == "setting" else "right", no_wrap=True)
    for one in sorted((one for one in sizing.runs if one.refusal is None), key=lambda one: -one.relative):
        grid.add_row(
            str(one.setting),
            f"{one.steps_per_s:,.0f}",
            f"{one.relative:.0%}",
            f"{one.busy_share:.0%}" if one.rounds else "",
            size_text(one.memory_bytes),
            str(one.rounds) if one.rounds else "probe",
            style="bold" if one.setting == sizing.advice.setting else "",
        )
    lines = [f"not run: {one.setting}: {one.refusal.text}" for one in sizing.runs if one.refusal is not None]
    is_compared = any(one.rounds for one in sizing.runs)
    return [*([grid] if is_compared else []), *(Text(line, "dim") for line in lines)]


def plain_report(env: str, sizing: Sizing) -> dict[str, Any]:
    """Return the report as documented in docs/reference/json.md, ready for `json.dump`."""
    machine = asdict(sizing.machine)
    for name in ("cores", "memory_available", "files_left", "processes_left"):
        machine[name] = getattr(sizing.machine, name)
    serial = sizing.serial
    return {
        "schema": SCHEMA,
        "env": env,
        **sizing.advice.to_plain(),
        "serial": None if serial is None else {"num_envs": serial.setting.num_envs, "steps_per_s": serial.steps_per_s},
        "settings": [one.to_plain() for one in sizing.runs],
        "measured": sizing.measured.to_plain(),
        "machine": machine,
    }
