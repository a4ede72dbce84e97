"""`envherd evaluate ENV`: plays whole episodes of envs with players, and reports the returns of the players."""

from __future__ import annotations

from typing import Annotated

import typer

from envherd.executor.cli.option_values import (
    Env,
    EnvKwargs,
    MaxSteps,
    Quiet,
    Workers,
    read_keyword_arguments,
    text_file,
)


def evaluate(  # noqa: PLR0913  # the command line's options, read by typer
    env: Env,
    *,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="FACTORY(env) returns the policy of a player, a dict of policies by player and role, or a PerPlayer; "
            "default: random actions.",
        ),
    ] = None,
    background: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY", help="The same for other players, or random; default: the bots of a scenario."
        ),
    ] = None,
    focal: Annotated[
        str | None,
        typer.Option(metavar="I,J,...", help="The focal players; default: those of the scenario, or all."),
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes.")] = 10,
    envs: Annotated[int, typer.Option(min=1, help="Number of envs that play at once.")] = 4,
    workers: Workers = None,
    seed: Annotated[int, typer.Option(min=0, help="Root seed.")] = 0,
    max_steps: MaxSteps = None,
    env_kwargs: EnvKwargs = None,
    json: Annotated[
        str | None, typer.Option(metavar="PATH", callback=text_file, help="Write the results as JSON; - prints them.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Evaluate policies: per-capita, collective and per-role returns, and equality, with 95 % confidence intervals."""
    from envherd.executor.cli.evaluating import EvaluateRequest, run

    request = EvaluateRequest(
        env=env,
        policy=policy,
        background=background,
        focal=focal,
        num_episodes=episodes,
        num_envs=envs,
        num_workers=workers,
        seed=seed,
        max_steps=max_steps,
        env_kwargs=read_keyword_arguments(env_kwargs),
        json_path=json,
        is_quiet=quiet,
    )
    raise typer.Exit(run(request))
