"""What `envherd record` does, from its options to its exit code."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from envherd.executor.cli.camera import Camera
from envherd.executor.cli.commands import carry_out
from envherd.executor.cli.env_names import callable_at
from envherd.executor.cli.exit_codes import EXIT_INTERRUPTED
from envherd.executor.cli.media import MediaError
from envherd.executor.cli.running import Made, call_maker, make, with_display
from envherd.executor.options import ExecutorOptions
from envherd.executor.parallel import ParallelEnv

#: Sides of a frame below which pixels are enlarged by a whole factor.
_SMALL_PX = 320


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options, as given."""

    env: str
    mp4: Path
    policy: str | None = None
    num_episodes: int = 1
    num_steps: int = 1000
    agent: int | None = None
    fps: float = 20.0
    seed: int | None = None
    max_steps: int | None = None
    env_kwargs: dict[str, Any] = field(default_factory=dict)


def run(request: Request) -> int:
    """Record a video; return the exit code. Errors are printed, never raised."""
    return carry_out(lambda: _prepare(request), lambda prepared: _record(request, *prepared))


def _prepare(request: Request) -> tuple[Made, Any]:
    """Refuse at once what cannot work; return the factory, and what makes the policy."""
    _require_imageio()
    made = make(request.env, request.max_steps, request.env_kwargs, with_frames=request.agent is None)
    return made, None if request.policy is None else callable_at(request.policy, f"--policy {request.policy}")


def _record(request: Request, made: Made, maker: Any) -> int:
    """Step, write, and report; return the exit code."""
    console = Console()
    options = with_display(ExecutorOptions(), is_drawn=request.agent is None)
    factory, kwargs = made
    num_steps = num_episodes = 0
    is_interrupted = False
    with ParallelEnv(1, factory, seed=request.seed, env_kwargs=kwargs or None, options=options) as env:
        camera = Camera(env, request.agent)
        act = env.rand_action if maker is None else call_maker(maker, env)
        root = env.reset()
        first = camera.look(root)[0]
        request.mp4.parent.mkdir(parents=True, exist_ok=True)
        with Video(request.mp4, request.fps) as video, console.status("recording"), torch.no_grad():
            video.add(first)
            try:
                while num_steps < request.num_steps and num_episodes < request.num_episodes:
                    td = env.step(act(root))
                    video.add(camera.look(td["next"])[0])
                    num_steps += 1
                    ended = bool(td["next", "done"].any())
                    num_episodes += ended
                    root = env.reset() if ended else env.current()
            except KeyboardInterrupt:
                is_interrupted = True
        seed = env.seed
    size = "x".join(map(str, video.size))
    console.print(
        f"{request.mp4}: {num_steps} steps, {num_episodes} episodes that ended, {size} pixels, seed {seed}",
        soft_wrap=True,
        highlight=False,
    )
    return EXIT_INTERRUPTED if is_interrupted else 0


class Video:
    """Writes frames to an MP4 file, one by one.

    Attributes:
        size: width and height, once the first frame is there.
    """

    def __init__(self, path: Path, fps: float) -> None:
        self._writer = _require_imageio().get_writer(
            path, format="FFMPEG", mode="I", fps=fps, codec="libx264", macro_block_size=2, ffmpeg_log_level="error"
        )
        self.size = (0, 0)

    def __enter__(self) -> Video:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def add(self, frame: np.ndarray | None) -> None:
        """Add a frame, uint8 `[H, W, 3]`; small ones are enlarged."""
        assert frame is not None  # `Camera` has refused envs without pictures
        factor = max(1, _SMALL_PX // max(frame.shape[:2]))
        if factor > 1:
            frame = frame.repeat(factor, 0).repeat(factor, 1)
        height, width = (side - side % 2 for side in frame.shape[:2])
        self.size = (width, height)
        self._writer.append_data(np.ascontiguousarray(frame[:height, :width]))


def _require_imageio() -> Any:
    try:
        import imageio.v2 as imageio
        import imageio_ffmpeg  # noqa: F401  # which imageio needs for MP4
    except ImportError as error:
        raise MediaError(
            f"recording failed: expected the packages imageio and imageio-ffmpeg, got {error}. "
            f"pip install 'envherd[media]'"
        ) from None
    return imageio
