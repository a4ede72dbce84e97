"""The suite's command, `python -m benchmarks`: compares envherd with other libraries on this machine."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from envherd.executor.cli.options import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    new_folder,
    text_file,
)

if TYPE_CHECKING:
    from benchmarks import suite

#: Packages that the suite needs in addition to the dependencies of envherd: name to install -> module.
_NEEDED = {"gymnasium": "gymnasium", "matplotlib": "matplotlib"}


def bench(  # noqa: PLR0913  # the command line's options, read by typer
    *,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Run a few workloads and libraries, within a minute."
        ),
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="A,B,...", help="Run only these workloads (see --list)."),
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B,...",
            help="Run only these libraries; 'none' runs only envherd.",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Rounds of each workload; default: set by the workload."
        ),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            callback=text_file,
            help="File to which results are added (default: ./envherd-bench.json); - prints them and keeps no file.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Skip workloads that the JSON file already has."),
    ] = False,
    plots: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            callback=new_folder,
            help="Write charts (PNG) to this folder.",
        ),
    ] = None,
    render: Annotated[
        bool,
        typer.Option(
            "--render",
            help="Show or plot the results in the JSON file, without measuring.",
        ),
    ] = False,
    listing: Annotated[
        bool, typer.Option("--list", help="List the workloads and the libraries.")
    ] = False,
) -> None:
    """Run envs under envherd and under other libraries in one run, and compare their speed.

    Libraries that are not installed are listed and skipped. --resume continues a run that was stopped.
    """
    _need_packages()
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        # Set before numpy is imported: otherwise numpy's threads would exist when pools fork.
        os.environ.setdefault(variable, "1")
    from benchmarks import suite
    from benchmarks.workloads import PEERS

    is_printed = json == "-"
    console = Console(
        stderr=is_printed, width=None if Console(stderr=is_printed).is_terminal else 180
    )
    if listing:
        _list(console)
        return
    if is_printed and (resume or render):
        _refuse(
            f"expected a file as --json with {'--resume' if resume else '--render'}, got '-'."
        )
    path = (
        None
        if is_printed
        else Path(
            json or ("envherd-bench-quick.json" if quick else "envherd-bench.json")
        )
    )
    request = suite.SuiteRequest(
        names=_known(only, suite.NAMES, "--only"),
        peers=_known(peers, (*PEERS, "none"), "--peers"),
        num_rounds=rounds,
        is_quick=quick,
        is_resumed=resume,
        path=path,
    )
    try:
        results, is_interrupted = (
            _shown(path, console) if render and path else _measured(request, console)
        )
    except ValueError as error:
        _refuse(str(error).removeprefix("bench failed: "))
    if plots is not None and not is_interrupted:
        from benchmarks.plots import draw_all

        for picture in draw_all(results, plots):
            console.print(f"written to {picture}")
    if is_printed:
        typer.echo(suite.as_json(results), nl=False)
    if is_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if results["failed"] and not quick:
        raise typer.Exit(EXIT_FAILED)


def _need_packages() -> None:
    missing = [
        name
        for name, package in _NEEDED.items()
        if importlib.util.find_spec(package) is None
    ]
    if missing:
        _refuse(
            f"expected the packages {', '.join(missing)}, got none. pip install 'envherd[bench]'"
        )


def _refuse(text: str) -> None:
    typer.echo(f"error: bench failed: {text}", err=True)
    raise typer.Exit(EXIT_USAGE)


def _known(
    lists: list[str] | None, known: tuple[str, ...], option: str
) -> tuple[str, ...]:
    """Return the names in comma-separated lists; refuse unknown names."""
    from envherd.workers.errors import closest

    names = [name.strip() for one in lists or () for name in one.split(",")]
    for name in names:
        if name not in known:
            _refuse(
                f"expected {option} to be one of {', '.join(known)}, got {name!r}.{closest(name, [*known])}"
            )
    return tuple(names)


def _list(console: Console) -> None:
    from benchmarks.workloads import ALL, WORKLOADS

    table = Table("name", "what", "minutes", box=None)
    for one in WORKLOADS:
        table.add_row(one.name, one.title, f"{one.minutes:g}")
    console.print(table)
    peers = {one.peer: one.is_installed for one in ALL.values() if one.peer}
    shown = ", ".join(
        name if there else f"{name} (not installed)" for name, there in peers.items()
    )
    console.print(f"libraries (--peers): {shown}")


def _measured(
    request: suite.SuiteRequest, console: Console
) -> tuple[dict[str, Any], bool]:
    """Run the suite; return the results, and whether Ctrl-C ended it."""
    from benchmarks.suite import Suite

    suite = Suite(request, console)
    try:
        return suite.run(), False
    except KeyboardInterrupt:
        kept = (
            f"; the results so far are in {request.path}; --resume continues"
            if request.path
            else ""
        )
        console.print(f"interrupted{kept}")
        return suite.results, True


def _shown(path: Path, console: Console) -> tuple[dict[str, Any], bool]:
    """Print the results in a file; return them and False, in the form of `_measured`."""
    from benchmarks.report import sheet_of_targets, sheet_of_workload, to_rich
    from benchmarks.suite import load

    results = load(path)
    for one in results["workloads"].values():
        console.print(to_rich(sheet_of_workload(one)))
    console.print(to_rich(sheet_of_targets(results)))
    return results, False


if __name__ == "__main__":
    typer.run(bench)
