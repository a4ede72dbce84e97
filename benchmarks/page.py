"""Write docs/reports/benchmarks.md, its pictures and the README's table, from the results only.

python -m benchmarks.page --write      # from benchmarks/results/bench.json

Limits: works only in a checkout; an installed package has no page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT, ours, peers
from benchmarks.parts import write_part
from benchmarks.report import Sheet, sheet_of_workload, spread, to_markdown
from benchmarks.targets import ratio_of

RESULTS = ROOT / "benchmarks/results/bench.json"
#: Path of the page, from the root of the repository.
PAGE, PICTURES, README = (
    Path("docs/reports/benchmarks.md"),
    Path("docs/images"),
    Path("README.md"),
)

#: Workload -> its name in the summary.
_TITLES = {
    "tiny": "no-op envs, 4 floats",
    "image": "no-op envs, 84x84x4 bytes",
    "w200": "200 µs a step",
    "cartpole": "CartPole, episodes of about nine steps",
    "spikes": "200 µs, 1 % of steps x 100 (envherd: first-K)",
    "commons_harvest": "Melting Pot commons_harvest, with resets (envherd: first-K)",
}
#: Workloads of the README: synchronous steps, of one run on one machine. It has only the first three of `_OTHERS`.
_README_WORKLOADS = ("w200", "cartpole")
_OTHERS = (
    peers.GYMNASIUM_ASYNC,
    peers.SB3_SUBPROC,
    peers.TORCHRL_PARALLEL,
    peers.TIANSHOU,
    peers.PUFFERLIB,
)
_FACADES = (
    (peers.GYMNASIUM_ASYNC, ours.AS_GYMNASIUM),
    (peers.GYMNASIUM_ASYNC, ours.AS_GYMNASIUM_WIDE),
    (peers.SB3_SUBPROC, ours.AS_SB3),
    (peers.SB3_SUBPROC, ours.AS_SB3_WIDE),
    (peers.TORCHRL_PARALLEL, ours.AS_TORCHRL),
)
_ON_OTHERS = """\
The other libraries use one process per env; PufferLib, which polls, leaves the caller a core. envherd uses one worker
per core (for no-op envs one worker in total, which is what `num_workers="auto"` chooses). Median and quartiles over the
rounds."""
_ON_FACADES = """\
The next table compares the facades with the classes that they replace, for 8 CartPoles with episodes of about nine
steps. They use one worker, as `envherd size` recommends for envs this cheap, unless the row names another number."""

_MACHINE = (
    "Written by `make bench`; do not edit. "
    "How to run and read them: [benchmarks/README.md](../../benchmarks/README.md).\n\n"
    "**Machine.** {cpu}, {usable_cores} usable cores, Linux {kernel}, Python {python}; "
    "{packages}. Measured {dates}."
)
_METHOD = """\
**Method.** All pools of a table were alive at the same time, each under a separate process, and took
turns in random order in slots of {slot} s; what is compared is always the ratio within a round (for
work in lumps, such as resets, all rounds together). *By CPU* is CPU time of all processes together
per env step, from the scheduler's own accounts: it hardly depends on other load, and is the figure to trust on a
shared machine. *By wall clock* is throughput, and counts only slots that passed the gate: a probe that runs around each
slot was delayed for less than a tenth of its time, and others used less than a tenth of the machine. The *measured
ideal* is as many processes as cores that step the same envs and do not wait. Work is a fixed number of
instructions. If other programs run, wall-clock time favours pools of many processes, because the scheduler shares
processors among processes.
"""


def render(results: Mapping[str, Any]) -> str:
    """Return the page of results, as `suite` writes them."""
    machine = results["machine"]
    packages = ", ".join(
        f"{name} {version}" for name, version in machine["packages"].items() if version
    )
    dates = dict.fromkeys(
        workload.get("date", "earlier") for workload in results["workloads"].values()
    )
    parts = [
        "# Benchmarks",
        f"How many times as fast as other libraries envherd steps 8 envs on {machine['usable_cores']} cores:",
        _summary(results),
        "## Compared with other libraries",
        _ON_OTHERS,
        to_markdown(sheet_of_others(results)),
        _ON_FACADES,
        to_markdown(sheet_of_facades(results)),
        "[What limits the speed](performance.md) shows where the rest of the time goes.",
        "## Workloads",
        *(
            f"### {name}: {sheet.title}\n\n{to_markdown(sheet)}"
            for name, one in results.get("workloads", {}).items()
            for sheet in [sheet_of_workload(one)]
        ),
        "## How it was measured",
        _MACHINE.format(**{**machine, "packages": packages, "dates": ", ".join(dates)}),
        _METHOD.format(slot=_slots(results)).strip(),
        _gate_text(results),
    ]
    failed = results.get("failed", {})
    if failed:
        parts += [
            "## Not measured",
            "\n".join(f"- {name}: {why}" for name, why in failed.items()),
        ]
    return "\n\n".join(parts) + "\n"


def _summary(results: Mapping[str, Any]) -> str:
    """Return a line for each workload: how many times as fast envherd is, or how much less CPU time it takes."""
    lines: dict[str, list[str]] = {}
    for title, other, _, _, faster, less_cpu in sheet_of_others(results).rows:
        by_cpu = less_cpu.replace("x ", "x by CPU time ")
        lines.setdefault(title, []).append(
            f"{other} {by_cpu if faster == '-' else faster}"
        )
    return "\n".join(
        f"- **{title}**: {', '.join(ratios)}." for title, ratios in lines.items()
    )


def _slots(results: Mapping[str, Any]) -> str:
    seconds = sorted(
        {one["plan"]["slot_s"] for one in results.get("workloads", {}).values()}
    )
    return " or ".join(f"{one:g}" for one in seconds) or "no"


def _gate_text(results: Mapping[str, Any]) -> str:
    """Return a text on how quiet the machine was."""
    rows = [
        row
        for one in results.get("workloads", {}).values()
        for row in one["contenders"].values()
        if row["status"] == "measured"
    ]
    if not rows:
        return "No workload was run."
    slots, noisy = (
        sum(row["rounds"] for row in rows),
        sum(row["noisy_slots"] for row in rows),
    )
    thrown = sum(sum(row["discarded"].values()) for row in rows)
    rests = [
        one["pressure_at_rest"]
        for one in results["workloads"].values()
        if one["pressure_at_rest"] is not None
    ]
    text = (
        f"**How quiet it was.** Of {slots} slots that were kept, {slots - noisy} passed the gate; {thrown} tries "
        f"did not."
    )
    if rests:
        text += f" While no workload ran, a process waited for a processor for at most {max(rests):.0%} of the time."
    if slots == noisy:
        return (
            f"{text} **The gate never opened: only the figures by CPU are published.**"
        )
    return text


def sheet_of_others(
    results: Mapping[str, Any],
    workloads: Sequence[str] = tuple(_TITLES),
    others: Sequence[str] = _OTHERS,
) -> Sheet:
    """Return the summary: envherd compared with other libraries' executors, for the workloads of most interest."""
    columns = (
        "8 envs",
        "compared with",
        "its µs per batch",
        "envherd's",
        "faster",
        "less CPU",
    )
    rows = []
    for workload in workloads:
        found = results.get("workloads", {}).get(workload, {})
        table = found.get("contenders", {})
        mine = table.get(found.get("reference"), {})
        for name in others:
            theirs = table.get(name, {})
            if theirs.get("status") == mine.get("status") == "measured":
                # Of 8 env steps, to compare executors that step fewer at a time.
                us = [f"{8e6 / one['steps_per_s']:,.0f}" for one in (theirs, mine)]
                ratios = [spread(theirs.get(f"{by}_ratio")) for by in ("wall", "cpu")]
                rows.append([_TITLES[workload], name, *us, *ratios])
    return Sheet("", columns, rows)


