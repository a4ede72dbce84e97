"""`envherd replay DIR`: repeats the actions of a stored rollout and compares the results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from envherd.executor.cli.option_values import Quiet, Workers, picture


def replay(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder that `envherd rollout --out DIR` wrote.", show_default=False)
    ],
    *,
    workers: Workers = None,
    gif: Annotated[
        Path | None,
        typer.Option(metavar="PATH", callback=picture(".gif"), help="Write an animation (GIF) of all envs."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="PATH", callback=picture(".png"), help="Write a contact sheet (PNG).")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Repeat the actions of a stored rollout from the same seed, and compare what the envs return.

    The exit code is 0 if all observations, rewards and flags are equal, and 1 at the first difference.
    """
    from envherd.executor.cli.replaying import Request, run

    raise typer.Exit(run(Request(directory=directory, num_workers=workers, gif=gif, png=png, is_quiet=quiet)))
