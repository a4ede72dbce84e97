"""`envherd record ENV`: writes a film of one env that a policy controls, as a video or an animation."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
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
)

if TYPE_CHECKING:
    import numpy as np
    from tensordict import TensorDictBase

    from envherd.executor.batched import BatchedEnv
    from envherd.executor.cli.env_names import Made

#: Most frames of a GIF; longer films keep only every second, fourth, ... step.
_GIF_FRAMES = 240
#: Longest side of a frame of a GIF, and widest picture of `--views`.
_WIDTH_PX = 1600


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
        if self.mp4 is None and self.gif is None:
            raise typer.BadParameter("expected --mp4 or --gif, got neither.")
        if self.views and self.agent is not None:
            raise typer.BadParameter("expected --views or --agent, got both. Leave one out.")
        from envherd.executor.cli.commands import carry_out

        return carry_out(self._prepare, lambda prepared: self._work(*prepared))

    def _prepare(self) -> tuple[Made, Any]:
        """Check the options before the env starts; return its factory and arguments, and what makes the policy."""
        from envherd.executor.cli.commands import policy_maker
        from envherd.executor.cli.env_names import made_for
        from envherd.executor.cli.media import require_pillow
        from envherd.executor.show.video import require_imageio

        if self.mp4 is not None:
            require_imageio()
        if self.gif is not None or self.views:
            require_pillow()
        made = made_for(self.env, self.env_kwargs, self.max_steps, with_frames=self.agent is None)
        return made, policy_maker(self.policy)

    def _work(self, made: Made, make_policy: Any) -> int:
        """Step, write, and report; return the exit code."""
        import torch

        from envherd.executor.cli.commands import noting_interrupt, started
        from envherd.executor.cli.media import Film, reduced, require_pillow, save_animation
        from envherd.executor.show.video import Video

        console = Console(quiet=self.quiet)
        num_steps = num_episodes = 0
        with started(made, 1, is_drawn=self.agent is None, seed=self.seed) as env:
            views = _Views(env) if self.views else _SingleView(env, self.agent)
            act = env.rand_action if make_policy is None else make_policy(env)
            root = env.reset()
            frame = views.look(root)
            film = Film(_GIF_FRAMES, self.steps)
            with contextlib.ExitStack() as stack, torch.no_grad():
                video = None if self.mp4 is None else stack.enter_context(contextlib.closing(Video(self.mp4, self.fps)))
                stack.enter_context(console.status("recording"))
                pressed = stack.enter_context(noting_interrupt())
                while True:
                    if video is not None:
                        video.add(frame)
                    if self.gif is not None and film.wants(num_steps):
                        film.add(num_steps, reduced(frame, _WIDTH_PX))
                    if pressed or num_steps == self.steps or num_episodes == self.episodes:
                        break
                    td = env.step(act(root))
                    frame = views.look(td["next"], is_root=False)
                    num_steps += 1
                    ended = bool(td["next", "done"].any())
                    num_episodes += ended
                    root = env.reset() if ended else env.current()
            if self.gif is not None:
                pictures = [require_pillow().Image.fromarray(kept) for _, kept in film.moments]
                save_animation(self.gif, pictures, frames_per_s=self.fps / film.stride)
            done = f"{num_steps} steps, {num_episodes} episodes that ended, {frame.shape[1]}x{frame.shape[0]} pixels"
            for path in filter(None, (self.mp4, self.gif)):
                console.print(f"{path}: {done}, seed {env.seed}", soft_wrap=True, highlight=False)
        return EXIT_INTERRUPTED if pressed else 0


class _SingleView:
    """Draws the world (or what `render` returns), or the observation of one agent."""

    def __init__(self, env: BatchedEnv, agent: int | None) -> None:
        from envherd.executor.show.camera import Camera

        self._camera = Camera(env, agent)

    def look(self, td: TensorDictBase, *, is_root: bool = True) -> np.ndarray:  # noqa: ARG002  # `_Views` needs it
        """Return the picture of a reset or of a step, uint8 `[H, W, 3]`."""
        from envherd.executor.show.video import enlarged

        frame = self._camera.look(td)[0]
        assert frame is not None  # `Camera` has refused envs without pictures
        return enlarged(frame)


class _Views:
    """Draws the world and the view of each player in one picture, with the returns so far.

    Raises:
        MediaError: its players observe no pictures.
    """

    def __init__(self, env: BatchedEnv) -> None:
        from envherd.executor.cli.returns import Returns
        from envherd.executor.show.camera import Camera

        self._world, self._players = Camera(env), Camera(env, 0).key
        self._returns = Returns(env.spec, 1)
        names, roles = self._returns.agents, list(env.spec.metadata.get("agent_roles") or ())
        has_roles = len(roles) == len(names) and set(roles) != {"default"}
        self._names = [f"{name} {role}" for name, role in zip(names, roles, strict=True)] if has_roles else names
        self._title = str(env.spec.metadata.get("name") or env.spec.family)
        self._step = 0

    def look(self, td: TensorDictBase, *, is_root: bool = True) -> np.ndarray:
        """Return the picture of a reset or of a step, uint8 `[H, W, 3]`, with the returns including the step."""
        import numpy as np

        from envherd.executor.cli.media import grid

        self._step = 0 if is_root else self._step + 1
        returns = (self._returns.running if is_root else self._returns.add(td))[0]
        caption = f"step {self._step}  sum {returns.sum():.1f}"
        tiles = [(self._title, caption, self._world.look(td)[0])]
        views = td[self._players][0].numpy(force=True)
        tiles += [
            (name, f"return {value:.1f}", view) for name, value, view in zip(self._names, returns, views, strict=True)
        ]
        if not is_root and td["done"].any():
            self._step = 0
        return np.asarray(grid(tiles, width_px=_WIDTH_PX))
