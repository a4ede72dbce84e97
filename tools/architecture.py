"""Write the tables of parts and imports in docs/architecture.md, and its picture.

    python -m tools.architecture --write      # needs envherd[media]

The arrows are the imports that `tests/test_imports.py` finds. Arrows implied by others are left out (transitive
reduction). Only the positions of the boxes are set by hand. A module without a box is an error.
"""

from __future__ import annotations

import argparse
import functools
import graphlib
import hashlib
import re
from collections.abc import Callable
from enum import IntEnum
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from benchmarks.parts import write_part
from envherd.executor.protocol import env_states
from envherd.workers.block import slot
from tests.test_imports import MODULES, ORDERED, ROOT, imported_modules

PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "images" / "architecture.png"
COMMAND = "python -m tools.architecture --write"


class Box(NamedTuple):
    """A part of the program.

    Attributes:
        files: patterns of its files, relative to the checkout. The first box that matches a file has it.
        what: its purpose, in the picture and in the table.
        row: of the picture, from the bottom.
        columns: of the picture, first and last.
    """

    files: tuple[str, ...]
    what: str
    row: int
    columns: tuple[int, int]


#: Label -> box, in the order of the table: from the public API down to the memory.
BOXES = {
    "executor/cli/": Box(("executor/cli/*",), "the commands", 10, (1, 2)),
    "executor/doctor.py": Box(
        ("executor/doctor.py",), "checks of the installation", 9, (4, 4)
    ),
    "executor/show/": Box(
        ("executor/show/*",), "evaluation, videos, loggers", 9, (1, 1)
    ),
    "executor/facades/": Box(
        ("executor/facades/*",), "classes of other libraries", 9, (3, 3)
    ),
    "executor/testing/": Box(
        ("executor/testing/*",), "contract tests for any env", 9, (0, 0)
    ),
    "executor/cluster/": Box(
        ("executor/cluster/*",), "rollouts on the nodes of Ray", 9, (2, 2)
    ),
    "executor/*.py": Box(
        (
            *("executor/__init__.py", "executor/assembly.py", "executor/batched.py"),
            *(
                "executor/parallel.py",
                "executor/serial.py",
                "executor/sizing/*",
                "executor/guests/collectors/*",
            ),
        ),
        "what users call: ParallelEnv, SerialEnv, collectors, sizing; here guests join the kernel",
        8,
        (0, 4),
    ),
    "executor/guests/": Box(
        ("executor/guests/*",),
        "what the kernel does not know: recycling, save, branch, InPython, the portable pool, ...",
        7,
        (0, 4),
    ),
    "executor/{protocol,rollouts}/": Box(
        ("executor/protocol/*", "executor/rollouts/*"),
        "env states, flights, losses, rollouts",
        6,
        (1, 2),
    ),
    "executor/pools/": Box(
        ("executor/pools/*",), "commands and answers of envs", 5, (1, 1)
    ),
    "executor/batches/": Box(
        ("executor/batches/*",), "actions to rows, rows to TensorDicts", 5, (2, 2)
    ),
    "executor/{options,machine,sending,start,processes}": Box(
        (
            *(
                "executor/options.py",
                "executor/keywords.py",
                "executor/progress.py",
                "executor/machine/*",
            ),
            *("executor/sending/*", "executor/start/*", "executor/processes/*"),
        ),
        "options; worker processes: what they get, how they start, how they are watched",
        4,
        (0, 4),
    ),
    "workers/{block,process,guests}/": Box(
        (
            *(
                "workers/block/*",
                "workers/process/*",
                "workers/wrappers/*",
                "workers/build.py",
            ),
            *("workers/native/*", "workers/info_rows.py", "workers/guests/*"),
        ),
        "one worker: its envs, its loop, its start; and its halves of guests",
        3,
        (0, 2),
    ),
    "workers/testing/": Box(("workers/testing/*",), "envs for tests", 3, (3, 3)),
    "workers/adapters/": Box(
        ("workers/adapters/*",), "a folder or file per env family", 2, (1, 2)
    ),
    "workers/*.py": Box(
        ("workers/*",),
        "commands as tables, messages, errors, seeds, writers of rows, what is sent",
        1,
        (1, 2),
    ),
    "shm/": Box(
        ("shm/*",), "specs, layout of bytes, segment, slab, doorbells", 0, (0, 4)
    ),
}
#: Layer -> its rows in the picture, the colour of its area, and the colour of its boxes.
LAYERS = {
    "shm": ((0, 0), "#fdf1dc", "#f6cf8b"),
    "workers": ((1, 3), "#e6f2e6", "#b5dbb5"),
    "executor": ((4, 10), "#e6eef8", "#b4cfec"),
}


