"""Pictures of the results: ratios as bars, batch times as distributions."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks import bounds, ours, peers
from benchmarks.ratios import LEVELS
from benchmarks.report import short

_PEERS = (
    peers.GYMNASIUM_SYNC,
    peers.GYMNASIUM_ASYNC,
    peers.SB3_DUMMY,
    peers.SB3_SUBPROC,
    peers.TIANSHOU,
    peers.PUFFERLIB,
    peers.TORCHRL_SERIAL,
    peers.TORCHRL_PARALLEL,
    peers.TORCHRL_ASYNC,
    peers.ENVPOOL,
    bounds.IDEAL,
    bounds.SERIAL,
)
_COLORS = {
    ours.OURS: "#3465a4",
    ours.ONE: "#00a0b0",
    ours.AUTO: "#1f8a70",
    ours.VIEWS: "#729fcf",
    ours.FIRST_K: "#c2185b",
    ours.ROLLOUT: "#7a5cc0",
    ours.WIDE: "#88aadd",
    peers.GYMNASIUM_ASYNC: "#e07b00",
    peers.SB3_SUBPROC: "#4e9a06",
    peers.TORCHRL_PARALLEL: "#b03030",
    peers.TIANSHOU: "#8f5902",
    peers.PUFFERLIB: "#d4389a",
    bounds.IDEAL: "#555555",
    bounds.SERIAL: "#999999",
}
#: Workloads of the summary, and their names there.
_SUMMARY = {
    "tiny": "envs that cost nothing",
    "cartpole": "CartPole",
    "w200": "200 µs a step",
    "commons_harvest": "Melting Pot",
}
_SUMMARY_PEERS = (peers.GYMNASIUM_ASYNC, peers.SB3_SUBPROC, peers.TORCHRL_PARALLEL)
#: Picture of the README -> colours of its text, and of the bars of these peers.
THEMES = {
    "speed_light.png": ("#1f2328", ("#9ec5ea", "#4a90d0", "#1c5d99")),
    "speed_dark.png": ("#e6edf3", ("#2f6fab", "#5ba3e0", "#b5d8f7")),
}
_CPU, _WALL = "#729fcf", "#204a87"
_DISTRIBUTIONS = ("tiny", "cartpole", "w200", "spikes", "commons_harvest")
_MOST_PANELS_WIDE = 3


def draw_all(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw all available results to PNG files in a folder; return their paths."""
    folder.mkdir(exist_ok=True)
    drawn = []
    for name, figure in (
        *((name, summary(results, *theme)) for name, theme in THEMES.items()),
        ("bench_ratios.png", _ratios(results)),
        ("bench_latency.png", _latency(results)),
    ):
        if figure is not None:
            figure.savefig(folder / name, dpi=110, transparent=name in THEMES)
            drawn.append(folder / name)
    return drawn


def _figure(num_panels: int, height: float) -> tuple[Figure, list[Any]]:
    wide = min(num_panels, _MOST_PANELS_WIDE)
    tall = -(-num_panels // wide)
    figure = Figure(figsize=(max(6.5, 5.2 * wide), height * tall), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(tall, wide, squeeze=False).ravel().tolist()
    for axes in grid[num_panels:]:
        axes.set_visible(False)
    return figure, grid[:num_panels]


def summary(results: Mapping[str, Any], ink: str, fills: Sequence[str]) -> Figure | None:
    """Bars: the reference's throughput as a multiple of other libraries', in wall time, for a few workloads.

    Args:
        results: of the suite.
        ink: colour of text and lines; the background is transparent.
        fills: colour of the bars of each peer.
    """
    found = {}
    for name, title in _SUMMARY.items():
        table = results.get("workloads", {}).get(name, {}).get("contenders", {})
        ratios = [table.get(peer, {}).get("wall_ratio") for peer in _SUMMARY_PEERS]
        if any(ratios):
            found[title] = ratios
    if not found:
        return None
    figure, (axes,) = _figure(1, 0.8 + 0.72 * len(found))
    for row, ratios in enumerate(found.values()):
        there = [(peer, ratio) for peer, ratio in enumerate(ratios) if ratio is not None]
        for place, (peer, (_, mid, _)) in enumerate(there):
            y = row + 0.26 * (place - (len(there) - 1) / 2)
            axes.barh(y, mid - 1, 0.24, left=1, color=fills[peer], label=_SUMMARY_PEERS[peer])
            axes.annotate(
                f"{short(mid)}x", (mid, y), (4, 0), textcoords="offset points", va="center", fontsize=8, color=ink
            )
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(
        handles.values(), handles, loc="lower right", fontsize=8, labelcolor=ink, frameon=False, title_fontsize=8
    )
    axes.set_xscale("log")
    axes.margins(x=0.14)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(found)), found, fontsize=9)
    axes.invert_yaxis()
    axes.set_title("Throughput of envherd as a multiple of other libraries'", fontsize=10, color=ink)
    axes.tick_params(which="both", colors=ink, labelsize=9, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "left")
        spine.set_color(ink)
    return figure


