"""Implements `envherd size --cluster ADDRESS`: a plan for the nodes of a Ray cluster, as a table and as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from envherd.executor.cli.commands import write_text
from envherd.executor.cli.env_names import Factory
from envherd.executor.cli.sizing_report import size_text
from envherd.executor.sizing.settings import Goal, counted

if TYPE_CHECKING:
    from envherd.executor.cli.size import Size
    from envherd.executor.cluster.planning import ClusterPlan

SCHEMA = "envherd.size-cluster/2"


def report_cluster(size: Size, factory: Factory, goal: Goal, probe_bytes: int | None, console: Console) -> int:
    """Measure an env on the nodes and report the plan; return the exit code.

    Args:
        size: the options, with the address of a cluster.
        factory: of the env.
        goal: fixed numbers, time of the policy, and headroom.
        probe_bytes: most memory of the measurement; None for most of what is available.
        console: shows progress and plan.
    """
    assert size.cluster is not None
    from envherd.executor.cluster.env import need_ray

    need_ray("envherd size --cluster")
    from envherd.executor.cluster.planning import plan_cluster

    with console.status(f"measuring on the nodes of {size.cluster}"):
        plan = plan_cluster(factory, size.cluster, goal, size.budget, probe_bytes)
    console.print(table(size.env, size.cluster, plan))
    report = {"schema": SCHEMA, "env": size.env, "address": size.cluster, **plan.to_plain()}
    write_text(size.json, json.dumps(report, indent=2) + "\n")
    return 0


def table(env: str, address: str, plan: ClusterPlan) -> RenderableType:
    """Return a plan for the terminal."""
    grid = Table(title=Text(f"{env} on {address}", "bold"), title_justify="left", box=box.ROUNDED)
    columns = ("node", "cores", "memory", "envs", "workers", "predicted env-steps/s", "taken", "call")
    for name in columns:
        grid.add_column(name, justify="left" if name == "node" else "right")
    for node in plan.nodes:
        one = node.prediction
        grid.add_row(
            f"{node.report.hostname}/{node.report.node_id[:8]}",
            f"{node.machine.cores:g}",
            size_text(node.machine.memory_available),
            str(node.num_envs),
            str(node.num_workers),
            f"{one.steps_per_s:,.0f}",
            size_text(one.memory_bytes),
            f"{node.trip_s * 1e3:.2f} ms",
        )
    lines = (
        f"run: {counted(plan.num_envs, 'env')} on {counted(len(plan.nodes), 'node')}",
        f"stepped as one batch: {plan.steps_per_s:,.0f} env-steps/s predicted ({plan.batch_s * 1e3:,.2f} ms a batch)",
        "  (the slowest node decides, and what rows cost on the network comes on top)",
        f"remote rollouts: {plan.rollout_steps_per_s:,.0f} env-steps/s predicted (every node at its own speed)",
        f"envherd rollout {env} --cluster {address} --envs {plan.num_envs}",
    )
    return Group(grid, *(Text(line) for line in lines))
