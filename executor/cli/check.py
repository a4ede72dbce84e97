"""`envherd check ENV`: checks each rule of the partial-reset contract on an env."""

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
        typer.Option("--random", help="Skip the comparisons of two runs, for envs that seeds do not determine."),
    ] = False,
    env_kwargs: EnvKwargs = None,
) -> None:
    """Run an env with random actions and check the rules that training relies on.

    The command builds and steps the env in this process, as a worker would. The exit code is 1 if a rule is broken or
    no episode ended.
    """
    from envherd.executor.cli.checking import run

    raise typer.Exit(
        run(env, num_steps=steps, seed=seed, is_deterministic=not random, kwargs=read_keyword_arguments(env_kwargs))
    )
