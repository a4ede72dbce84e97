"""The report of `envherd size`: a table for readers, JSON for programs, YAML for config files."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from envherd.executor.machine.machine import Machine
from envherd.executor.sizing.measurement import Measurement
from envherd.executor.sizing.recommending import Sizing
from envherd.executor.sizing.settings import counted, time_text

SCHEMA = "envherd.size/4"
_MIB, _GIB = 2**20, 2**30


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
    """Return the report as documented in docs/sizing.md, ready for `json.dump`."""
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


def size_text(size: float) -> str:
    """Return a number of bytes as text with a unit."""
    if size < _MIB:
        return f"{size / 1024:,.1f} KiB"
    return f"{size / _MIB:,.1f} MiB" if size < 10 * _GIB else f"{size / _GIB:,.1f} GiB"
