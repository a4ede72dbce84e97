"""`envherd record ENV`: writes a video of one env that a policy controls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from envherd.executor.cli.option_values import Env, EnvKwargs, MaxSteps, Quiet, picture, read_keyword_arguments


def record(  # noqa: PLR0913  # the command line's options, read by typer
    env: Env,
    *,
    mp4: Annotated[
        Path | None, typer.Option(metavar="PATH", callback=picture(".mp4"), help="Write a video (MP4).")
    ] = None,
    gif: Annotated[
        Path | None, typer.Option(metavar="PATH", callback=picture(".gif"), help="Write an animation (GIF).")
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            callback=picture(".png"),
            help="Write a PNG of the path and the rewards of the agent of --agent (default: 0).",
        ),
    ] = None,
    views: Annotated[
        bool, typer.Option("--views", help="Show the world and the observation of each agent, with the returns so far.")
    ] = False,
    policy: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FACTORY", help="FACTORY(env) returns the policy; default: random actions."),
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Stop after this number of episodes.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Stop after this number of steps, even within an episode.")] = 1000,
    agent: Annotated[
        int | None, typer.Option(min=0, metavar="I", help="Show the observation of agent I; default: the world view.")
    ] = None,
    fps: Annotated[float, typer.Option(min=1, max=240, help="Steps per second of video.")] = 20.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Root seed; default: drawn and printed.")] = None,
    max_steps: MaxSteps = None,
    env_kwargs: EnvKwargs = None,
    quiet: Quiet = False,
) -> None:
    """Record a video (MP4, GIF) of one env.

    After Ctrl-C, the video has the steps until then.
    """
    if mp4 is None and gif is None and timeline is None:
        raise typer.BadParameter("expected --mp4, --gif or --timeline, got none of them.")
    if views and agent is not None and timeline is None:
        raise typer.BadParameter("expected --views or --agent, got both. Leave one out.")
    from envherd.executor.cli.recording import RecordRequest, run

    request = RecordRequest(
        env=env,
        mp4=mp4,
        gif=gif,
        timeline=timeline,
        has_views=views,
        policy=policy,
        num_episodes=episodes,
        num_steps=steps,
        agent=agent,
        fps=fps,
        seed=seed,
        max_steps=max_steps,
        env_kwargs=read_keyword_arguments(env_kwargs),
        is_quiet=quiet,
    )
    raise typer.Exit(run(request))
