"""What `envherd size` says: a table for readers, JSON for programs, YAML to paste."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from envherd.executor.machine.machine import Machine
from envherd.executor.sizing.measurement import Measurement
from envherd.executor.sizing.recommending import Sizing
from envherd.executor.sizing.verifying import Check
from envherd.executor.sizing.words import counted

SCHEMA = "envherd.size/1"
_MIB, _GIB = 2**20, 2**30
#: From this share of the machine on, others have made a measurement worthless.
_DISTURBED = 0.1
#: From this factor on it is said that steps take longer in a worker than in a loop.
_SLOWED = 1.1


def table(env: str, sizing: Sizing, checks: Sequence[Check], *, is_elsewhere: bool = False) -> RenderableType:
    """Return everything as tables for the terminal."""
    parts: list[RenderableType] = [_advice(env, sizing, is_elsewhere=is_elsewhere), _reasons(sizing)]
    parts.append(_checks(checks) if checks else _neighbours(sizing))
    return Group(*parts)


def _advice(env: str, sizing: Sizing, *, is_elsewhere: bool) -> Table:
    advice, one, machine = sizing.advice, sizing.advice.prediction, sizing.machine
    setting = advice.setting
    grid = Table(title=Text(env, "bold"), title_justify="left", box=box.ROUNDED, show_header=False)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(
        "run", Text(f"{counted(setting.num_envs, 'env')} on {counted(setting.num_workers, 'worker')}", "bold green")
    )
    grid.add_row("stepped", {"sync": "together", "first-k": "first-K", "two-groups": "in two groups"}[setting.mode])
    grid.add_row("env-steps/s", f"{one.steps_per_s:,.0f} predicted ({one.batch_s * 1e3:,.2f} ms a batch)")
    grid.add_row("memory", f"{size_text(one.memory_bytes)} of {size_text(advice.memory_room_bytes)} available")
    grid.add_row("start-up", f"{one.start_s:,.1f} s")
    if (ahead := advice.ahead) is not None:
        said = f"{counted(setting.num_envs, 'worker')} and as many spares, {size_text(ahead.memory_bytes)}"
        grid.add_row("resets ahead", f"about {ahead.steps_per_s:,.0f} env-steps/s; {said}")
    if advice.preload:
        grid.add_row("preload", ", ".join(advice.preload))
    grid.add_row("planned for" if is_elsewhere else "this process has", machine_text(machine))
    grid.add_section()
    for name, value in _measured(sizing.measured):
        grid.add_row(name, value)
    return grid


def machine_text(machine: Machine) -> str:
    """Say in one line what may be used."""
    parts = [f"{machine.cores:g} of {machine.num_cpus} cores", f"{size_text(machine.memory_available)} memory"]
    if machine.cgroup.cpu_quota is not None:
        parts[0] += " (quota)"
    if machine.cgroup.memory_limit is not None:
        parts[1] += f" (limit {size_text(machine.cgroup.memory_limit)})"
    if machine.files_left is not None:
        parts.append(f"{machine.files_left:,} open files")
    parts.extend(f"{gpu.name} ({size_text(gpu.memory_bytes)})" for gpu in machine.gpus)
    return ", ".join(parts)


def _measured(measured: Measurement) -> list[tuple[str, str]]:
    step = f"{_time(measured.step_median_s)} median, {_time(measured.step_p99_s)} p99"
    if measured.contention > _DISTURBED:
        step += f"; {_time(measured.step_s)} mean without what others took"
    if measured.together_factor > _SLOWED:
        step += f" in a loop; {measured.together_factor:.1f} times as long in a worker"
    cpu = f"{_time(measured.cpu_per_step_s)} of processors"
    if measured.num_threads:
        cpu += f", {measured.hidden_cpu_share:.0%} in {measured.num_threads} threads of its own"
    reset = f"{_time(measured.first_reset_s)} first, {_time(measured.reset_s)} later"
    memory = (
        f"{size_text(measured.worker_bytes + measured.first_env_bytes)} a worker with its first env, "
        f"{size_text(measured.further_env_bytes)} each further env, {size_text(measured.shared_bytes)} shared by all"
    )
    growth = (
        f"{size_text(measured.grown_per_1000_steps_bytes)} per 1,000 steps, "
        f"{size_text(measured.grown_per_reset_bytes)} per reset"
    )
    gil = (
        "unknown"
        if measured.gil_free_share is None
        else f"free for other threads {measured.gil_free_share:.0%} of a step"
    )
    return [
        ("build", f"{_time(measured.build_s)} first, {_time(measured.build_further_s)} further"),
        ("reset", reset),
        ("step", step),
        ("cpu of a step", cpu),
        ("memory of envs", memory),
        ("growth", growth),
        ("row of a batch", size_text(measured.row_bytes)),
        ("python's lock", gil),
    ]


def _reasons(sizing: Sizing) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    for index, line in enumerate(sizing.advice.why):
        grid.add_row("why:" if index == 0 else "", Text(line))
    return grid


def _neighbours(sizing: Sizing) -> Table:
    grid = _grid("predicted env-steps/s", "memory")
    for setting, one in ((sizing.advice.setting, sizing.advice.prediction), *sizing.advice.neighbours):
        cells = (f"{one.steps_per_s:,.0f}", size_text(one.memory_bytes))
        grid.add_row(
            str(setting.num_envs), str(setting.num_workers), setting.mode, *cells, style=_style(setting, sizing)
        )
    return grid


def _style(setting: Any, sizing: Sizing) -> str:
    return "bold" if setting == sizing.advice.setting else ""


def _grid(*columns: str, frame: box.Box = box.ROUNDED, padding: int = 1) -> Table:
    grid = Table(box=frame, padding=(0, padding))
    for name in ("envs", "workers"):
        grid.add_column(name, justify="right")
    grid.add_column("stepped")
    for name in columns:
        grid.add_column(name, justify="right")
    return grid


def _checks(checks: Sequence[Check]) -> RenderableType:
    columns = ("resets", "predicted\n/s", "measured\n/s", "off\nby", "memory\nmeasured", "off\nby", "others'\nshare")
    grid = _grid(*columns, frame=box.SIMPLE_HEAD, padding=0)  # which fits a terminal of 80 columns
    for one in checks:
        setting = one.setting
        grid.add_row(
            str(setting.num_envs),
            str(setting.num_workers),
            setting.mode,
            f"{one.resets:,}",
            f"{one.predicted.steps_per_s:,.0f}",
            f"{one.steps_per_s:,.0f}",
            f"{one.predicted.steps_per_s / one.steps_per_s - 1:+.0%}",
            size_text(one.memory_bytes),
            f"{one.predicted.memory_bytes / max(1, one.memory_bytes) - 1:+.0%}",
            f"{one.others_share:.0%}",
        )
    notes = [Text("predicted/s is for as many resets as there were in the seconds for which each was run", "dim")]
    if max(one.others_share for one in checks) >= _DISTURBED:
        note = "other processes used the machine while this was measured: its speeds say little about the settings"
        notes.append(Text(note, "yellow"))
    return Group(grid, *notes)


def plain_report(env: str, sizing: Sizing, checks: Sequence[Check]) -> dict[str, Any]:
    """Return everything as documented in docs/sizing.md, ready for `json.dump`."""
    machine = asdict(sizing.machine)
    for name in ("cores", "memory_available", "files_left", "processes_left"):
        machine[name] = getattr(sizing.machine, name)
    return {
        "schema": SCHEMA,
        "env": env,
        **sizing.advice.to_plain(),
        "measured": sizing.measured.to_plain(),
        "overhead": asdict(sizing.overhead),
        "machine": machine,
        "verified": [one.to_plain() for one in checks],
    }


def yaml_text(env: str, sizing: Sizing) -> str:
    """Return the setting as YAML, with what it is based on as comments."""
    advice, one = sizing.advice, sizing.advice.prediction
    workers, mode, options = advice.setting.num_workers, advice.setting.mode, list[str]()
    lines = [
        f"# {env}: {one.steps_per_s:,.0f} env-steps/s and {size_text(one.memory_bytes)} are predicted",
        f"# binds: {advice.binding}",
    ]
    if (ahead := advice.ahead) is not None:
        said = f"{ahead.steps_per_s:,.0f} with resets ahead, and {size_text(ahead.memory_bytes)}"
        lines.append(f"# that is on {counted(workers, 'worker')}; about {said}")
        workers, mode = advice.setting.num_envs, "sync"  # what resets ahead need, and their speed is of
        options.append("  reset_ahead: true")
    lines += [f"num_envs: {advice.setting.num_envs}", f"num_workers: {workers}", f"stepping: {mode}"]
    if advice.preload:
        options.append(f"  preload: {json.dumps(list(advice.preload))}")
    if options:
        lines += ["options:", *options]
    return "\n".join(lines) + "\n"


def size_text(size: float) -> str:
    """Return a size for readers."""
    if size < _MIB:
        return f"{size / 1024:,.1f} KiB"
    return f"{size / _MIB:,.1f} MiB" if size < 10 * _GIB else f"{size / _GIB:,.1f} GiB"


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:,.1f} us"
    return f"{seconds * 1e3:,.2f} ms" if seconds < 1 else f"{seconds:,.2f} s"
