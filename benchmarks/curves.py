"""Draw learning curves of several seeds: the mean over seeds, and a band from minimum to maximum.

Run: python -m benchmarks.curves PICTURE "LABEL=one.json,two.json,three.json" ... [--line "random actions=5.2"]

The files are those that `examples/meltingpot_ippo.py --checkpoint` writes: lists of (env steps, return per player, s).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

#: Number of points at which curves are compared.
_NUM_POINTS = 200


def on_common_steps(curves: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return env steps `[p]` that all curves have reached, and the return of each there `[k, p]`.

    Args:
        curves: float `[n, 2 or more]` each: env steps, ascending, and returns.
    """
    first, last = max(curve[0, 0] for curve in curves), min(curve[-1, 0] for curve in curves)
    if first >= last:
        raise ValueError(f"curves failed: expected curves that overlap, got steps {first:,.0f} to {last:,.0f}.")
    steps = np.linspace(first, last, _NUM_POINTS)
    return steps, np.stack([np.interp(steps, curve[:, 0], curve[:, 1]) for curve in curves])


def main() -> None:
    """Read the command line and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("curves", nargs="+", help="LABEL=FILE,FILE,...")
    parser.add_argument("--line", help="LABEL=RETURN: a line to compare with")
    parser.add_argument("--title", default="")
    arguments = parser.parse_args()
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for given in arguments.curves:
        label, _, files = given.partition("=")
        curves = [np.asarray(json.loads(Path(file).read_text()), float) for file in files.split(",")]
        steps, returns = on_common_steps(curves)
        (drawn,) = axes.plot(steps, returns.mean(0), label=f"{label}, {len(curves)} seeds")
        axes.fill_between(steps, returns.min(0), returns.max(0), color=drawn.get_color(), alpha=0.2, linewidth=0)
    if arguments.line:
        label, _, value = arguments.line.partition("=")
        axes.axhline(float(value), color="grey", linestyle="--", label=label)
    axes.set(xlabel="env steps", ylabel="return per player", title=arguments.title, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(arguments.picture, dpi=110)


if __name__ == "__main__":
    main()
