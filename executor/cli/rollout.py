"""`envherd rollout ENV`: runs envs with a policy, reports their speed, and writes pictures and data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from envherd.executor.cli.completion import complete_env
from envherd.executor.cli.config import read_config, settings
from envherd.executor.cli.option_values import (
    EnvKwargs,
    MaxSteps,
    Quiet,
    Workers,
    new_folder,
    picture,
    read_keyword_arguments,
    text_file,
)

_ENV_HELP = (
    "meltingpot:NAME, gymnasium:ID, dm_control:DOMAIN/TASK, pettingzoo:ID-OR-MODULE, gymnasium_vec:ID[:ROWS], "
    "envpool:TASK[:ROWS], vmas:SCENARIO[:ROWS], torchrl:MODULE:CALLABLE or python:MODULE:CALLABLE (a callable that "
    "returns an env)."
)


def rollout(  # noqa: PLR0913  # the command line's options, read by typer
    context: typer.Context,
    env: Annotated[str, typer.Argument(metavar="ENV", help=_ENV_HELP, show_default=False, autocompletion=complete_env)],
    *,
    envs: Annotated[int, typer.Option(min=1, help="Number of envs.")] = 4,
    workers: Workers = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run on the nodes of a Ray cluster: HOST:PORT of its head, or auto."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each env; envs whose episode ends are reset.")] = 200,
    seed: Annotated[int | None, typer.Option(min=0, help="Root seed; default: drawn and printed.")] = None,
    policy: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FACTORY", help="FACTORY(env) returns the policy; default: random actions."),
    ] = None,
    max_steps: MaxSteps = None,
    env_kwargs: EnvKwargs = None,
    config: Annotated[  # noqa: ARG001  # its callback has read it
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=read_config,
            is_eager=True,
            help="YAML file with options, e.g. from `envherd size --yaml`.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", callback=new_folder, help="Write the data: a memory-mapped TensorDict."),
    ] = None,
    gif: Annotated[
        Path | None,
        typer.Option(metavar="PATH", callback=picture(".gif"), help="Write an animation (GIF) of all envs."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="PATH", callback=picture(".png"), help="Write a contact sheet (PNG).")
    ] = None,
    json: Annotated[
        str | None, typer.Option(metavar="PATH", callback=text_file, help="Write the figures as JSON; - prints them.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Run envs in parallel and report speed, returns and memory.

    After Ctrl-C, the command reports and writes the steps collected until then.
    """
    # Imported here, so that `--help` does not wait for torch.
    from envherd.executor.cli.running import RolloutRequest, run

    is_serial, options = settings(context)
    source = context.get_parameter_source("workers")
    if source is not None and source.name == "COMMANDLINE":
        is_serial = False  # the command line takes precedence over --config
    request = RolloutRequest(
        is_serial=is_serial,
        options=options,
        max_steps=max_steps,
        env=env,
        num_envs=envs,
        num_workers=workers,
        cluster=cluster,
        steps=steps,
        seed=seed,
        policy=policy,
        env_kwargs=read_keyword_arguments(env_kwargs),
        out=out,
        gif=gif,
        png=png,
        json_path=json,
        is_quiet=quiet,
    )
    raise typer.Exit(run(request))
