"""Implements `envherd size --cluster ADDRESS`: a plan for the nodes of a Ray cluster, as a table and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from envherd.executor.cli.env_names import Factory
from envherd.executor.cli.sizing_report import size_text
from envherd.executor.sizing.settings import Goal, counted

if TYPE_CHECKING:
    from envherd.executor.cluster.planning import ClusterPlan

SCHEMA = "envherd.size-cluster/2"


def plan_with(
    factory: Factory, address: str, goal: Goal, limits: tuple[float, int | None], console: Console
) -> ClusterPlan:
    """Measure an env on the nodes and return a plan; see `plan_cluster`.

    Args:
        factory: of the env.
        address: of the cluster.
        goal: fixed numbers, time of the policy, and headroom.
        limits: most seconds of the measurement, and its most bytes of memory or None.
        console: shows the progress.
    """
    from envherd.executor.cluster.env import need_ray

    need_ray("envherd size --cluster")
    from envherd.executor.cluster.planning import plan_cluster

    with console.status(f"measuring on the nodes of {address}"):
        return plan_cluster(factory, address, goal, *limits)


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


def plain_report(env: str, address: str, plan: ClusterPlan) -> dict[str, Any]:
    """Return a plan as documented in docs/cluster.md, ready for `json.dump`."""
    return {"schema": SCHEMA, "env": env, "address": address, **plan.to_plain()}
