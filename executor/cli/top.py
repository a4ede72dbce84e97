"""`envherd top`: shows what running executors and their workers are doing."""

from __future__ import annotations

from typing import Annotated

import typer


def top(
    *,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON: one object with --once, otherwise one per line.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Refresh interval in seconds.")] = 1.0,
    pid: Annotated[int | None, typer.Option(help="Show only the executors of this process.")] = None,
    stack: Annotated[
        int | None, typer.Option(metavar="WORKER", help="Also show the Python stack of the worker in this row, from 0.")
    ] = None,
) -> None:
    """Watch this user's running executors: speed, load, memory and current command of each worker.

    Keys: up and down select a worker, s shows its Python stack, q quits.
    """
    from envherd.executor.cli.watching import TopRequest, run

    request = TopRequest(is_once=once, is_json=json, interval_s=interval, pid=pid, stack_worker=stack)
    raise typer.Exit(run(request))
