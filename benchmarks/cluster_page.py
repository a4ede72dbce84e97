"""Write the part of docs/reports/scaling.md for the measurements of `cluster.py`, and its plot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import ROOT
from benchmarks import cluster_model as model
from benchmarks.parts import write_part

PAGE = ROOT / "docs" / "reports" / "scaling.md"
PLOT = PAGE.parents[1] / "images" / "scaling_cluster.png"
NODES = (1, 10, 100, 1000)


def costs(results: dict[str, Any]) -> model.Costs:
    """Return the model's costs."""
    return model.Costs(**results["costs"])


def measured_lines(results: dict[str, Any]) -> Iterator[str]:
    """Yield the measured tables as Markdown."""
    machine = results["machine"]
    yield (
        f"Measured on {machine['cores']} cores of {machine['cpu']}, load {machine['load']:.1f} before and "
        f"{machine['load_after']:.1f} after, {results['rounds']} rounds of {results['slot_s']:g} s slots; Ray "
        f"{machine['packages']['ray']}, TorchRL {machine['packages']['torchrl']}."
    )
    for name, title in (
        ("tiny", "Batches of 8 envs that do nothing, 16 bytes each"),
        ("image", "The same with 28 KB each"),
        ("cartpole", "Rollouts of 8 CartPoles on 2 nodes, the policy (two layers) next to the envs"),
    ):
        yield from (
            "",
            f"{title}:",
            "",
            "| | ms per call | driver's CPU ms per call | env-steps/s |",
            "|---|---|---|---|",
        )
        for contender, one in results[name].items():
            wall_ms, cpu_ms = one["wall_s"] * 1e3, one["driver_cpu_s"] * 1e3
            yield f"| {contender} | {wall_ms:,.2f} | {cpu_ms:,.2f} | {one['steps_per_s']:,.0f} |"


def model_lines(results: dict[str, Any]) -> Iterator[str]:
    """Yield the model's part as Markdown."""
    found, site = costs(results), model.Site()
    yield (
        f"Inputs of the model: a round trip of {found.trip_s * 1e3:.2f} ms; of the driver's processor for a "
        f"batch {found.step_fixed_s * 1e6:,.0f} us, {found.step_node_s * 1e6:,.0f} us a node and "
        f"{found.large_s * 1e6:,.0f} us more where a node's rows exceed the 100 KB that Ray sends with an answer; for "
        f"a remote rollout {found.rollout_s * 1e6:,.0f} us; {found.byte_s * 1e9:.2f} s per GB. "
        f"Assumptions: nodes of {site.workers} workers with "
        f"{site.envs_per_worker} envs each, a driver with {site.network_bytes_s * 8e-9:g} Gbit/s each way and one "
        f"processor for this, rollouts of {site.rollout_steps} steps with new weights for each."
    )
    yield from ("", "Share of the nodes' own speed that is left:", "")
    yield (
        "| envs | way | " + " | ".join(f"{count:,} node{'s' * (count > 1)}" for count in NODES) + " | bottleneck | at |"
    )
    yield "|---" * (len(NODES) + 4) + "|"
    for work in model.WORKS:
        shares = [model.step_efficiency(found, work, site, count) for count in NODES]
        half = model.half_nodes(found, work, site)
        at = f"half is lost at {half + 1:,} node{'s' if half else ''}"
        yield _row(work.name, "one batch", shares, model.step_limit(found, work, site), at)
        name, nodes = model.rollout_limit(found, work, site)
        shares = [model.rollout_efficiency(found, work, site, count) for count in NODES]
        yield _row(
            work.name, "remote rollouts", shares, name, f"{nodes:,.1f} nodes" if nodes < 10 else f"{nodes:,.0f} nodes"
        )


def _row(name: str, way: str, shares: list[float], limit: str, at: str) -> str:
    return f"| {name} | {way} | " + " | ".join(f"{share:.1%}" for share in shares) + f" | {limit} | {at} |"


def write(results: dict[str, Any]) -> None:
    """Write the plot, and this script's part of the page."""
    draw(results)
    picture = f"![share of the nodes' speed that is left, by nodes](../images/{PLOT.name})"
    write_part(PAGE, "benchmarks/cluster.py", [*measured_lines(results), "", *model_lines(results), "", picture])


def draw(results: dict[str, Any]) -> None:
    """Draw the remaining share of the nodes' speed, from 1 to 1,000 nodes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found, site = costs(results), model.Site()
    nodes = [round(10 ** (exponent / 20)) for exponent in range(61)]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="nodes", ylabel="share of the nodes' own speed")
    for work, color in zip(model.WORKS, ("#3465a4", "#e07b00", "#4e9a06"), strict=True):
        rollouts = [model.rollout_efficiency(found, work, site, count) for count in nodes]
        steps = [model.step_efficiency(found, work, site, count) for count in nodes]
        axes.plot(nodes, rollouts, color=color, label=f"{work.name}: remote rollouts")
        axes.plot(nodes, steps, color=color, linestyle=":", label=f"{work.name}: one batch")
    axes.grid(visible=True, alpha=0.3)
    axes.set_ylim(1e-4, 1.3)
    axes.legend(fontsize=8, loc="lower left")
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, dpi=110)
