"""`envherd size ENV`: measures settings of an env on this machine and recommends one, with reasons."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from envherd.executor.cli.exit_codes import EXIT_INTERRUPTED
from envherd.executor.cli.option_values import Env, EnvKwargs, Quiet, picture, read_keyword_arguments, text_file


def size(  # noqa: PLR0913  # the command line's options, read by typer
    env: Env,
    *,
    envs: Annotated[int | None, typer.Option(min=1, help="Fix the number of envs; default: chosen.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Fix the number of workers; default: chosen.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Plan for the nodes of a Ray cluster: HOST:PORT of its head, or auto."),
    ] = None,
    policy_ms: Annotated[float, typer.Option(min=0.0, help="Milliseconds that the policy takes per batch.")] = 0.0,
    target_steps_per_s: Annotated[
        float | None, typer.Option(min=0.0, help="Recommend the smallest setting with this many env-steps per second.")
    ] = None,
    episode_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of an episode; default: measured. Set it for very long episodes.")
    ] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="Plan for a machine with this many cores.")] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Plan for this much available memory, e.g. 256GiB.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(metavar="SIZE", help="Plan for a GPU with this much memory.")] = None,
    budget: Annotated[float, typer.Option(min=0.5, help="Maximum seconds of the measurement.")] = 20.0,
    probe_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory limit of the measurement (default: most of the available memory)."),
    ] = None,
    headroom: Annotated[float, typer.Option(min=0.0, max=0.9, help="Share of the memory to leave free.")] = 0.2,
    verify: Annotated[bool, typer.Option("--verify", hidden=True)] = False,
    env_kwargs: EnvKwargs = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="PATH", callback=picture(".png"), help="Write a chart (PNG).")
    ] = None,
    json: Annotated[
        str | None, typer.Option(metavar="PATH", callback=text_file, help="Write the report as JSON; - prints it.")
    ] = None,
    yaml: Annotated[
        str | None, typer.Option(metavar="PATH", callback=text_file, help="Write the setting as YAML; - prints it.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Run settings of ENV on this machine and recommend workers, envs and a way to step them, with reasons.

    The recommendation considers CPU affinity, CPU quota, memory limit, open files and the current load.
    """
    # Imported here, so that `--help` does not wait for torch.
    from rich.console import Console

    try:
        with Console(stderr=True, quiet=quiet).status("starting"), quick_imports():
            from envherd.executor.cli.sizing import SizeRequest, run
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None

    request = SizeRequest(
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
        env_kwargs=read_keyword_arguments(env_kwargs),
        has_verify=verify,
        plot=plot,
        json_path=json,
        yaml_path=yaml,
        is_quiet=quiet,
    )
    raise typer.Exit(run(request))


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Keep imported objects out of garbage collection: imports take a fifth less time, and the exit a second less."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