@functools.cache
def box_of(module: str) -> str:
    """Return the label of a module's box."""
    file = MODULES[module].relative_to(ROOT).as_posix()
    for label, box in BOXES.items():
        if any(fnmatch(file, pattern) for pattern in box.files):
            return label
    raise KeyError(
        f"{file} has no box: add it to BOXES in tools/architecture.py, then run `{COMMAND}`."
    )


def imported_boxes() -> dict[str, set[str]]:
    """Return the boxes that each box imports, without boxes that these import anyway.

    Raises:
        CycleError: boxes import each other in a circle.
    """
    direct: dict[str, set[str]] = {label: set() for label in BOXES}
    for module in ORDERED:
        label = box_of(module)
        direct[label] |= {
            box_of(other) for other in imported_modules(module) & set(ORDERED)
        } - {label}
    below: dict[str, set[str]] = {}
    for label in graphlib.TopologicalSorter(direct).static_order():
        below[label] = direct[label].union(*(below[other] for other in direct[label]))
    return {
        label: others.difference(*(below[other] for other in others))
        for label, others in direct.items()
    }


def parts_table() -> list[str]:
    """Return the table of parts, as lines of Markdown."""
    imports = imported_boxes()
    order = list(BOXES)
    lines = ["| part | what it is | imports |", "|---|---|---|"]
    for label, box in BOXES.items():
        others = ", ".join(
            f"`{other}`" for other in sorted(imports[label], key=order.index)
        )
        lines.append(f"| `{label}` | {box.what} | {others} |")
    return lines


def states_table(
    module: ModuleType, states: type[IntEnum], events: type[IntEnum]
) -> list[str]:
    """Return a module's `table()` with a column for each state and a row for each event, as lines of Markdown."""
    cells = {}
    for line in module.table().splitlines():
        before, what, after = line.split(None, 2)
        refusal = after.removeprefix("refused: ")
        cells[before, what] = after if refusal == after else f"*{refusal}*"
    lines = ["| event | " + " | ".join(state.name for state in states) + " |"]
    lines.append("|---" * (1 + len(states)) + "|")
    for event in events:
        row = (cells.get((state.name, event.name), "") for state in states)
        lines.append(f"| {event.name} | {' | '.join(row)} |")
    return lines


#: Part of the page -> function that makes its lines.
PARTS: dict[str, Callable[[], list[str]]] = {
    "tools/architecture.py, parts": parts_table,
    "tools/architecture.py, states": partial(
        states_table, env_states, env_states.State, env_states.Event
    ),
    "tools/architecture.py, states in a worker": partial(
        states_table, slot, slot.SlotState, slot.SlotEvent
    ),
}


def hops(section: str) -> list[tuple[str, list[str]]]:
    """Return the hops that a section of the page lists: each file and its named functions."""
    text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = (line for line in text.splitlines() if re.match(r"\d+\. ", line))
    named = (re.findall(r"`([^`]+)`", line.partition(": ")[0]) for line in lines)
    return [(file, functions) for file, *functions in named]


def stepped_boxes() -> set[str]:
    """Return the boxes on the path of a step."""
    return {
        box_of(file.removesuffix(".py").replace("/", "."))
        for file, _ in hops("A step")
        if file.endswith(".py")
    }


def digest() -> str:
    """Return the hash of the picture's content, which is stored in the picture."""
    imports = sorted(
        (label, sorted(others)) for label, others in imported_boxes().items()
    )
    shown = repr((BOXES, LAYERS, imports, sorted(stepped_boxes())))
    return hashlib.sha256(shown.encode()).hexdigest()


