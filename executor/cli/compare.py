"""`envherd compare ENV`: measures an env under Gymnasium, SB3, TorchRL and envherd, on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from envherd.executor.cli.completion import complete_env
from envherd.executor.cli.option_values import Chart, EnvKwargs, Quiet, read_keyword_arguments, text_file

_ENV_HELP = "gymnasium:ID, meltingpot:SUBSTRATE, or python:MODULE:CALLABLE (a callable that returns a Gymnasium env)."


def compare(  # noqa: PLR0913  # the command line's options, read by typer
    env: Annotated[str, typer.Argument(metavar="ENV", help=_ENV_HELP, show_default=False, autocompletion=complete_env)],
    *,
    envs: Annotated[int, typer.Option(min=1, help="Number of envs.")] = 8,
    workers: Annotated[
        int | None, typer.Option(min=1, help="envherd's worker processes; default: one per usable core.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; in each, all libraries take turns.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.05, help="Seconds per library and round.")] = 1.0,
    env_kwargs: EnvKwargs = None,
    plot: Chart = None,
    json: Annotated[
        str | None, typer.Option(metavar="PATH", callback=text_file, help="Write the figures as JSON; - prints them.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Compare the speed of your env under the installed libraries.

    All libraries run the same number of envs with fixed actions, each in its own process, and take turns.
    """
    from envherd.executor.cli.comparing import CompareRequest, run

    request = CompareRequest(
        env=env,
        num_envs=envs,
        num_workers=workers,
        num_rounds=rounds,
        seconds=seconds,
        env_kwargs=read_keyword_arguments(env_kwargs),
        plot=plot,
        json_path=json,
        is_quiet=quiet,
    )
    raise typer.Exit(run(request))