def sheet_of_facades(results: Mapping[str, Any]) -> Sheet:
    """Return the table of facades: each compared with the class that it replaces."""
    columns = ("", "its µs per batch", "envherd's", "faster", "less CPU")
    table = results.get("workloads", {}).get("cartpole", {}).get("contenders", {})
    rows = []
    for theirs, mine in _FACADES:
        if (
            table.get(theirs, {}).get("status")
            == table.get(mine, {}).get("status")
            == "measured"
        ):
            us = [f"{table[name]['batch_us'][1]:,.0f}" for name in (theirs, mine)]
            ratios = [
                ratio_of(results, "cartpole", mine, theirs, by=f"{by}_ratio")
                for by in ("wall", "cpu")
            ]
            rows.append(
                [
                    f"{mine}: {theirs}",
                    *us,
                    *("-" if one is None else f"{one:.1f}x" for one in ratios),
                ]
            )
    return Sheet("", columns, rows)


def write(results: Mapping[str, Any], root: Path) -> list[Path]:
    """Write the page, its pictures and the README's table below a repository's root; return their paths."""
    from benchmarks.plots import draw_all

    pictures = draw_all(results, root / PICTURES)
    page = root / PAGE
    page.write_text(render(results))
    short = to_markdown(sheet_of_others(results, _README_WORKLOADS, _OTHERS[:3]))
    write_part(root / README, "python -m benchmarks", short.split("\n"))
    return [page, root / README, *pictures]


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write the page, its pictures and the README's table",
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text())
    if arguments.write:
        print(*write(results, ROOT), sep="\n")
    else:
        print(render(results))


if __name__ == "__main__":
    main()
