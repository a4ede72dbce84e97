"""`envherd list`: prints the names of the installed envs."""

from typing import Annotated

import typer


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
    from envherd.executor.cli.options import EXIT_FAILED, EXIT_USAGE
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
