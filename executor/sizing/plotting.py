"""Pictures of a sizing: speed against workers, memory against envs, how long steps and resets take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envherd.executor.sizing.model import Model, Setting
from envherd.executor.sizing.recommending import Sizing
from envherd.executor.sizing.verifying import Check
from envherd.executor.sizing.words import counted
from envherd.workers.errors import FactoryError

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise FactoryError(
        f"--plot failed: expected the package matplotlib, got {error}. pip install 'envherd[media]'"
    ) from error

_BLUE, _ORANGE, _GREY, _RED = "#3465a4", "#e07b00", "#888888", "#b03030"
_MIB = 2**20
#: Relative difference of two speeds that can be seen.
_SEEN = 0.03


def draw(path: Path, title: str, sizing: Sizing, checks: Sequence[Check] = ()) -> None:
    """Draw three pictures beside each other to a PNG file."""
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    setting = sizing.advice.setting
    head = f"{title}: {counted(setting.num_envs, 'env')} on {counted(setting.num_workers, 'worker')}, {setting.mode}"
    figure.suptitle(head, fontsize=12)
    speed, memory, times = figure.subplots(1, 3)
    model = Model(sizing.measured, sizing.overhead, sizing.machine, policy_s=sizing.advice.prediction.policy_s)
    _draw_speed(speed, model, sizing, checks)
    _draw_memory(memory, model, sizing, checks)
    _draw_times(times, sizing)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_speed(axes: Any, model: Model, sizing: Sizing, checks: Sequence[Check]) -> None:
    setting = sizing.advice.setting
    each = max(1, round(setting.num_envs / setting.num_workers))
    most = max(4, 2 * setting.num_workers, len(model.machine.cpus) + 2)
    counts = sorted({int(count) for count in np.linspace(1, most, min(most, 24))})
    rates = [
        model.predict(Setting(num_envs=count * each, num_workers=count, mode=setting.mode)).steps_per_s
        for count in counts
    ]
    ideal = model.overhead.one_factor / model.busy_s(each)
    axes.plot(counts, [count * ideal for count in counts], "--", color=_GREY, label="ideal: workers never wait")
    label = f"predicted, {counted(each, 'env')} a worker, {setting.mode}"
    axes.plot(counts, rates, "o-", color=_BLUE, markersize=4, label=label)
    axes.plot(
        [setting.num_workers], [sizing.advice.prediction.steps_per_s], "*", color=_BLUE, markersize=16, label="chosen"
    )
    mine = [one for one in checks if one.setting.mode == setting.mode]
    if mine:
        x = [one.setting.num_workers for one in mine]
        axes.plot(x, [one.steps_per_s for one in mine], "x", color=_ORANGE, markersize=9, mew=2, label="measured")
        given = [one.predicted.steps_per_s for one in mine]
        usual = [model.predict(one.setting).steps_per_s for one in mine]
        if not np.allclose(given, usual, rtol=_SEEN):
            axes.plot(x, given, "o", color=_ORANGE, markerfacecolor="none", label="predicted for the resets meanwhile")
    if model.machine.cores <= most:
        axes.axvline(model.machine.cores, color=_RED, linewidth=1, linestyle=":", label="cores")
    axes.set(xlabel="workers", ylabel="env-steps/s", title="speed", xlim=(0, most + 1))
    axes.set_ylim(0, 1.25 * max([*rates, *(one.steps_per_s for one in mine)]))
    axes.legend(fontsize=8, loc="best")
    axes.grid(alpha=0.3)


def _draw_memory(axes: Any, model: Model, sizing: Sizing, checks: Sequence[Check]) -> None:
    advice = sizing.advice
    workers = advice.setting.num_workers
    room = advice.memory_room_bytes
    fitting = advice.most_envs_in_memory
    most = max(2 * advice.setting.num_envs, workers + 4)
    if fitting is not None and fitting < 8 * most:
        most = max(most, int(1.2 * fitting))
    counts = sorted({int(count) for count in np.linspace(workers, most, 24)})
    sizes = [model.memory_bytes(count, workers) / _MIB for count in counts]
    axes.plot(counts, sizes, color=_BLUE, label=f"predicted, {counted(workers, 'worker')}")
    axes.plot(
        [advice.setting.num_envs],
        [advice.prediction.memory_bytes / _MIB],
        "*",
        color=_BLUE,
        markersize=16,
        label="chosen",
    )
    mine = [one for one in checks if one.setting.num_workers == workers]
    if mine:
        x = [one.setting.num_envs for one in mine]
        axes.plot(
            x, [one.memory_bytes / _MIB for one in mine], "x", color=_ORANGE, markersize=9, mew=2, label="measured"
        )
    if room / _MIB < 20 * max(sizes):
        axes.axhline(room / _MIB, color=_RED, linewidth=1.2, label="available")
        axes.set_ylim(0, 1.15 * max(room / _MIB, *sizes))
    else:
        axes.set_ylim(0, 1.3 * max(sizes))
        axes.text(0.98, 0.03, f"available: {room / _MIB:,.0f} MiB", transform=axes.transAxes, ha="right", color=_RED)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="envs", ylabel="MiB of workers and shared memory", title="memory")
    axes.legend(fontsize=8, loc="upper left")
    axes.grid(alpha=0.3)


def _draw_times(axes: Any, sizing: Sizing) -> None:
    measured = sizing.measured
    resets = np.append(measured.reset_samples, measured.first_reset_s)
    series = [("steps", measured.wall_samples, _BLUE), ("resets", resets, _ORANGE)]
    everything = np.concatenate([values for _, values, _ in series if len(values)])
    least, most = max(float(everything.min()), 1e-7), float(everything.max())
    bins = np.geomspace(least * 0.9, most * 1.1, 50)
    for name, values, colour in series:
        share = np.full(len(values), 1 / max(1, len(values)))
        axes.hist(values, bins=bins, weights=share, color=colour, alpha=0.7, label=f"{name} ({len(values):,})")
    axes.axvline(measured.step_p99_s, color=_GREY, linewidth=1, linestyle="--", label="p99 of steps")
    axes.set(xscale="log", xlabel="seconds, as they were seen", ylabel="share", title="how long steps and resets take")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
