"""The typer app `app`, which has every command of `envherd`."""

import inspect
import shlex
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from envherd.executor.cli.doctor import doctor
from envherd.executor.cli.init import init
from envherd.executor.cli.listing import list_envs
from envherd.executor.cli.options import (
    EXIT_USAGE,
    Check,
    Command,
    Evaluate,
    Replay,
    Rollout,
    Size,
    Top,
    require_number,
)


class _Commands(TyperGroup):
    """The commands; all take `--json` without a value, which stands for `--json -`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Add the value, which typer does not let an option leave out."""
        for at in reversed(range(len(args))):
            is_bare = at + 1 == len(args) or (
                args[at + 1].startswith("-") and args[at + 1] != "-"
            )
            if args[at] == "--json" and is_bare:
                args.insert(at + 1, "-")
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


app = typer.Typer(
    name="envherd",
    cls=_Commands,
    help="Run reinforcement-learning envs in parallel worker processes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _add(kind: type[Command]) -> None:
    """Add the command that a class describes, under the name of the class."""

    def run(**options: Any) -> None:
        for name, value in options.items():
            require_number(name, value)
        raise typer.Exit(kind(**options).run())

    run.__signature__ = inspect.signature(kind, eval_str=True)  # type: ignore[attr-defined]  # typer reads the options
    run.__doc__ = kind.__doc__
    app.command(kind.__name__.lower())(run)


def _say_version(is_asked: bool) -> None:  # noqa: FBT001  # typer passes it by position
    if is_asked:
        typer.echo(f"envherd {metadata.version('envherd')}")
        raise typer.Exit


@app.callback()
def _main(
    _version: Annotated[  # noqa: FBT002  # a flag
        bool,
        typer.Option(
            "--version",
            callback=_say_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    """Read the options that come before the command."""


_add(Rollout)
_add(Evaluate)
_add(Replay)
app.command()(init)
_add(Check)
_add(Size)
app.command("list")(list_envs)
_add(Top)
app.command()(doctor)


@app.command(
    hidden=True,
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
)
def record(ctx: typer.Context) -> None:
    """Print the options of `rollout` that replace this command."""
    # What `record` did without options.
    defaults = ["--alone", "--envs", "1", "--episodes", "1", "--steps", "1000"]
    typer.echo(
        f"error: record failed: expected rollout, which makes videos now, got record. Run\n  "
        f"{shlex.join(['envherd', 'rollout', *defaults, *ctx.args])}",
        err=True,
    )
    raise typer.Exit(EXIT_USAGE)
