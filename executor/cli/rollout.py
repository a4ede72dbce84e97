"""`envherd rollout ENV`: run envs with a policy, show how fast they are, and keep pictures and data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_ENV_HELP = (
    "meltingpot:NAME, gymnasium:ID, dm_control:DOMAIN/TASK, pettingzoo:ID-OR-MODULE, torchrl:MODULE:CALLABLE or "
    "python:MODULE:CALLABLE (a callable that returns an env)."
)


def rollout(  # noqa: PLR0913  # the command line's options, read by typer
    env: Annotated[str, typer.Argument(metavar="ENV", help=_ENV_HELP, show_default=False)],
    *,
    envs: Annotated[int, typer.Option(min=1, help="How many envs.")] = 4,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; as many as usable cores if not given.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run on the nodes of a Ray cluster: HOST:PORT of its head, or auto."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each env, over the ends of episodes.")] = 200,
    seed: Annotated[int | None, typer.Option(min=0, help="Root seed; drawn and shown if not given.")] = None,
    policy: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FACTORY", help="FACTORY(env) returns the policy; random actions if not given."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the data: a memory-mapped TensorDict.")] = None,
    gif: Annotated[Path | None, typer.Option(metavar="PATH", help="Draw an animation of all envs.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="PATH", help="Draw a contact sheet.")] = None,
    json: Annotated[str | None, typer.Option(metavar="PATH", help="Write the figures as JSON; - prints them.")] = None,
) -> None:
    """Run envs in parallel and report how fast, how well, and on how much memory.

    Ctrl-C ends it early; what was collected until then is reported and kept.
    """
    # Here rather than above, so that `--help` does not wait for torch.
    from envherd.executor.cli.running import Request, run

    request = Request(
        env=env,
        num_envs=envs,
        num_workers=workers,
        cluster=cluster,
        steps=steps,
        seed=seed,
        policy=policy,
        out=out,
        gif=gif,
        png=png,
        json_path=json,
    )
    raise typer.Exit(run(request))
