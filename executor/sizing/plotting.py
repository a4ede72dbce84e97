"""Plots of a sizing: the speed of each setting that was run, and the durations of steps and resets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from envherd.executor.sizing.recommending import Sizing
from envherd.shm.slab import NUM_BINS, bin_middle
from envherd.workers.errors import FactoryError

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError as error:
    raise FactoryError(
        f"--plot failed: expected the package matplotlib, got {error}. pip install 'envherd[media]'"
    ) from error

_BLUE, _ORANGE, _GREY = "#3465a4", "#e07b00", "#888888"


def draw(path: Path, title: str, sizing: Sizing) -> None:
    """Draw two pictures next to each other to a PNG file."""
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{title}: {sizing.advice.setting}", fontsize=12)
    speed, times = figure.subplots(1, 2)
    _draw_speed(speed, sizing)
    _draw_times(times, sizing)
    figure.savefig(path, dpi=110)


def _draw_speed(axes: Any, sizing: Sizing) -> None:
    ran = sorted((one for one in sizing.runs if one.refusal is None), key=lambda one: one.relative)
    colors = [_BLUE if one.setting == sizing.advice.setting else _GREY for one in ran]
    axes.barh([str(one.setting) for one in ran], [one.steps_per_s for one in ran], color=colors)
    axes.set(xlabel="env-steps/s", title="speed")
    axes.grid(alpha=0.3, axis="x")


def _draw_times(axes: Any, sizing: Sizing) -> None:
    measured = sizing.measured
    middles = np.array([bin_middle(index) for index in range(NUM_BINS)]) / 1e9
    was_seen = measured.step_bins > 0
    series = [
        ("steps", middles[was_seen], measured.step_bins[was_seen], _BLUE),
        ("resets", measured.resets_s, np.ones(len(measured.resets_s), np.int64), _ORANGE),
    ]
    everything = np.concatenate([times for _, times, _, _ in series])
    bins = np.geomspace(max(float(everything.min()), 1e-7) * 0.9, float(everything.max()) * 1.1, 50)
    for name, times, counts, color in series:
        shares, label = counts / max(1, counts.sum()), f"{name} ({counts.sum():,})"
        axes.hist(times, bins=bins, weights=shares, color=color, alpha=0.7, label=label)
    axes.axvline(measured.step_p99_s, color=_GREY, linewidth=1, linestyle="--", label="p99 of steps")
    axes.set(xscale="log", xlabel="seconds, as the clock saw them", ylabel="share", title="how long they take")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
