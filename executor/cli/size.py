"""`envherd size ENV`: measure an env and say how many of it to run on how many workers, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_ENV_HELP = "As `envherd rollout` takes it, e.g. meltingpot:NAME, gymnasium:ID or python:MODULE:CALLABLE."


def size(  # noqa: PLR0913  # the command line's options, read by typer
    env: Annotated[str, typer.Argument(metavar="ENV", help=_ENV_HELP, show_default=False)],
    *,
    envs: Annotated[int | None, typer.Option(min=1, help="Fix the number of envs; chosen if not given.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Fix the number of workers; chosen if not given.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Plan for the nodes of a Ray cluster: HOST:PORT of its head, or auto."),
    ] = None,
    policy_ms: Annotated[float, typer.Option(min=0.0, help="Milliseconds of the policy for each batch.")] = 0.0,
    target_steps_per_s: Annotated[
        float | None, typer.Option(min=0.0, help="Take the smallest setting that makes X env-steps a second.")
    ] = None,
    episode_steps: Annotated[
        int | None, typer.Option(min=1, help="How long episodes are, where the probe is too short to see one end.")
    ] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="Plan for a machine with that number of cores.")] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Plan for so much available memory, e.g. 256GiB.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(metavar="SIZE", help="Plan for a GPU with so much memory.")] = None,
    budget: Annotated[float, typer.Option(min=0.5, help="Seconds that the probe measures for.")] = 10.0,
    probe_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory that the probe may take; most of what is there.")
    ] = None,
    headroom: Annotated[float, typer.Option(min=0.0, max=0.9, help="Share of the memory to leave alone.")] = 0.2,
    verify: Annotated[bool, typer.Option("--verify", help="Run the choice and its neighbours too.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="PATH", help="Draw it (PNG).")] = None,
    json: Annotated[str | None, typer.Option(metavar="PATH", help="Write it as JSON; - prints it.")] = None,
    yaml: Annotated[str | None, typer.Option(metavar="PATH", help="Write the setting as YAML; - prints it.")] = None,
) -> None:
    """Measure ENV in a probe worker and recommend workers, envs and a way to step them, with reasons.

    The machine is taken as it is now: affinity, CPU quota, memory limit, open files, other load.
    """
    # Here rather than above, so that `--help` does not wait for torch.
    from envherd.executor.cli.sizing import Request, run

    request = Request(
        env=env,
        num_envs=envs,
        num_workers=workers,
        cluster=cluster,
        policy_s=policy_ms / 1e3,
        target_steps_per_s=target_steps_per_s,
        episode_steps=episode_steps,
        cpus=cpus,
        memory=memory,
        gpu=gpu,
        budget_s=budget,
        probe_memory=probe_memory,
        headroom=headroom,
        has_verification=verify,
        plot=plot,
        json_path=json,
        yaml_path=yaml,
    )
    raise typer.Exit(run(request))
