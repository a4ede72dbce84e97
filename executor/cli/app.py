"""The typer app `app`, which has every command of `envherd`."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from envherd.executor.cli.bench import bench
from envherd.executor.cli.check import check
from envherd.executor.cli.compare import compare
from envherd.executor.cli.doctor import doctor
from envherd.executor.cli.evaluate import evaluate
from envherd.executor.cli.init import init
from envherd.executor.cli.listing import list_envs
from envherd.executor.cli.record import record
from envherd.executor.cli.replay import replay
from envherd.executor.cli.rollout import rollout
from envherd.executor.cli.size import size
from envherd.executor.cli.top import top

app = typer.Typer(
    name="envherd",
    help="Run reinforcement-learning envs in parallel worker processes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _say_version(is_asked: bool) -> None:  # noqa: FBT001  # typer passes it by position
    if is_asked:
        typer.echo(f"envherd {metadata.version('envherd')}")
        raise typer.Exit


@app.callback()
def _main(
    _version: Annotated[  # noqa: FBT002  # a flag
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Read the options that come before the command."""


app.command()(rollout)
app.command()(evaluate)
app.command()(record)
app.command()(replay)
app.command()(init)
app.command()(check)
app.command()(compare)
app.command()(size)
app.command("list")(list_envs)
app.command()(top)
app.command()(doctor)
app.command()(bench)
