"""Results as tables: the same rows for the terminal and for the page."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from benchmarks.bounds import IDEAL
from benchmarks.stages import STAGES
from benchmarks.targets import Verdict, judge

_MB = 1e6


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
    table = Table(title=sheet.title, title_justify="left", caption=sheet.note or None, caption_justify="left")
    for index, name in enumerate(sheet.columns):
        table.add_column(name, justify="right" if index else "left", overflow="fold")
    for row in sheet.rows:
        table.add_row(*row, style="bold" if row[0].startswith("envherd") else "")
    return table


def to_markdown(sheet: Sheet) -> str:
    """Return a table for the page."""
    lines = ["| " + " | ".join(sheet.columns) + " |", "|---" + "|---:" * (len(sheet.columns) - 1) + "|"]
    lines += ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in sheet.rows]
    return "\n".join(lines) + (f"\n\n{sheet.note}" if sheet.note else "")


def sheet_of_workload(workload: Mapping[str, Any]) -> Sheet:
    """Return the table of one workload."""
    reference = workload["reference"]
    columns = ("", "processes", "env steps/s", "us/call", "p99", "CPU us/step", "caller's", "by CPU", "by the clock")
    rows = [_contender_row(name, row, reference) for name, row in workload["contenders"].items()]
    measured = [row for row in workload["contenders"].values() if row["status"] == "measured"]
    kept = sum(row["rounds"] for row in measured)
    noisy = sum(row["noisy_slots"] for row in measured)
    thrown = sum(sum(row["discarded"].values()) for row in measured)
    note = (
        f"by CPU, by the clock: how many times the throughput of each {reference} has, median and quartiles. "
        f"{kept} slots kept, {noisy} of them while others used the machine; {thrown} tries did not pass the gate. "
    )
    if not workload["is_complete"]:
        note += "Stopped at its time limit, before all rounds were made. "
    if measured and all(row.get("wall_ratio") is None for row in measured):
        note += "Too few slots passed: no figures by the clock. "
    if workload["has_ends"]:
        ends = {
            name: row["episodes"] for name, row in workload["contenders"].items() if row.get("episodes") is not None
        }
        note += "Episodes that ended: " + ", ".join(f"{name} {count}" for name, count in ends.items()) + "."
    if "measured_on" in workload:
        note += f" Measured on another machine: {workload['measured_on']}."
    return Sheet(workload["title"], columns, rows, note.strip())


def _contender_row(name: str, row: Mapping[str, Any], reference: str) -> list[str]:
    if row["status"] != "measured":
        return [name, *[""] * 7, row["status"]]
    _, median, p99 = row["batch_us"]
    return [
        name,
        str(1 + row["processes"]),
        f"{row['steps_per_s']:,.0f}",
        *(["", ""] if name == IDEAL else [f"{median:,.0f}" if median >= 100 else f"{median:.1f}", f"{p99:,.0f}"]),
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


def sheets_of_studies(results: Mapping[str, Any]) -> Iterable[Sheet]:
    """Yield the tables of all studies that were run."""
    if "startup" in results:
        yield from _start_up(results["startup"])
    if "waiting" in results:
        yield _waiting(results["waiting"])
    if "growth" in results:
        yield from _growth(results["growth"])
    if "ahead" in results:
        yield from (_ahead(name, found) for name, found in results["ahead"].items())
    if "handout" in results:
        parts = results["handout"]
        rows = [
            [name, f"{parts[key]['median_us']:.2f}", f"{parts[key]['lowest_us']:.2f}"]
            for name, key in (
                ("a batch of 8 envs, 5 leaves under `next`: views of the ring", "views"),
                ("the same in memory of the caller's own", "own"),
                ("4 of 8 envs received and sent on, for each env step (first-K)", "first_k"),
            )
            if key in parts
        ]
        yield Sheet("The caller's share where envs have answered", ("", "us, median", "us, lowest"), rows)
    if "starts" in results:
        yield _starts(results["starts"])
    if "stages" in results:
        yield _stages(results["stages"])


def _start_up(startup: Mapping[str, Any]) -> Iterable[Sheet]:
    columns = (
        "",
        "ready s",
        "with `import torch`",
        "second pool s",
        "close s",
        "USS MB/worker",
        "with `import torch`",
        "PSS MB/worker",
        "PSS MB in all",
    )
    titles = {"tiny": "Start-up, close and memory: 8 workers of a tiny env", "clean_up": "The same: 4 clean_up envs"}
    for env, title in titles.items():
        rows = []
        for name, cases in startup[env].items():
            if cases["status"] != "measured":
                rows.append([name, cases["status"], *[""] * 7])
                continue
            plain, torch = cases["plain"], cases.get("torch", {})
            rows.append(
                [
                    name,
                    f"{plain['ready_s']:.2f}",
                    _or_dash(torch.get("ready_s")),
                    f"{plain['again_s']:.2f}",
                    f"{plain['close_s']:.2f}",
                    f"{plain['uss_per_worker'] / _MB:.1f}",
                    _or_dash(torch.get("uss_per_worker"), _MB),
                    f"{plain['pss_per_worker'] / _MB:.1f}",
                    f"{plain['pss_total'] / _MB:.0f}",
                ]
            )
        note = f"One process takes {startup['env_build_s']:.2f} s to import and build one env." if env == "tiny" else ""
        yield Sheet(title, columns, rows, note)


def _or_dash(value: float | None, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value / scale:.2f}"


def _waiting(waiting: Mapping[str, Any]) -> Sheet:
    gaps = ("5 ms", "50 ms")
    columns = ("", *(f"% of a core per worker, {gap}" for gap in gaps), *(f"CPU us/batch, {gap}" for gap in gaps))
    rows = []
    for name, row in waiting.items():
        if row["status"] != "measured":
            rows.append([name, row["status"], "", "", ""])
            continue
        shares = [f"{row[gap]['worker_share']:.2%}".rstrip("%") for gap in gaps]
        rows.append([name, *shares, *(f"{row[gap]['cpu_us_per_batch']:,.0f}" for gap in gaps)])
    return Sheet("While the policy thinks for 5 or 50 ms after each batch of 8 tiny envs", columns, rows)


def _growth(growth: Mapping[str, Any]) -> Iterable[Sheet]:
    titles = {
        "envs": ("A batch of N tiny envs: a + b N", "b: us per env"),
        "bytes": ("An env step with an observation of B bytes: a + b B", "b: us per 1,000 bytes"),
        "workers": ("A batch of 8 tiny envs on W workers: a + b W", "b: us per worker"),
        "parts": ("W of 32 tiny envs on W workers, received and sent on: a + b W", "b: us per env"),
    }
    for series, (title, slope) in titles.items():
        if series not in growth:
            continue
        scale = 1e3 if series == "bytes" else 1.0
        rows = []
        for name, row in growth[series].items():
            if row["status"] != "measured":
                rows.append([name, row["status"], "", "", "", "", ""])
                continue
            points = ", ".join(f"{x:g}: {y:.1f}" for x, y in zip(row["x"], row["cpu_us"], strict=True))
            (a, b, _), (_, caller_b, _), (wall_a, wall_b, _) = row["cpu_fit"], row["caller_fit"], row["wall_fit"]
            slope_b, slope_caller, slope_wall = (f"{one * scale:.3g}" for one in (b, caller_b, wall_b))
            rows.append([name, points, f"{a:.1f}", slope_b, slope_caller, f"{wall_a:.1f}", slope_wall])
        columns = ("", "CPU us at", "CPU a", f"CPU {slope}", "of it the caller's", "wall a", f"wall {slope}")
        yield Sheet(title, columns, rows)


def _ahead(share: str, found: Mapping[str, Any]) -> Sheet:
    rows = [
        [name, f"{row['batch_s'] * 1e3:.2f}", f"{row['resets']:.0f}", f"{row['resets_ahead']:.0f}"]
        for name, row in found["measured"].items()
    ]
    title = f"Resets of Melting Pot's length in {share} of the times, by envs that wait where a substrate computes"
    note = f"{found['speedup']:.2f} times the steps with resets ahead; the model says {found['modelled']:.2f}."
    return Sheet(title, ("8 envs", "ms per batch", "resets", "of these ready"), rows, note)


def _starts(starts: Mapping[str, Any]) -> Sheet:
    rows = [
        [run, ", ".join(f"{one:.0f}" for one in sorted(found["medians_us"])), *(f"{one:.2f}" for one in _ends(found))]
        for run, found in starts.items()
    ]
    columns = ("4 envs on 2 workers", "medians of the starts, us", "median share", "least share")
    return Sheet("What two serial loops would give, and starts of the executor as a share of that", columns, rows)


def _ends(found: Mapping[str, Any]) -> tuple[float, float]:
    return statistics.median(found["shares"]), min(found["shares"])


def _stages(found: Mapping[str, Any]) -> Sheet:
    shown = ("batch", *STAGES, "waiting, CPU", "worker", "envs")
    rows = [[name, *(_whole(row[key]) for key in shown)] for name, row in found["cases"].items()]
    note = (
        "actions: checked and written; command: given to all workers; TensorDicts: made, while the workers step (after "
        "they did, for first-K); waiting, and processor time in it; noting: who has ended; copying: out of the ring. "
        "worker: what one of them is busy for, and what its envs take of that where nothing else is done. Means of the "
        f"90 % of batches that took least. A python loop of 1,000 additions takes {found['loop_us']:.0f} us here, and "
        f"{found['loop_beside_us']:.0f} while another process runs one too; a copy of 100,000 bytes "
        f"{found['copy_us']:.1f} and {found['copy_beside_us']:.1f}."
    )
    return Sheet("Where the time of a batch of 8 envs goes, us", ("", *shown), rows, note)


def _whole(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def sheet_of_targets(results: Mapping[str, Any], *, has_all: bool = True) -> Sheet:
    """Return every target with its measurement and whether it was met; without `has_all` only measured ones."""
    verdicts = [one for one in judge(results) if has_all or not one.measured.endswith("not run")]
    rows = [[one.text, one.measured, one.basis, _status(one)] for one in verdicts]
    return Sheet("Targets", ("target", "measured", "by", ""), rows)


def _status(verdict: Verdict) -> str:
    return "**not met**" if verdict.status == "not met" else verdict.status
