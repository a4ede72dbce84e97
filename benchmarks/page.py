"""docs/benchmarks.md, from the results and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envherd.benchmarks.report import Sheet, sheet_of_targets, sheet_of_workload, sheets_of_studies, to_markdown

#: Where `--write` puts it, from the root of the repository.
PAGE, PICTURES = Path("docs/benchmarks.md"), Path("docs/images")

_HEAD = (
    "Written by `envherd bench --write` (or `make bench`); do not edit. How to run and read them: "
    "[benchmarks/README.md](../benchmarks/README.md)."
)
_MACHINE = "**Machine.** {cpu}, {usable_cores} usable cores, Linux {kernel}, Python {python}; {packages}."
_METHOD = """\
**How it was measured.** All pools of a table were alive at the same time, each under a process of its own, and took
turns in random order in slots of {slot} s; what is compared is always the ratio within a round (for
work that comes in lumps, such as resets, all rounds together). *By CPU* is processor time of all processes together
per env step, from the scheduler's own accounts: it hardly depends on other load, and is the figure to trust on a
shared machine. *By the clock* is throughput, and counts only slots that passed the gate: a probe that runs around each
slot was delayed for less than a tenth of its time, and others used less than a tenth of the machine. The *measured
ideal* is as many processes as cores that step the same envs and wait for nobody. Work is a fixed number of
instructions. On a machine with others on it the clock favours pools of many processes, as the scheduler shares
processors among processes.
"""


def render(results: Mapping[str, Any], pictures: Sequence[str]) -> str:
    """Return the page.

    Args:
        results: as `suite` writes them.
        pictures: their paths, relative to the page.
    """
    machine = results["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if version)
    parts = [
        "# Benchmarks",
        _HEAD,
        _MACHINE.format(**{**machine, "packages": packages}),
        _METHOD.format(slot=_slots(results)).strip(),
        _gate_text(results),
        "## Targets",
        to_markdown(sheet_of_targets(results)),
        *(f"![{Path(path).stem}]({path})" for path in pictures),
        "## Workloads",
        *(_section(sheet_of_workload(one)) for one in results.get("workloads", {}).values()),
        "## Starting, waiting, growing",
        *(_section(sheet) for sheet in sheets_of_studies(results)),
    ]
    failed = results.get("failed", {})
    if failed:
        parts += ["## Not measured", "\n".join(f"- {name}: {why}" for name, why in failed.items())]
    return "\n\n".join(parts) + "\n"


def _section(sheet: Sheet) -> str:
    return f"### {sheet.title}\n\n{to_markdown(sheet)}"


def _slots(results: Mapping[str, Any]) -> str:
    seconds = sorted({one["plan"]["slot_s"] for one in results.get("workloads", {}).values()})
    return " or ".join(f"{one:g}" for one in seconds) or "no"


def _gate_text(results: Mapping[str, Any]) -> str:
    """Say how quiet the machine was."""
    rows = [
        row
        for one in results.get("workloads", {}).values()
        for row in one["contenders"].values()
        if row["status"] == "measured"
    ]
    if not rows:
        return "No workload was run."
    slots, noisy = sum(row["rounds"] for row in rows), sum(row["noisy_slots"] for row in rows)
    thrown = sum(sum(row["discarded"].values()) for row in rows)
    rests = [one["pressure_at_rest"] for one in results["workloads"].values() if one["pressure_at_rest"] is not None]
    text = f"**How quiet it was.** Of {slots} slots that were kept, {slots - noisy} passed the gate; "
    text += f"{thrown} tries did not."
    if rests:
        text += (
            f" Before the workloads, with nothing of ours running, something waited for a processor {min(rests):.0%} "
            f"to {max(rests):.0%} of the time."
        )
    if slots == noisy:
        text += " **The gate never opened: only the figures by CPU are published.**"
    return text


def write(results: Mapping[str, Any], root: Path) -> list[Path]:
    """Write the page and its pictures below a repository's root; return their paths."""
    from envherd.benchmarks.plots import draw_all

    pictures = draw_all(results, root / PICTURES)
    page = root / PAGE
    page.write_text(render(results, [f"images/{path.name}" for path in pictures]))
    return [page, *pictures]
