"""The README's pictures of the results: ratios as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks import peers
from benchmarks.report import short

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


def draw_all(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw the README's pictures to PNG files in a folder; return their paths."""
    folder.mkdir(exist_ok=True)
    drawn = []
    for name, theme in THEMES.items():
        figure = summary(results, *theme)
        if figure is not None:
            figure.savefig(folder / name, dpi=110, transparent=True)
            drawn.append(folder / name)
    return drawn


def summary(
    results: Mapping[str, Any], ink: str, fills: Sequence[str]
) -> Figure | None:
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
    figure = Figure(figsize=(6.5, 0.8 + 0.72 * len(found)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, ratios in enumerate(found.values()):
        there = [
            (peer, ratio) for peer, ratio in enumerate(ratios) if ratio is not None
        ]
        for place, (peer, (_, mid, _)) in enumerate(there):
            y = row + 0.26 * (place - (len(there) - 1) / 2)
            axes.barh(
                y, mid - 1, 0.24, left=1, color=fills[peer], label=_SUMMARY_PEERS[peer]
            )
            axes.annotate(
                f"{short(mid)}x",
                (mid, y),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=ink,
            )
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(
        handles.values(),
        handles,
        loc="upper right",
        fontsize=8,
        labelcolor=ink,
        frameon=False,
    )
    axes.set_xscale("log")
    axes.margins(x=0.14)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(found)), found, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("logarithmic scale", fontsize=8, color=ink)
    axes.set_title(
        "Synchronous steps per second of envherd, divided by those of",
        fontsize=10,
        color=ink,
    )
    axes.tick_params(which="both", colors=ink, labelsize=9, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "left")
        spine.set_color(ink)
    return figure
