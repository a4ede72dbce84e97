"""`envherd record ENV`: writes a film of one env that a policy controls, as a video or an animation."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
from rich.console import Console
from tensordict import TensorDictBase

from envherd.executor.batched import BatchedEnv
from envherd.executor.cli.commands import acting, carry_out, noting_interrupt, policy_maker, started
from envherd.executor.cli.exit_codes import EXIT_INTERRUPTED
from envherd.executor.cli.media import Film, grid, reduced, require_pillow, save_animation
from envherd.executor.cli.options import Record
from envherd.executor.cli.returns import Returns
from envherd.executor.show.camera import Camera
from envherd.executor.show.video import Video, require_imageio
from envherd.workers.adapters.env_names import Made, made_for

#: Most frames of a GIF; longer films keep only every second, fourth, ... step.
_GIF_FRAMES = 240
#: Longest side of a frame of a GIF, and widest picture of `--views`.
_WIDTH_PX = 1600


def run(options: Record) -> int:
    """Record a film; return the exit code."""
    return carry_out(lambda: _prepare(options), lambda prepared: _work(options, *prepared))


def _prepare(options: Record) -> tuple[Made, Any]:
    """Check the options before the env starts; return its factory and arguments, and what makes the policy."""
    if options.mp4 is not None:
        require_imageio()
    if options.gif is not None or options.views:
        require_pillow()
    made = made_for(options.env, options.env_kwargs, options.max_steps, with_frames=options.agent is None)
    return made, policy_maker(options.policy)


def _work(options: Record, made: Made, make_policy: Any) -> int:
    """Step, write, and report; return the exit code."""
    console = Console(quiet=options.quiet)
    num_steps = num_episodes = 0
    with started(made, 1, is_drawn=options.agent is None, seed=options.seed) as env:
        look = _Views(env).look if options.views else Camera(env, options.agent).look_at_first
        act = env.rand_action if make_policy is None else acting(make_policy, env)
        root = env.reset()
        frame = look(root)
        film = Film(_GIF_FRAMES, options.steps)
        with contextlib.ExitStack() as stack, torch.no_grad():
            video = None
            if options.mp4 is not None:
                video = stack.enter_context(contextlib.closing(Video(options.mp4, options.fps)))
            stack.enter_context(console.status("recording"))
            pressed = stack.enter_context(noting_interrupt())
            while True:
                if video is not None:
                    video.add(frame)
                if options.gif is not None and film.wants(num_steps):
                    film.add(num_steps, reduced(frame, _WIDTH_PX))
                if pressed or num_steps == options.steps or num_episodes == options.episodes:
                    break
                td = env.step(act(root))
                frame = look(td["next"])
                num_steps += 1
                ended = bool(td["next", "done"].any())
                num_episodes += ended
                root = env.reset() if ended else env.current()
        if options.gif is not None:
            pictures = [require_pillow().Image.fromarray(kept) for _, kept in film.moments]
            save_animation(options.gif, pictures, frames_per_s=options.fps / film.stride)
        done = f"{num_steps} steps, episodes that ended: {num_episodes}, {frame.shape[1]}x{frame.shape[0]} pixels"
        for path in filter(None, (options.mp4, options.gif)):
            console.print(f"{path}: {done}, seed {env.seed}", soft_wrap=True, highlight=False)
    return EXIT_INTERRUPTED if pressed else 0


class _Views:
    """Draws the world and the view of each player in one picture, with the returns so far.

    Raises:
        MediaError: its players observe no pictures.
    """

    def __init__(self, env: BatchedEnv) -> None:
        self._world, self._players = Camera(env), Camera(env, 0).key
        self._returns, self._reward = Returns(env.spec, 1), env.spec.reward[0].key
        names, roles = self._returns.agents, list(env.spec.metadata.get("agent_roles") or ())
        has_roles = len(roles) == len(names) and set(roles) != {"default"}
        self._names = [f"{name} {role}" for name, role in zip(names, roles, strict=True)] if has_roles else names
        self._title = str(env.spec.metadata.get("name") or env.spec.family)
        self._step = 0

    def look(self, td: TensorDictBase) -> np.ndarray:
        """Return the picture of a reset or of a step, uint8 `[H, W, 3]`, with the returns including the step."""
        is_root = td.get(self._reward, None) is None
        self._step = 0 if is_root else self._step + 1
        returns = (self._returns.running if is_root else self._returns.add(td))[0]
        caption = f"step {self._step}  sum {returns.sum():.1f}"
        tiles = [(self._title, caption, self._world.look(td)[0])]
        views = td[self._players][0].numpy(force=True)
        tiles += [
            (name, f"return {value:.1f}", view) for name, value, view in zip(self._names, returns, views, strict=True)
        ]
        if td["done"].any():
            self._step = 0
        return np.asarray(grid(tiles, width_px=_WIDTH_PX))
