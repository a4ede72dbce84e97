"""`envherd record ENV`: writes a film of one env that a policy controls: a video, an animation, a player's path."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from envherd.executor.cli.exit_codes import EXIT_INTERRUPTED
from envherd.executor.cli.option_values import (
    Env,
    EnvKwargs,
    Gif,
    MaxSteps,
    Policy,
    Quiet,
    Seed,
    picture,
    read_keyword_arguments,
)

if TYPE_CHECKING:
    import numpy as np

    from envherd.executor.cli.commands import Made

#: Most frames of a GIF; longer films keep only every second, fourth, ... step.
_GIF_FRAMES = 240
#: Longest side of a frame of a GIF.
_GIF_PX = 1600


@dataclass(frozen=True, kw_only=True)
class Record:
    """Record a video (MP4, GIF) of one env.

    After Ctrl-C, the video has the steps until then.
    """

    env: Env
    mp4: Annotated[Path | None, typer.Option(metavar="PATH", callback=picture(".mp4"), help="Write a video (MP4).")] = (
        None
    )
    gif: Gif = None
    timeline: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            callback=picture(".png"),
            help="Write a PNG of the path and the rewards of the agent of --agent (default: 0).",
        ),
    ] = None
    views: Annotated[
        bool, typer.Option("--views", help="Show the world and the observation of each agent, with the returns so far.")
    ] = False
    policy: Policy = None
    episodes: Annotated[int, typer.Option(min=1, help="Stop after this number of episodes.")] = 1
    steps: Annotated[int, typer.Option(min=1, help="Stop after this number of steps, even within an episode.")] = 1000
    agent: Annotated[
        int | None, typer.Option(min=0, metavar="I", help="Show the observation of agent I; default: the world view.")
    ] = None
    fps: Annotated[float, typer.Option(min=1, max=240, help="Steps per second of video.")] = 20.0
    seed: Seed = None
    max_steps: MaxSteps = None
    env_kwargs: EnvKwargs = None
    quiet: Quiet = False

    def run(self) -> int:
        """Record a film; return the exit code."""
        if self.mp4 is None and self.gif is None and self.timeline is None:
            raise typer.BadParameter("expected --mp4, --gif or --timeline, got none of them.")
        if self.views and self.agent is not None and self.timeline is None:
            raise typer.BadParameter("expected --views or --agent, got both. Leave one out.")
        from envherd.executor.cli.commands import carry_out

        return carry_out(self._prepare, lambda prepared: self._work(*prepared))

    @property
    def _draws_world(self) -> bool:
        return self.agent is None or self.views or self.timeline is not None

    def _prepare(self) -> tuple[Made, Any]:
        """Check the options before the env starts; return its factory, and that of the policy or None."""
        from envherd.executor.cli.commands import make
        from envherd.executor.cli.env_names import callable_at
        from envherd.executor.cli.media import require_matplotlib, require_pillow
        from envherd.executor.show.video import require_imageio
        from envherd.workers.adapters.meltingpot.factory import MeltingPotFactory

        if self.mp4 is not None:
            require_imageio()
        if self.gif is not None:
            require_pillow()
        if self.timeline is not None:
            require_matplotlib()
        kwargs = read_keyword_arguments(self.env_kwargs)
        factory, kwargs = make(self.env, self.max_steps, kwargs, with_frames=self._draws_world)
        if self.timeline is not None and isinstance(factory, MeltingPotFactory):
            factory = replace(factory, positions=True)
        policy = None if self.policy is None else callable_at(self.policy, f"--policy {self.policy}")
        return (factory, kwargs), policy

    def _work(self, made: Made, make_policy: Any) -> int:
        """Step, write, and report; return the exit code."""
        import torch

        from envherd.executor.cli.commands import call_maker, with_display
        from envherd.executor.cli.filming import SingleView, Timeline, Views
        from envherd.executor.options import ExecutorOptions
        from envherd.executor.parallel import ParallelEnv

        console = Console(quiet=self.quiet)
        options = with_display(ExecutorOptions(), is_drawn=self._draws_world)
        factory, kwargs = made
        num_steps = num_episodes = 0
        is_interrupted = False
        with ParallelEnv(1, factory, seed=self.seed, env_kwargs=kwargs or None, options=options) as env:
            film = Views(env) if self.views else SingleView(env, self.agent)
            timeline = None if self.timeline is None else Timeline(env, self.agent or 0)
            act = env.rand_action if make_policy is None else call_maker(make_policy, env)
            root = env.reset()
            first = film.look(root)
            with contextlib.ExitStack() as stack, console.status("recording"), torch.no_grad():
                add = self._writers(stack)
                add(first)
                if timeline is not None:
                    timeline.start(root)
                try:
                    while num_steps < self.steps and num_episodes < self.episodes:
                        td = env.step(act(root))
                        add(film.look(td["next"], is_root=False))
                        if timeline is not None:
                            timeline.add(td["next"])
                        num_steps += 1
                        ended = bool(td["next", "done"].any())
                        num_episodes += ended
                        root = env.reset() if ended else env.current()
                except KeyboardInterrupt:
                    is_interrupted = True
            if timeline is not None and self.timeline is not None:
                timeline.write(self.timeline)
            done, size = (
                f"{num_steps} steps, {num_episodes} episodes that ended",
                f", {first.shape[1]}x{first.shape[0]} pixels",
            )
            for path in filter(None, (self.mp4, self.gif, self.timeline)):
                shown = "" if path == self.timeline else size
                console.print(f"{path}: {done}{shown}, seed {env.seed}", soft_wrap=True, highlight=False)
        return EXIT_INTERRUPTED if is_interrupted else 0

    def _writers(self, stack: contextlib.ExitStack) -> Callable[[np.ndarray], None]:
        """Return a function that adds a frame to the requested films; the end of `stack` completes their files."""
        from envherd.executor.cli.media import FrameLog, require_pillow, save_animation
        from envherd.executor.show.video import Video

        video = None if self.mp4 is None else stack.enter_context(Video(self.mp4, self.fps))
        log = FrameLog(self.steps, max_frames=_GIF_FRAMES, num_envs=1, largest_px=_GIF_PX)
        num_frames = 0

        def add(frame: np.ndarray) -> None:
            nonlocal num_frames
            if video is not None:
                video.add(frame)
            if self.gif is not None and log.wants(num_frames):
                log.add(num_frames, [frame])
            num_frames += 1

        def write_gif(path: Path) -> None:
            pictures = [require_pillow().Image.fromarray(frame) for _, (frame,) in log.moments]
            save_animation(path, pictures, frames_per_s=self.fps / log.stride)

        if self.gif is not None:
            stack.callback(write_gif, self.gif)
        return add
