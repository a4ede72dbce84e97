"""Summarise a run as plain data: medians over rounds, ratios within rounds, and wall-clock figures if valid."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.gate import is_judged_by_wall
from benchmarks.ratios import Quartiles, merged_levels, of_totals, per_round
from benchmarks.rounds import Entry, Turn


def summarise(
    entries: Sequence[Entry],
    reference: str,
    *,
    judged_by: str,
    pressure_at_rest: float | None,
) -> dict[str, dict[str, Any]]:
    """Return, per contender, its figures and the reference's throughput as a multiple of its own.

    Args:
        entries: of one run.
        reference: name of the contender in the ratios' numerator.
        judged_by: "rounds" or "totals", see `Workload`.
        pressure_at_rest: see `gate`.

    Returns:
        name -> "status" ("measured", or why not) and, if measured:
        "steps_per_s", "cpu_us_per_step", "parent_cpu_us_per_step": medians over rounds;
        "batch_us": wall microseconds of a call, p10, median and p99, and "batch_levels" (see `ratios.LEVELS`);
        "cpu_ratio", "wall_ratio": quartiles of how many times as good the reference is; None if there is no reference,
        and for the wall if fewer than three rounds were open ("open_rounds").
    """
    by_name = {entry.contender.name: entry for entry in entries}
    base = by_name.get(reference)
    found = {}
    for name, entry in by_name.items():
        if entry.failure or not entry.turns:
            found[name] = {
                "status": entry.failure or "no round",
                "kind": entry.contender.kind,
            }
            continue
        found[name] = _figures(entry)
        if base is not None and not base.failure:
            found[name].update(
                _ratios(base.turns, entry.turns, judged_by, pressure_at_rest)
            )
    return found


def _figures(entry: Entry) -> dict[str, Any]:
    slots = [turn.slot for turn in entry.turns]
    believed = [turn.slot for turn in entry.turns if turn.is_open] or slots
    levels = merged_levels([slot.batch_us for slot in believed])
    return {
        "status": "measured",
        "kind": entry.contender.kind,
        "processes": slots[-1].num_processes,
        "rounds": len(slots),
        "steps_per_s": statistics.median(slot.steps_per_s for slot in believed),
        "cpu_us_per_step": sum(slot.run_ns for slot in slots)
        / 1e3
        / max(1, sum(slot.steps for slot in slots)),
        "parent_cpu_us_per_step": statistics.median(
            slot.parent_run_ns / 1e3 / max(1, slot.steps) for slot in slots
        ),
        "own_delay": sum(slot.delay_ns for slot in slots)
        / max(1, sum(slot.run_ns for slot in slots)),
        "batch_us": [levels[10], levels[50], levels[99]],
        "batch_levels": levels,
        "episodes": sum(slot.episodes for slot in slots)
        if entry.job.has_ends and slots[-1].episodes >= 0
        else None,
        "others": statistics.median(slot.others for slot in slots),
        "probe_delay": statistics.median(turn.delay for turn in entry.turns),
        "noisy_slots": sum(not turn.is_open for turn in entry.turns),
        "discarded": entry.discarded,
        "build_s": entry.build_s,
    }


def _ratios(
    base: Sequence[Turn],
    turns: Sequence[Turn],
    judged_by: str,
    pressure_at_rest: float | None,
) -> dict[str, Any]:
    """Return the reference's throughput divided by a contender's, in CPU time and in wall-clock time."""
    pairs = list(zip(base, turns, strict=False))
    are_open = [one.is_open and other.is_open for one, other in pairs]
    cpu: Quartiles | None
    wall: Quartiles | None
    if judged_by == "totals":
        cpu = of_totals(
            [(one.slot.steps, one.slot.run_ns) for one, _ in pairs],
            [(two.slot.steps, two.slot.run_ns) for _, two in pairs],
        )
        kept = [pair for pair, is_open in zip(pairs, are_open, strict=True) if is_open]
        wall = of_totals(
            [(one.slot.steps, one.slot.wall_ns) for one, _ in kept],
            [(two.slot.steps, two.slot.wall_ns) for _, two in kept],
        )
    else:
        cpu = per_round(
            [other.slot.cpu_us for _, other in pairs],
            [one.slot.cpu_us for one, _ in pairs],
        )
        wall = per_round(
            [one.slot.steps_per_s for one, _ in pairs],
            [other.slot.steps_per_s for _, other in pairs],
            valid=are_open,
        )
    is_published = is_judged_by_wall(sum(are_open), pressure_at_rest)
    return {
        "cpu_ratio": None if cpu is None else list(cpu),
        "wall_ratio": list(wall) if wall is not None and is_published else None,
        "open_rounds": sum(are_open),
    }
