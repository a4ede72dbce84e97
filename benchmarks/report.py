"""Results as tables: the same rows for the terminal and for the page."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from benchmarks.bounds import IDEAL
from benchmarks.targets import judge

#: Headers of columns with words; numbers are at the right.
_TEXTS = ("", "8 envs", "compared with", "env", "envs", "chosen", "best")


class Sheet(NamedTuple):
    """A table.

    Attributes:
        title: above it.
        columns: their headings; the first is aligned left.
        rows: text.
        note: below it, or an empty string.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def to_rich(sheet: Sheet) -> Table:
    """Return a table for the terminal."""
    table = Table(
        title=sheet.title,
        title_justify="left",
        caption=sheet.note or None,
        caption_justify="left",
    )
    for index, name in enumerate(sheet.columns):
        table.add_column(name, justify="right" if index else "left", overflow="fold")
    for row in sheet.rows:
        table.add_row(*row, style="bold" if row[0].startswith("envherd") else "")
    return table


def to_markdown(sheet: Sheet) -> str:
    """Return a table for the page."""
    lines = [
        "| " + " | ".join(sheet.columns) + " |",
        "".join("|---" if name in _TEXTS else "|---:" for name in sheet.columns) + "|",
    ]
    lines += [
        "| " + " | ".join(cell.replace("|", "/") for cell in row) + " |"
        for row in sheet.rows
        if row[-1] != "not installed"
    ]
    return "\n".join(lines) + (f"\n\n{sheet.note}" if sheet.note else "")


def sheet_of_workload(workload: Mapping[str, Any]) -> Sheet:
    """Return the table of one workload."""
    reference = workload["reference"]
    us = ("µs/call", "p99 µs/call", "CPU µs/step", "caller's CPU µs/step")
    columns = ("", "processes", "env steps/s", *us, "by CPU", "by wall clock")
    rows = [
        _contender_row(name, row, reference)
        for name, row in workload["contenders"].items()
    ]
    measured = [
        row for row in workload["contenders"].values() if row["status"] == "measured"
    ]
    kept = sum(row["rounds"] for row in measured)
    noisy = sum(row["noisy_slots"] for row in measured)
    thrown = sum(sum(row["discarded"].values()) for row in measured)
    note = (
        f"By CPU, by wall clock: the throughput of the reference ({reference}) divided by that of the row; median and "
        "quartiles. "
        f"{kept} slots kept, {noisy} of them while other programs used the machine; tries that did not pass the "
        f"gate: {thrown}. "
    )
    if not workload["is_complete"]:
        note += "Stopped at its time limit, before all rounds were made. "
    if measured and all(row.get("wall_ratio") is None for row in measured):
        note += "Too few slots passed: no figures by wall-clock time. "
    if workload["has_ends"]:
        ends = {
            name: row["episodes"]
            for name, row in workload["contenders"].items()
            if row.get("episodes") is not None
        }
        note += (
            "Episodes that ended: "
            + ", ".join(f"{name} {count}" for name, count in ends.items())
            + "."
        )
    note += f" Measured {workload['date']}." if "date" in workload else ""
    return Sheet(workload["title"], columns, rows, note.strip())


def _contender_row(name: str, row: Mapping[str, Any], reference: str) -> list[str]:
    if row["status"] != "measured":
        return [name, *[""] * 7, row["status"]]
    _, median, p99 = row["batch_us"]
    return [
        name,
        str(1 + row["processes"]),
        f"{row['steps_per_s']:,.0f}",
        *(
            ["", ""]
            if name == IDEAL
            else [f"{median:,.0f}" if median >= 100 else f"{median:.1f}", f"{p99:,.0f}"]
        ),
        f"{row['cpu_us_per_step']:,.2f}",
        f"{row['parent_cpu_us_per_step']:,.2f}",
        "" if name == reference else spread(row.get("cpu_ratio")),
        "" if name == reference else spread(row.get("wall_ratio")),
    ]


def short(value: float) -> str:
    """Return a ratio with two digits or more."""
    if value < 0.1:
        return f"{value:.2g}"
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def spread(values: Sequence[float] | None) -> str:
    """Return quartiles of a ratio: the median, and the others in brackets."""
    if values is None:
        return "-"
    low, mid, high = (short(value) for value in values)
    return f"{mid}x ({low}-{high})"


def sheet_of_targets(results: Mapping[str, Any], *, has_all: bool = True) -> Sheet:
    """Return every target with its measurement and whether it was met; without `has_all` only measured ones."""
    verdicts = [
        one for one in judge(results) if has_all or not one.measured.endswith("not run")
    ]
    rows = [
        [
            one.text,
            one.measured,
            one.basis,
            "**not met**" if one.status == "not met" else one.status,
        ]
        for one in verdicts
    ]
    return Sheet("Targets", ("target", "measured", "by", ""), rows)
