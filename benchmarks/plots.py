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
#: Contender -> colour and style of its line; envherd's are solid. Colours of Okabe and Ito, which all eyes tell apart.
_LINES = {
    ours.OURS: ("#0072b2", "-"),
    ours.AUTO: ("#009e73", "-"),
    ours.ONE: ("#56b4e9", "-"),
    ours.VIEWS: ("#e69f00", "-"),
    ours.WIDE: ("#7f6000", "-"),
    ours.FIRST_K: ("#cc79a7", "-"),
    peers.GYMNASIUM_ASYNC: ("#d55e00", "--"),
    peers.SB3_SUBPROC: ("#117733", ":"),
    peers.TORCHRL_PARALLEL: ("#882255", "--"),
    peers.TIANSHOU: ("#332288", "-."),
    peers.PUFFERLIB: ("#aa4499", ":"),
    bounds.SERIAL: ("#666666", ":"),
}
#: Workloads of the summary, and their names there: synchronous steps, of one run on one machine.
_SUMMARY = {
    "w200": "200 µs a step",
    "cartpole": "CartPole",
    "tiny": "no work at all\n(overhead alone)",
}
_SUMMARY_PEERS = (peers.GYMNASIUM_ASYNC, peers.SB3_SUBPROC, peers.TORCHRL_PARALLEL)
#: Picture of the README -> colours of its text, and of the bars of these peers.
THEMES = {
    "speed_light.png": ("#1f2328", ("#9ec5ea", "#4a90d0", "#1c5d99")),
    "speed_dark.png": ("#e6edf3", ("#2f6fab", "#5ba3e0", "#b5d8f7")),
}
_CPU, _WALL = "#729fcf", "#204a87"
_DISTRIBUTIONS = ("w200", "spikes", "cartpole", "tiny", "commons_harvest")
_MOST_PANELS_WIDE = 3
#: Columns of the picture of all ratios.
_RATIO_COLUMNS = 2


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
    axes.legend(handles.values(), handles, loc="upper right", fontsize=8, labelcolor=ink, frameon=False)
    axes.set_xscale("log")
    axes.margins(x=0.14)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(found)), found, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("logarithmic scale", fontsize=8, color=ink)
    axes.set_title("Synchronous steps per second of envherd, divided by those of", fontsize=10, color=ink)
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
    columns: list[list[str]] = [[] for _ in range(_RATIO_COLUMNS)]
    heights = [0.0] * _RATIO_COLUMNS
    for name in sorted(shown, key=lambda one: len(shown[one]), reverse=True):
        least = heights.index(min(heights))
        columns[least].append(name)
        heights[least] += 2 + len(shown[name])
    figure = Figure(figsize=(13, 0.36 * max(heights) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    ends = [end for name, found in shown.items() for end in _ends(results["workloads"][name], found)]
    parts: list[Any] = figure.subfigures(1, _RATIO_COLUMNS, squeeze=False).ravel().tolist()
    for part, names in zip(parts, columns, strict=True):
        if names:
            ratios = [1.4 + len(shown[name]) for name in names]
            panels = part.subplots(len(names), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
            for axes, name in zip(panels, names, strict=True):
                _ratio_panel(axes, results["workloads"][name], shown[name])
            axes.set_xlim(min(ends) / 1.3, 4 * max(ends))
            axes.set_xlabel("times (logarithmic scale)", fontsize=9)
    figure.suptitle(
        "Throughput of envherd as a multiple of others': light, by processor time; dark, by the clock, where it counts",
        fontsize=11,
    )
    return figure


def _ends(workload: Mapping[str, Any], found: Sequence[str]) -> list[float]:
    """Return the ends of the quartiles of a workload."""
    rows = (workload["contenders"][peer] for peer in found)
    return [end for row in rows for key in ("cpu_ratio", "wall_ratio") for end in row.get(key) or ()]


def _ratio_panel(axes: Any, workload: Mapping[str, Any], found: Sequence[str]) -> None:
    """Draw the bars of one workload."""
    for row, peer in enumerate(found):
        one = workload["contenders"][peer]
        for offset, key, color in ((-0.19, "cpu_ratio", _CPU), (0.19, "wall_ratio", _WALL)):
            if one.get(key) is None:
                continue
            low, mid, high = one[key]
            axes.barh(row + offset, mid - 1, 0.36, left=1, color=color)
            axes.plot([low, high], [row + offset] * 2, color="black", linewidth=0.9)
            place = (max(high, 1.0), row + offset)
            axes.annotate(f"{short(mid)}x", place, (3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(numticks=9))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(found)), found, fontsize=8)
    axes.set_ylim(len(found) - 0.5, -0.5)
    where = f" (on {workload['measured_on']})" if "measured_on" in workload else ""
    title = workload["title"].replace(" us ", " µs ")
    axes.set_title(textwrap.fill(f"{title}{where}; 1 = {workload['reference']}", 64), fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", alpha=0.3)


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
        for contender, (color, style) in _LINES.items():
            row = rows.get(contender, {})
            if row.get("status") == "measured":
                axes.plot(row["batch_levels"], LEVELS, style, color=color, linewidth=1.6, label=contender)
        axes.set_xscale("log")
        axes.set_ylim(-0.03, 1.03)  # no line lies on the frame
        axes.set_xlabel("µs per call (logarithmic scale)")
        axes.set_ylabel("share of calls")
        axes.set_title(textwrap.fill(workloads[name]["title"].replace(" us ", " µs "), 44), fontsize=9)
        axes.grid(alpha=0.3)
        lines.update((line.get_label(), line) for line in axes.get_lines())
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4, fontsize=9)
    figure.suptitle("How long one call takes (first-K calls are for some of the envs)", fontsize=11)
    return figure
