"""Implements `envherd record`, from its options to its exit code."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from tensordict import TensorDictBase

from envherd.executor.cli.commands import carry_out
from envherd.executor.cli.env_names import callable_at
from envherd.executor.cli.exit_codes import EXIT_INTERRUPTED
from envherd.executor.cli.filming import Gif, Timeline, Views
from envherd.executor.cli.media import require_matplotlib, require_pillow
from envherd.executor.cli.running import Made, call_maker, make, with_display
from envherd.executor.options import ExecutorOptions
from envherd.executor.parallel import ParallelEnv
from envherd.executor.show.camera import Camera
from envherd.executor.show.video import Video, enlarged, require_imageio
from envherd.workers.adapters.meltingpot.factory import MeltingPotFactory


@dataclass(frozen=True, kw_only=True)
class RecordRequest:
    """The options of the command line."""

    env: str
    mp4: Path | None = None
    gif: Path | None = None
    timeline: Path | None = None
    has_views: bool = False
    policy: str | None = None
    num_episodes: int = 1
    num_steps: int = 1000
    agent: int | None = None
    fps: float = 20.0
    seed: int | None = None
    max_steps: int | None = None
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    is_quiet: bool = False

    @property
    def draws_world(self) -> bool:
        """Whether a picture of the world is needed."""
        return self.agent is None or self.has_views or self.timeline is not None


def run(request: RecordRequest) -> int:
    """Record a film; return the exit code. `carry_out` handles errors."""
    return carry_out(lambda: _prepare(request), lambda prepared: _record(request, *prepared))


def _prepare(request: RecordRequest) -> tuple[Made, Any]:
    """Check the options before the env starts; return its factory, and that of the policy or None."""
    if request.mp4 is not None:
        require_imageio()
    if request.gif is not None:
        require_pillow()
    if request.timeline is not None:
        require_matplotlib()
    made = make(request.env, request.max_steps, request.env_kwargs, with_frames=request.draws_world)
    if request.timeline is not None and isinstance(made[0], MeltingPotFactory):
        made = replace(made[0], positions=True), made[1]
    return made, None if request.policy is None else callable_at(request.policy, f"--policy {request.policy}")


def _record(request: RecordRequest, made: Made, maker: Any) -> int:
    """Step, write, and report; return the exit code."""
    console = Console(quiet=request.is_quiet)
    options = with_display(ExecutorOptions(), is_drawn=request.draws_world)
    factory, kwargs = made
    num_steps = num_episodes = 0
    is_interrupted = False
    with ParallelEnv(1, factory, seed=request.seed, env_kwargs=kwargs or None, options=options) as env:
        views = Views(env) if request.has_views else Single(env, request.agent)
        timeline = None if request.timeline is None else Timeline(env, request.agent or 0)
        act = env.rand_action if maker is None else call_maker(maker, env)
        root = env.reset()
        first = views.first(root)
        with contextlib.ExitStack() as stack, console.status("recording"), torch.no_grad():
            films = [stack.enter_context(film) for film in _films(request)]
            _add(films, first)
            if timeline is not None:
                timeline.first(root)
            try:
                while num_steps < request.num_steps and num_episodes < request.num_episodes:
                    td = env.step(act(root))
                    _add(films, views.next(td["next"]))
                    if timeline is not None:
                        timeline.next(td["next"])
                    num_steps += 1
                    ended = bool(td["next", "done"].any())
                    num_episodes += ended
                    root = env.reset() if ended else env.current()
            except KeyboardInterrupt:
                is_interrupted = True
        if timeline is not None and request.timeline is not None:
            timeline.write(request.timeline)
        seed = env.seed
    size = next((f", {film.size[0]}x{film.size[1]} pixels" for film in films), "")
    for path in filter(None, (request.mp4, request.gif, request.timeline)):
        shown = size if path != request.timeline else ""
        console.print(
            f"{path}: {num_steps} steps, {num_episodes} episodes that ended{shown}, seed {seed}",
            soft_wrap=True,
            highlight=False,
        )
    return EXIT_INTERRUPTED if is_interrupted else 0


def _films(request: RecordRequest) -> list[Any]:
    """Return the writers of the requested films."""
    films: list[Any] = []
    for path, kind in ((request.mp4, Video), (request.gif, Gif)):
        if path is not None:
            films.append(kind(path, request.fps))
    return films


def _add(films: list[Any], frame: np.ndarray | None) -> None:
    for film in films:
        film.add(frame)


class Single:
    """One view: of the world, or of one agent."""

    def __init__(self, env: ParallelEnv, agent: int | None) -> None:
        self._camera = Camera(env, agent)

    def first(self, td: TensorDictBase) -> np.ndarray | None:
        """Return the picture of a reset."""
        return enlarged(self._camera.look(td)[0])

    next = first
    """Return the picture of a step."""
