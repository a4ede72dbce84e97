"""`envherd bench`: compares envherd with other libraries on this machine."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from envherd.executor.cli.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE

#: What the suite itself cannot do without, besides what the package needs.
_NEEDED = {"gymnasium": "gymnasium", "matplotlib": "matplotlib"}


def bench(  # noqa: PLR0913  # the command line's options, read by typer
    *,
    quick: Annotated[bool, typer.Option("--quick", help="A few workloads and peers, within a minute.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="WORKLOAD", help="Only this workload (see --list); repeat the option for more."),
    ] = None,
    peers: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Only these peers; 'none' for envherd alone.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds of each workload; default: set by the workload.")
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="File to which results are added (default: ./envherd-bench.json)."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Skip workloads that the JSON file already has.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="DIR", help="Write plots (PNG) to this folder.")] = None,
    render: Annotated[
        bool, typer.Option("--render", help="Measure nothing: show or plot the results in the JSON file.")
    ] = False,
    listing: Annotated[bool, typer.Option("--list", help="List the workloads and the peers.")] = False,
) -> None:
    """Run envs under envherd and under other libraries in one run, and compare their speed.

    Peers that are not installed are listed and skipped. --resume continues a run that was stopped.
    """
    missing = [name for name, package in _NEEDED.items() if importlib.util.find_spec(package) is None]
    if missing:
        _refuse(f"expected the packages {', '.join(missing)}, got none. pip install 'envherd[bench]'")
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(
            variable, "1"
        )  # before numpy is imported: its threads would be there when pools are forked
    from envherd.benchmarks import suite
    from envherd.benchmarks.workloads import PEERS

    console = Console(width=None if Console().is_terminal else 180)
    if listing:
        _list(console)
        return
    path = json or Path("envherd-bench-quick.json" if quick else "envherd-bench.json")
    request = suite.Request(
        names=_known(only or [], suite.NAMES, "--only"),
        peers=_known(peers.split(",") if peers else [], (*PEERS, "none"), "--peers"),
        num_rounds=rounds,
        is_quick=quick,
        is_resumed=resume,
        path=path,
    )
    try:
        results = suite.load(path) if render else suite.Suite(request, console).run()
    except ValueError as error:
        _refuse(str(error).removeprefix("bench failed: "))
    except KeyboardInterrupt:
        console.print(f"interrupted; the results so far are in {path}; --resume continues")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if render:
        _show(console, results)
    if plot is not None:
        from envherd.benchmarks.plots import draw_all

        for picture in draw_all(results, plot):
            console.print(f"written to {picture}")
    if results["failed"] and not quick:
        raise typer.Exit(EXIT_FAILED)


def _refuse(text: str) -> None:
    typer.echo(f"bench failed: {text}", err=True)
    raise typer.Exit(EXIT_USAGE)


def _known(names: list[str], known: tuple[str, ...], option: str) -> tuple[str, ...]:
    """Return the names, all of which must be known."""
    for name in names:
        if name not in known:
            _refuse(f"expected {option} to be one of {', '.join(known)}, got {name!r}.")
    return tuple(names)


def _list(console: Console) -> None:
    from envherd.benchmarks.suite import STUDIES
    from envherd.benchmarks.workloads import ALL, WORKLOADS

    table = Table("name", "what", "minutes, about", box=None)
    for one in WORKLOADS:
        table.add_row(one.name, one.title, f"{one.minutes:g}")
    for name, minutes in STUDIES.items():
        table.add_row(name, "see benchmarks/README.md", f"{minutes:g}")
    console.print(table)
    peers = {one.peer: one.is_installed for one in ALL.values() if one.peer}
    console.print("peers: " + ", ".join(name if there else f"{name} (not installed)" for name, there in peers.items()))


def _show(console: Console, results: dict[str, object]) -> None:
    from envherd.benchmarks.report import sheet_of_targets, sheet_of_workload, sheets_of_studies, to_rich

    workloads = results["workloads"]
    assert isinstance(workloads, dict)
    for one in workloads.values():
        console.print(to_rich(sheet_of_workload(one)))
    for sheet in sheets_of_studies(results):
        console.print(to_rich(sheet))
    console.print(to_rich(sheet_of_targets(results)))
