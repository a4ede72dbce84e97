"""`envherd check ENV`: whether an env keeps the partial-reset contract, rule by rule."""

from __future__ import annotations

from typing import Annotated

import typer

from envherd.executor.cli.option_values import Env, EnvKwargs, read_keyword_arguments


def check(
    env: Env,
    *,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each of two envs; episodes must end within them.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Root seed of the envs and of random actions.")] = 0,
    random: Annotated[
        bool,
        typer.Option("--random", help="Seeds do not determine what the env does: leave out what compares two runs."),
    ] = False,
    env_kwargs: EnvKwargs = None,
) -> None:
    """Check that an env keeps the rules that training relies on, with random actions.

    The env is built and stepped in this process, as a worker does it. The exit code is 1 if a rule is broken or no
    episode has ended.
    """
    from envherd.executor.cli.checking import run

    raise typer.Exit(
        run(env, num_steps=steps, seed=seed, is_deterministic=not random, kwargs=read_keyword_arguments(env_kwargs))
    )