def _ratios(results: Mapping[str, Any]) -> Figure | None:
    """Bars: the reference's throughput as a multiple of each contender's, in processor time and in wall time."""
    shown = {
        name: [peer for peer in _PEERS if one["contenders"].get(peer, {}).get("cpu_ratio")]
        for name, one in results.get("workloads", {}).items()
    }
    shown = {name: found for name, found in shown.items() if found}
    if not shown:
        return None
    most = max(map(len, shown.values()))
    figure, grid = _figure(len(shown), 1.3 + 0.32 * most)
    for axes, (name, found) in zip(grid, shown.items(), strict=True):
        workload = results["workloads"][name]
        for row, peer in enumerate(found):
            one = workload["contenders"][peer]
            for offset, key, color in ((-0.19, "cpu_ratio", _CPU), (0.19, "wall_ratio", _WALL)):
                if one.get(key) is None:
                    continue
                low, mid, high = one[key]
                axes.barh(row + offset, mid - 1, 0.36, left=1, color=color)
                axes.plot([low, high], [row + offset] * 2, color="black", linewidth=0.9)
                text = f"{short(mid)}x"
                axes.annotate(
                    text, (max(high, 1.0), row + offset), (3, 0), textcoords="offset points", va="center", fontsize=7
                )
        axes.set_xscale("log")
        axes.margins(x=0.18)
        low, high = axes.get_xlim()
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 50 * low else (1.0,), numticks=9))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_yticks(range(len(found)), found, fontsize=8)
        axes.set_ylim(most - 0.5, -0.5)  # bars are equally thick in all panels
        title = textwrap.fill(workload["title"], 44)
        axes.set_title(f"{title}\n1 = {workload['reference']}", fontsize=9)
        axes.tick_params(axis="x", labelsize=8)
        axes.grid(axis="x", alpha=0.3)
    figure.suptitle(
        "How many times the throughput: light, by processor time; dark, by the clock (where it could be)", fontsize=11
    )
    return figure


def _latency(results: Mapping[str, Any]) -> Figure | None:
    """Distributions of the time that one call takes."""
    workloads = results.get("workloads", {})
    shown = [name for name in _DISTRIBUTIONS if name in workloads]
    if not shown:
        return None
    figure, grid = _figure(len(shown), 3.9)
    lines: dict[Any, Any] = {}
    for axes, name in zip(grid, shown, strict=True):
        rows = workloads[name]["contenders"]
        for contender, color in _COLORS.items():
            row = rows.get(contender, {})
            if row.get("status") == "measured" and contender not in (bounds.IDEAL, ours.ROLLOUT):
                style = "-" if contender.startswith("envherd") else "--"
                axes.plot(row["batch_levels"], LEVELS, style, color=color, linewidth=1.4, label=contender)
        axes.set_xscale("log")
        axes.set_ylim(0, 1)
        axes.set_xlabel("us per call")
        axes.set_ylabel("share of calls")
        axes.set_title(textwrap.fill(workloads[name]["title"], 44), fontsize=9)
        axes.grid(alpha=0.3)
        lines.update((line.get_label(), line) for line in axes.get_lines())
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=5, fontsize=8)
    figure.suptitle("How long one call takes (first-K calls are for some of the envs)", fontsize=11)
    return figure
