"""`envherd replay DIR`: repeats the actions of a stored rollout and compares the results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from envherd.executor.cli.completion import complete_env
from envherd.executor.cli.option_values import EnvKwargs, Quiet, Workers, picture, read_keyword_arguments


def replay(  # noqa: PLR0913  # the command line's options, read by typer
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder that `envherd rollout --out DIR` wrote.", show_default=False)
    ],
    *,
    env: Annotated[
        str | None,
        typer.Option(metavar="ENV", autocompletion=complete_env, help="Run this env, in place of the one in DIR."),
    ] = None,
    env_kwargs: EnvKwargs = None,
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

    The exit code is 0 if all observations, rewards and flags are equal, and 1 at the first difference. DIR runs no
    code: an env that it cannot just look up in an installed package must be named by --env.
    """
    from envherd.executor.cli.replaying import ReplayRequest, run

    request = ReplayRequest(
        directory=directory,
        env=env,
        env_kwargs=None if env_kwargs is None else read_keyword_arguments(env_kwargs),
        num_workers=workers,
        gif=gif,
        png=png,
        is_quiet=quiet,
    )
    raise typer.Exit(run(request))
