"""The typer app `app`, which has every command of `envherd`."""

import inspect
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from envherd.executor.cli.options import (
    EXIT_FAILED,
    EXIT_USAGE,
    Check,
    Command,
    Evaluate,
    Json,
    Rollout,
    Size,
    Top,
    require_number,
    write_json,
)

# ---- listing -----------------------------------------------------------------------------------
# `envherd list`: prints the names of the installed envs.


def list_envs(
    family: Annotated[
        str | None,
        typer.Argument(
            metavar="FAMILY",
            help="meltingpot, gymnasium, dm_control or pettingzoo; default: all.",
        ),
    ] = None,
    part: Annotated[
        str | None,
        typer.Argument(metavar="FILTER", help="Print only names that contain this."),
    ] = None,
) -> None:
    """List the names of installed envs, in the form that `envherd rollout` accepts. No env is built.

    The exit code is 2 if the family is unknown or not installed, and 1 if no name contains FILTER.
    """
    from envherd.workers.adapters.env_names import LISTED, known_names
    from envherd.workers.adapters.named import plug_in_ids
    from envherd.workers.errors import FactoryError, closest

    if family is not None and family not in LISTED:
        typer.echo(
            f"error: list failed: expected one of {', '.join(LISTED)}, got {family!r}.{closest(family, [*LISTED])}",
            err=True,
        )
        raise typer.Exit(EXIT_USAGE)
    is_empty = True
    absent = []
    for one in LISTED if family is None else (family,):
        try:
            names = known_names(one)
        except FactoryError as error:
            # Printed at the end, if no installed family has such a name.
            absent.append(f"error: {error}")
            continue
        if one == "gymnasium":
            names += tuple(
                f"{plug_in}:{env_id}"
                for env_id, plug_in in plug_in_ids().items()
                if env_id not in names
            )
        for name in names:
            if part is None or part.lower() in name.lower():
                typer.echo(f"{one}:{name}")
                is_empty = False
    if is_empty:
        wanted = "names" if part is None else f"names that contain {part!r}"
        typer.echo(
            "\n".join([*absent, f"error: list failed: expected {wanted}, got none."]),
            err=True,
        )
        raise typer.Exit(EXIT_USAGE if family is not None and absent else EXIT_FAILED)


# ---- doctor ------------------------------------------------------------------------------------
# `envherd doctor`: checks the machine and the installation, and suggests fixes.


def doctor(*, json: Json = None) -> None:
    """Check Python, packages, Melting Pot, start methods, shared memory, limits, GPU, and leftovers of crashed runs.

    The exit code is 1 if anything fails, 0 otherwise; warnings do not count.
    """
    # Imported here: they need packages that may be missing.
    from rich.console import Console
    from rich.text import Text

    from envherd.executor.doctor import Finding, examine

    console = Console(stderr=json == "-")
    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    findings: list[Finding] = []
    for finding in examine():
        findings.append(finding)
        console.print(
            Text(f"{finding.level:>4}  ", styles[finding.level])
            .append(f"{finding.name}: ", "bold")
            .append(finding.found, "default"),
            soft_wrap=True,
        )
        if finding.fix and finding.level != "ok":
            console.print(Text(f"      fix: {finding.fix}", "cyan"), soft_wrap=True)
    has_failed = any(finding.level == "fail" for finding in findings)
    write_json(
        json,
        {
            "schema": "envherd.doctor/1",
            "is_ok": not has_failed,
            "findings": [vars(one) for one in findings],
        },
    )
    raise typer.Exit(EXIT_FAILED if has_failed else 0)


# ---- app ---------------------------------------------------------------------------------------


#: Command that is gone, or one and its option -> what to use.
_INSTEAD_OF = {
    **dict.fromkeys(("bench", "compare"), "Run python -m benchmarks in a checkout."),
    "init": "Copy the example of docs/custom_envs.md.",
    "replay": "Step a SerialEnv with the seed and the actions that `rollout --out DIR` has stored, or those of your "
    "program (docs/errors.md).",
    "record": "Run envherd rollout --alone --envs 1 --episodes 1 --steps 1000, with the same options.",
    "check --seed": "Call check_env_contract(..., seed=).",
    "doctor --env": "Use repr(env), env.statistics().path or envherd top.",
    "evaluate --out": "Evaluate task by task, each with --json FILE.",
    "evaluate --plot": "Draw from what --json FILE writes.",
    **dict.fromkeys(
        ("evaluate --videos", "evaluate --filmed"),
        "Run envherd rollout --mp4 FILE with the same seed.",
    ),
    "rollout --cluster": "Use --ray ADDRESS.",
    "rollout --config": "Pass the options on the command line.",
    **dict.fromkeys(
        ("size --cpus", "size --memory", "size --gpu"),
        "Run envherd size on that machine: all speeds are measured.",
    ),
    **dict.fromkeys(("size --plot", "size --yaml"), "Use --json FILE."),
}


class _Commands(TyperGroup):
    """The commands; all take `--json` without a value, which stands for `--json -`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Refuse a command or option that is gone with what to use."""
        command, *options = args
        for name in (command, *(f"{command} {one.split('=')[0]}" for one in options)):
            if name in _INSTEAD_OF:
                ctx.fail(
                    f"{name} failed: there is no such command or option any more. {_INSTEAD_OF[name]}"
                )
        return super().resolve_command(ctx, args)

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
_add(Check)
_add(Size)
app.command("list")(list_envs)
_add(Top)
app.command()(doctor)
