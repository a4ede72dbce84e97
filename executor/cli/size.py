"""`envherd size ENV`: measures an env, and recommends numbers of envs and workers, with reasons."""

import functools
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from envherd.executor.cli.commands import carry_out, table_of_facts
from envherd.executor.cli.options import Size, write_json
from envherd.executor.machine.machine import Machine
from envherd.executor.sizing.recommending import Sizing, recommend
from envherd.executor.sizing.rule import Goal, counted, size_text, time_text
from envherd.workers.adapters.env_names import Factory, factory_for

SCHEMA = "envherd.size/8"


def run(options: Size) -> int:
    """Size the env and report it; return the exit code."""
    return carry_out(
        lambda: factory_for(options.env),
        functools.partial(_work, options),
    )


def _work(options: Size, factory: Factory) -> int:
    """Size the env and report the result; return the exit code."""
    with Console(stderr=True, quiet=options.quiet).status("starting") as status:
        sizing = recommend(
            factory,
            env_kwargs=options.env_kwargs or None,
            goal=Goal(
                num_envs=options.envs,
                num_workers=options.workers,
                policy_s=options.policy_ms / 1e3,
                target_steps_per_s=options.target_steps_per_s,
                episode_steps=options.episode_steps,
                headroom=options.headroom,
            ),
            budget_s=options.budget,
            progress=lambda text, share: status.update(
                f"{text} ({share:.0%} of {options.budget:g} s)"
            ),
        )
    reasons = Table.grid(padding=(0, 1))
    for index, line in enumerate(sizing.why):
        reasons.add_row("" if index else "why:", Text(line))
    refused = [
        Text(f"not run: {one.setting}: {one.refusal}", "dim")
        for one in sizing.runs
        if one.refusal is not None
    ]
    Console(stderr=options.json == "-", quiet=options.quiet).print(
        _advice(options.env, sizing),
        reasons,
        _runs(sizing),
        *refused,
        sep="\n",
    )
    write_json(options.json, plain_report(options.env, sizing))
    return 0


def _advice(env: str, sizing: Sizing) -> Table:
    chosen = sizing.chosen
    measured = sizing.measured
    advice = str(chosen.setting)
    if not chosen.setting.num_workers:
        envs = chosen.setting.num_envs
        advice = f"{counted(envs, 'env')} in the caller's process: SerialEnv({envs}, make_env)"
    cpu = f"{time_text(measured.cpu_per_step_s)} of processors"
    if measured.num_threads:
        cpu += f", {measured.hidden_cpu_share:.0%} in {counted(measured.num_threads, 'further thread')}"
    facts: dict[str, RenderableType] = {
        "run": Text(advice, "bold green"),
        "env-steps/s": f"{chosen.steps_per_s:,.0f} measured ({time_text(chosen.batch_s)} a batch)",
        "memory": f"{size_text(chosen.memory_bytes)} of {size_text(sizing.machine.memory_available)} available",
        "start-up": time_text(chosen.start_s),
        "machine": machine_text(sizing.machine),
        "build": f"{time_text(measured.build_s)} first, {time_text(measured.build_further_s)} further",
        "reset": f"{time_text(measured.first_reset_s)} first, {time_text(measured.reset_mean_s)} later",
        "step": f"{time_text(measured.step_median_s)} median, {time_text(measured.step_p99_s)} p99",
        "cpu of a step": cpu,
        "memory of envs": (
            f"{size_text(measured.worker_bytes)} a worker with its first env, "
            f"{size_text(measured.further_env_bytes)} each further env, "
            f"{size_text(measured.shared_bytes)} shared by all"
        ),
        "row of a batch": size_text(measured.row_bytes),
    }
    # A line separates the advice from what was measured.
    return table_of_facts(env, facts, lines_below=("machine",))


def machine_text(machine: Machine) -> str:
    """Describe the resources that may be used in one line."""
    cores = f"{machine.cores:g} of {machine.num_cpus} cores"
    if machine.is_throttled:
        cores += " (quota)"
    memory = f"{size_text(machine.memory_available)} memory"
    if machine.cgroup.memory_limit is not None:
        memory += f" (limit {size_text(machine.cgroup.memory_limit)})"
    parts = [cores, memory]
    if machine.files_left is not None:
        parts.append(f"{machine.files_left:,} open files")
    parts.extend(f"{gpu.name} ({size_text(gpu.memory_bytes)})" for gpu in machine.gpus)
    return ", ".join(parts)


def _runs(sizing: Sizing) -> Table:
    """Return a table of the settings that were run."""
    grid = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title=Text("compared on this machine", "bold"),
        title_justify="left",
    )
    for name in ("setting", "env-steps/s", "of best", "busy", "memory", "turns"):
        grid.add_column(
            name,
            justify="left" if name == "setting" else "right",
            no_wrap=True,
        )
    ran = sorted(
        (one for one in sizing.runs if one.refusal is None),
        key=lambda one: -one.steps_per_s,
    )
    for one in ran:
        grid.add_row(
            str(one.setting),
            f"{one.steps_per_s:,.0f}",
            f"{one.steps_per_s / ran[0].steps_per_s:.0%}",
            f"{one.busy_share:.0%}",
            size_text(one.memory_bytes),
            str(one.rounds),
            style="bold" if one is sizing.chosen else "",
        )
    return grid


def plain_report(env: str, sizing: Sizing) -> dict[str, Any]:
    """Return the report as documented in docs/reference/json.md, ready for `json.dump`."""
    chosen = sizing.chosen
    return {
        "schema": SCHEMA,
        "env": env,
        "executor": "ParallelEnv" if chosen.setting.num_workers else "SerialEnv",
        **vars(chosen.setting),
        **_plain(chosen, "steps_per_s", "memory_bytes", "start_s"),
        **_plain(sizing, "binding", "why"),
        "settings": [
            {
                **vars(one.setting),
                **_plain(one, "steps_per_s", "busy_share", "rounds"),
                **_plain(one, "memory_bytes", "start_s", "refusal"),
            }
            for one in sizing.runs
        ],
        "measured": {
            **vars(sizing.measured),
            **_plain(sizing.measured, "waits_share", "reset_share"),
        },
        "machine": {
            **asdict(sizing.machine),
            **_plain(sizing.machine, "cores", "memory_available"),
        },
    }


def _plain(values: Any, *names: str) -> dict[str, Any]:
    """Return some attributes by name."""
    return {name: getattr(values, name) for name in names}
