"""A chart that compares evaluations, for example of random and trained players."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from envherd.executor.show.results import Evaluation, Interval

_FOCAL, _BACKGROUND = "#3465a4", "#888888"


def plot_evaluations(evaluations: Mapping[str, Evaluation], path: str | Path) -> None:
    """Draw the measures of evaluations, labelled by their names, to a PNG file; needs matplotlib.

    The whiskers are 95 % confidence intervals; the marks on the right are the returns of each player in each episode.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(", ".join(dict.fromkeys(one.env for one in evaluations.values())), fontsize=12)
    axes = figure.subplots(1, 4, width_ratios=(1, 1, 1, 2))
    measures = ("focal_per_capita", "collective", "equality")
    for ax, measure in zip(axes, measures, strict=False):
        _draw_bars(ax, {name: getattr(one, measure) for name, one in evaluations.items()})
        ax.set_title(measure.replace("_", " "))
    _draw_players(axes[3], evaluations)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_bars(axes: Any, intervals: Mapping[str, Interval]) -> None:
    for place, one in enumerate(intervals.values()):
        axes.bar(place, one.mean, color=_FOCAL, width=0.6)
        if not math.isnan(one.low):
            axes.errorbar(place, one.mean, [[one.mean - one.low], [one.high - one.mean]], color="black", capsize=4)
        if math.isnan(one.mean):
            axes.text(place, 0, "undefined", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(intervals)), list(intervals))
    axes.set_xlim(-0.6, len(intervals) - 0.4)
    axes.grid(alpha=0.3, axis="y")


def _draw_players(axes: Any, evaluations: Mapping[str, Evaluation]) -> None:
    width = 0.7 / len(evaluations)
    players = max((one.players for one in evaluations.values()), key=len)
    for number, one in enumerate(evaluations.values()):
        for player, is_focal in enumerate(one.is_focal):
            values = one.returns[:, player]
            places = player + (number - (len(evaluations) - 1) / 2) * width
            spread = np.linspace(-width / 4, width / 4, len(values)) if len(values) > 1 else 0.0
            color = _FOCAL if is_focal else _BACKGROUND
            axes.plot(
                places + spread, values, "o" if number == 0 else "s", color=color, alpha=0.35 + 0.3 * (number > 0)
            )
    axes.set_xticks(range(len(players)), list(players), rotation=30, ha="right", fontsize=8)
    marks = ", ".join(f"{mark} {name}" for mark, name in zip(("circle:", *["square:"] * 9), evaluations, strict=False))
    axes.set_title(f"return of each player ({marks})", fontsize=9)
    axes.grid(alpha=0.3, axis="y")