_WIDTH, _PITCH, _GAP, _BOX_HEIGHT, _PAD = 300, 86, 20, 56, 14  # pixels
_NO_GAP = {"shrinkA": 0, "shrinkB": 0}
_LONG_NAME = 28  # characters, in a box of one column
_NUM_ROWS = 1 + max(box.row for box in BOXES.values())


def _span(box: Box) -> tuple[float, float]:
    """Return the left and right edge of a box."""
    first, last = box.columns
    return 10 + first * (_WIDTH + _GAP), 10 + (last + 1) * _WIDTH + last * _GAP


def _bottom(box: Box) -> float:
    return 14.0 + box.row * _PITCH + _PAD


def _draw_arrow(axes: Any, source: Box, target: Box) -> None:
    """Draw a vertical arrow between boxes above each other, else one between the closest quarters."""
    (own_left, own_right), (left, right) = _span(source), _span(target)
    begin = end = (max(own_left, left) + min(own_right, right)) / 2
    if own_right <= left:
        begin, end = own_right - _WIDTH / 4, left + _WIDTH / 4
    elif right <= own_left:
        begin, end = own_left + _WIDTH / 4, right - _WIDTH / 4
    style = {
        "arrowstyle": "-|>,head_width=0.28,head_length=0.55",
        "color": "#444444",
        "lw": 1.6,
    } | _NO_GAP
    axes.annotate(
        "",
        (end, _bottom(target) + _BOX_HEIGHT),
        (begin, _bottom(source)),
        arrowprops=style,
        zorder=1,
    )  # behind boxes that it crosses


def _draw_box(axes: Any, label: str, *, is_stepped: bool) -> None:
    from matplotlib.patches import FancyBboxPatch

    box = BOXES[label]
    (left, right), bottom = _span(box), _bottom(box)
    layer, _, name = label.partition("/")
    frame = FancyBboxPatch(
        (left + 4, bottom + 4),
        right - left - 8,
        _BOX_HEIGHT - 8,
        boxstyle="round,pad=4",
        zorder=2,
    )
    frame.set(
        facecolor=LAYERS[layer][2],
        edgecolor="#333333",
        linewidth=3.5 if is_stepped else 1.0,
    )
    axes.add_patch(frame)
    centred: dict[str, Any] = {"ha": "center", "va": "center", "zorder": 3}
    size = 11 if box.columns[0] == box.columns[1] and len(name) > _LONG_NAME else 12
    axes.text(
        (left + right) / 2,
        bottom + 39,
        name or label,
        fontsize=size,
        weight="bold",
        **centred,
    )
    axes.text((left + right) / 2, bottom + 17, box.what, fontsize=11, **centred)


def draw(path: Path) -> None:
    """Draw the picture, 1600 pixels wide."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    height = 14 + _NUM_ROWS * _PITCH + 50
    figure = Figure(figsize=(16, height / 100), dpi=100)
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 1600), ylim=(0, height))
    axes.axis("off")
    title = "An arrow points at what a part imports. Arrows that follow from others are left out. Thick frames: a step."
    axes.text(800, height - 26, title, ha="center", va="center", fontsize=15)
    for name, ((first, last), area, _) in LAYERS.items():
        bottom, top = 14 + first * _PITCH, 8 + (last + 1) * _PITCH
        axes.add_patch(Rectangle((2, bottom), 1596, top - bottom, color=area, zorder=0))
        if first < last:
            axes.text(
                16,
                top - 12,
                name,
                ha="left",
                va="top",
                fontsize=18,
                weight="bold",
                color="#666666",
            )
    for label, others in imported_boxes().items():
        for other in others:
            _draw_arrow(axes, BOXES[label], BOXES[other])
    stepped = stepped_boxes()
    for label in BOXES:
        _draw_box(axes, label, is_stepped=label in stepped)
    canvas.print_png(str(path), metadata={"Comment": digest()})


def main() -> None:
    """Write the picture and the tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--write",
        action="store_true",
        required=True,
        help=f"write {PAGE.name} and {PICTURE.name}",
    )
    parser.parse_args()
    draw(PICTURE)
    for name, make in PARTS.items():
        write_part(PAGE, name, make())


if __name__ == "__main__":
    main()
