"""Implements `envherd replay`, from its options to its exit code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from tensordict import TensorDictBase

from envherd.executor.batched import BatchedEnv
from envherd.executor.cli.commands import carry_out, write_pictures
from envherd.executor.cli.exit_codes import EXIT_FAILED
from envherd.executor.cli.media import FrameLog, require_pillow
from envherd.executor.cli.running import Made, make, with_display
from envherd.executor.cli.storing import load_rollout
from envherd.executor.options import ExecutorOptions
from envherd.executor.parallel import ParallelEnv
from envherd.executor.pictures.camera import Camera


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of the command line."""

    directory: Path
    num_workers: int | None = None
    gif: Path | None = None
    png: Path | None = None
    is_quiet: bool = False

    @property
    def wants_frames(self) -> bool:
        """Whether a picture was requested."""
        return self.gif is not None or self.png is not None


def run(request: Request) -> int:
    """Run a rollout again; return the exit code. `carry_out` handles errors."""
    return carry_out(lambda: _prepare(request), lambda prepared: _report(request, *prepared))


def _prepare(request: Request) -> tuple[TensorDictBase, dict[str, Any], Made]:
    """Check the options before envs start; return the data, the facts stored with it, and the factory."""
    data, facts = load_rollout(request.directory)
    if request.wants_frames:
        require_pillow()
    return data, facts, make(facts["env"], facts["max_steps"], facts["env_kwargs"], with_frames=request.wants_frames)


def _report(request: Request, data: TensorDictBase, facts: dict[str, Any], made: Made) -> int:
    """Run the rollout again and report; return the exit code."""
    console = Console(quiet=request.is_quiet)
    difference = _replay(request, data, facts, made, console)
    if difference:
        text = Text(f"{facts['env']} differs: {difference}", "bold red")
        Console(stderr=request.is_quiet).print(text, soft_wrap=True)
        return EXIT_FAILED
    same = f"{facts['env']}: {data.shape[1]} steps of {data.shape[0]} envs are equal to those stored."
    console.print(Text(same, "green"), soft_wrap=True)
    return 0


def _replay(
    request: Request,
    data: TensorDictBase,
    facts: dict[str, Any],
    made: Made,
    console: Console,
) -> str:
    """Run the rollout again; return the first difference as text, or an empty string."""
    factory, kwargs = made
    num_envs, num_steps = data.shape[:2]
    options = with_display(ExecutorOptions(**facts["options"]), is_drawn=request.wants_frames)
    how: dict[str, Any] = {"num_workers": request.num_workers, "seed": facts["seed"], "options": options}
    frames = FrameLog(num_steps) if request.wants_frames else None
    difference = ""
    with console.status(f"starting {num_envs} envs"):
        env: BatchedEnv = ParallelEnv(num_envs, factory, env_kwargs=kwargs or None, **how)
    with env, console.status("stepping"), torch.no_grad():
        camera = Camera(env)
        inputs = [leaf.key for leaf in (*env.spec.action, *env.spec.state)]
        root = env.reset()
        if frames is not None:
            frames.add(0, camera.look(root))
        for step in range(num_steps):
            stored = data[:, step]
            difference = difference or _difference(step, stored.exclude("next"), root, {*inputs})
            for key in inputs:
                root.set(key, stored[key].clone())
            td, root = env.step_and_maybe_reset(root)
            difference = difference or _difference(step, stored["next"], td["next"], {("interrupted",)}, "next/")
            if frames is not None and frames.wants(step + 1):
                frames.add(step + 1, camera.look(td["next"]))
            if difference and frames is None:
                break
    for path in write_pictures(frames, request.gif, request.png, f"{facts['env']}, again").values():
        console.print(f"{path} written", highlight=False)
    return difference


def _difference(step: int, stored: TensorDictBase, found: TensorDictBase, without: set[Any], prefix: str = "") -> str:
    """Return the first leaf in which two batches `[N]` differ, as text; empty if none does."""
    for key, value in _tensors(stored):
        if key in without or (other := found.get(key, None)) is None:
            continue
        is_same = (value == other) | ((value != value) & (other != other))  # noqa: PLR0124  # NaN equals NaN here
        rows = (~is_same.reshape(len(value), -1).all(1)).nonzero().flatten().tolist()
        if rows:
            return f"{prefix}{'/'.join(key)} of env {rows[0]} at step {step}."
    return ""


def _tensors(td: TensorDictBase) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    for key, value in td.items(include_nested=True, leaves_only=True):
        if isinstance(value, torch.Tensor):
            yield (key,) if isinstance(key, str) else key, value
