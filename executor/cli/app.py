"""The commands, put together."""

from __future__ import annotations

import typer

from envherd.executor.cli.bench import bench
from envherd.executor.cli.doctor import doctor
from envherd.executor.cli.rollout import rollout
from envherd.executor.cli.size import size
from envherd.executor.cli.top import top

app = typer.Typer(
    name="envherd",
    help="Run reinforcement-learning envs in parallel worker processes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(rollout)
app.command()(size)
app.command()(top)
app.command()(doctor)
app.command()(bench)
