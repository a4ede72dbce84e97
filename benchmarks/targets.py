"""The performance targets, and whether a run met them, as computed from its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks import bounds, ours, peers

Results = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """One target, measured.

    Attributes:
        text: the target.
        measured: the figure with its unit, or why there is none.
        basis: of the measurement.
        status: whether it was met.
    """

    text: str
    measured: str
    basis: str
    status: Literal["met", "not met", "not measured"]


def _verdict(
    text: str, value: float | None, *, is_met: bool, unit: str, basis: str
) -> Verdict:
    if value is None:
        return Verdict(text, unit, basis, "not measured")
    return Verdict(text, f"{value:.3g}{unit}", basis, "met" if is_met else "not met")


def _rows(results: Results, workload: str) -> Mapping[str, Any]:
    return results.get("workloads", {}).get(workload, {}).get("contenders", {})


def _missing(results: Results, workload: str, *names: str) -> str:
    """Return why a figure of some contenders is missing, or an empty string."""
    rows = _rows(results, workload)
    if not rows:
        return f"{workload} was not run"
    for name in names:
        if rows.get(name, {}).get("status", "not run") != "measured":
            return f"{name}: {rows.get(name, {}).get('status', 'not run')}"
        if rows[name].get("episodes") == 0:
            return f"{name}: no episode ended"
    return ""


def ratio_of(
    results: Results, workload: str, mine: str, theirs: str, *, by: str
) -> float | None:
    """Return one contender's throughput as a multiple of another's in a workload; None if unknown.

    Args:
        results: of a run.
        workload: its name.
        mine: one contender.
        theirs: the other.
        by: "wall_ratio" or "cpu_ratio", which are kept as ratios to the workload's reference.
    """
    rows = _rows(results, workload)
    values = [rows.get(name, {}).get(by) for name in (mine, theirs)]
    if values[0] is None or values[1] is None:
        return None
    return float(values[1][1] / values[0][1])


def _faster(
    results: Results,
    workload: str,
    peer: str,
    least: float,
    *,
    mine: str = ours.OURS,
    wall_only: bool = False,
) -> Verdict:
    text = f"{workload}: {mine} at least {least:.3g} times {peer}"
    missing = _missing(results, workload, mine, peer)
    if missing:
        return Verdict(text, missing, "", "not measured")
    value, basis = (
        ratio_of(results, workload, mine, peer, by="wall_ratio"),
        "wall clock",
    )
    if value is None and wall_only:
        return Verdict(
            text, "too few slots without others' load", "wall clock", "not measured"
        )
    if value is None:
        value, basis = ratio_of(results, workload, mine, peer, by="cpu_ratio"), "CPU"
    return _verdict(
        text,
        value,
        is_met=value is not None and value >= least,
        unit=" times",
        basis=basis,
    )


def _of_ideal(
    results: Results, workload: str, least: float, *, mine: str = ours.OURS
) -> Verdict:
    verdict = _faster(results, workload, bounds.IDEAL, least, mine=mine)
    text = f"{workload}: {mine} at least {least:g} of the measured ideal"
    return Verdict(
        text,
        verdict.measured.replace(" times", " of it"),
        verdict.basis,
        verdict.status,
    )


def _median_us(results: Results, workload: str, mine: str) -> float:
    return float(_rows(results, workload)[mine]["batch_us"][1])


def _batch(results: Results, workload: str, mine: str, limit_us: float) -> Verdict:
    text = f"{workload}: {mine} at most {limit_us:g} µs per batch"
    return _figure(
        text,
        limit_us,
        " µs",
        lambda: _median_us(results, workload, mine),
        basis="wall clock",
    )


def _per_env(results: Results, limit_us: float) -> Verdict:
    text = f"each further env that costs nothing at most {limit_us:g} µs per batch (8 to 32 envs)"

    def slope() -> float:
        return (
            _median_us(results, "tiny32", ours.AUTO)
            - _median_us(results, "tiny", ours.AUTO)
        ) / 24

    return _figure(text, limit_us, " µs", slope, basis="wall clock")


def _figure(
    text: str,
    limit: float,
    unit: str,
    get: Callable[[], float],
    *,
    basis: str,
) -> Verdict:
    """Return the verdict on a figure with an upper limit."""
    try:
        value = get()
    except (KeyError, TypeError, IndexError):
        return Verdict(text, "not run", basis, "not measured")
    return _verdict(text, value, is_met=value <= limit, unit=unit, basis=basis)


def judge(results: Results) -> list[Verdict]:
    """Return the verdict on every target."""
    cheap = [
        _faster(results, "tiny", peer, least, mine=ours.AUTO)
        for peer, least in (
            (peers.GYMNASIUM_ASYNC, 25),
            (peers.SB3_SUBPROC, 25),
            (peers.TIANSHOU, 25),
            (peers.TORCHRL_PARALLEL, 140),
        )
    ]
    batches = (
        ("tiny", ours.AUTO, 8),
        ("tiny", ours.OURS, 13),
        ("tiny32", ours.AUTO, 20),
        ("image", ours.AUTO, 12),
    )
    images = (
        (peers.GYMNASIUM_ASYNC, 10),
        (peers.SB3_SUBPROC, 12),
        (peers.TORCHRL_PARALLEL, 40),
    )
    steady = ((peers.GYMNASIUM_ASYNC, 1.3), (peers.TORCHRL_PARALLEL, 2))
    cartpole = (
        (peers.GYMNASIUM_ASYNC, 7),
        (peers.SB3_SUBPROC, 7),
        (peers.TORCHRL_PARALLEL, 60),
        (peers.ENVPOOL, 1 / 0.85),
    )
    tails = [
        verdict
        for workload in ("lognormal", "spikes")
        for verdict in (
            _of_ideal(results, workload, 0.8, mine=ours.FIRST_K),
            _faster(
                results,
                workload,
                peers.GYMNASIUM_ASYNC,
                1.8,
                mine=ours.FIRST_K,
                wall_only=True,
            ),
            _faster(
                results,
                workload,
                peers.SB3_SUBPROC,
                1.8,
                mine=ours.FIRST_K,
                wall_only=True,
            ),
        )
    ]
    harvest = "commons_harvest"
    facades = (
        (ours.AS_GYMNASIUM, peers.GYMNASIUM_ASYNC, 8),
        (ours.AS_SB3, peers.SB3_SUBPROC, 8),
        (ours.AS_TORCHRL, peers.TORCHRL_PARALLEL, 20),
    )
    return [
        *cheap,
        *(
            _batch(results, workload, mine, limit_us)
            for workload, mine, limit_us in batches
        ),
        _per_env(results, 0.3),
        *(
            _faster(results, "image", peer, least, mine=ours.AUTO)
            for peer, least in images
        ),
        *(_faster(results, "w200", peer, least) for peer, least in steady),
        *(_faster(results, "cartpole", peer, least) for peer, least in cartpole),
        *(
            _faster(results, "cartpole", peer, least, mine=facade)
            for facade, peer, least in facades
        ),
        _of_ideal(results, "w200", 0.95),
        _of_ideal(results, "w1000", 0.97),
        *tails,
        _faster(
            results,
            harvest,
            peers.TORCHRL_PARALLEL,
            3,
            mine=ours.FIRST_K,
            wall_only=True,
        ),
        _faster(results, harvest, ours.OURS, 1.4, mine=ours.FIRST_K, wall_only=True),
        _faster(results, harvest, peers.TORCHRL_PARALLEL, 2),
    ]
