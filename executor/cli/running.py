"""Implements `envherd rollout`, from its options to its exit code."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from envherd.executor.batched import BatchedEnv
from envherd.executor.cli.collecting import Collected, Collector
from envherd.executor.cli.commands import carry_out, complain, write_pictures, write_text
from envherd.executor.cli.env_names import Factory, callable_at, factory_for, full_name, limited
from envherd.executor.cli.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED
from envherd.executor.cli.figures import Figures, table
from envherd.executor.cli.media import FrameLog, require_pillow
from envherd.executor.cli.storing import RolloutStore
from envherd.executor.options import ExecutorOptions
from envherd.executor.parallel import ParallelEnv
from envherd.executor.serial import SerialEnv
from envherd.executor.show.camera import MediaError
from envherd.workers.errors import FactoryError

#: A factory, and the keyword arguments for its calls.
Made = tuple[Factory, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """The options of the command line."""

    env: str
    num_envs: int
    num_workers: int | None = None
    cluster: str | None = None
    steps: int
    seed: int | None = None
    policy: str | None = None
    max_steps: int | None = None
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    is_serial: bool = False
    out: Path | None = None
    gif: Path | None = None
    png: Path | None = None
    json_path: str | None = None
    is_quiet: bool = False

    @property
    def wants_frames(self) -> bool:
        """Whether a picture was requested."""
        return self.gif is not None or self.png is not None


def run(request: RolloutRequest) -> int:
    """Run a rollout and report it; return the exit code. `carry_out` handles errors."""
    return carry_out(lambda: _prepare(request), lambda prepared: _run(request, *prepared))


def _prepare(request: RolloutRequest) -> tuple[Made, Any, RolloutStore | None]:
    """Check the options before envs start; return the factory, that of the policy or None, and the store or None."""
    made = make(request.env, request.max_steps, request.env_kwargs, with_frames=request.wants_frames)
    make_policy = None if request.policy is None else callable_at(request.policy, f"--policy {request.policy}")
    if request.wants_frames:
        require_pillow()
    store = None if request.out is None else RolloutStore(request.out, request.steps)
    _executor_options(request)
    return made, make_policy, store


def _run(request: RolloutRequest, made: Made, make_policy: Any, store: RolloutStore | None) -> int:
    """Collect, write and report; return the exit code."""
    console = Console(stderr=request.json_path == "-", quiet=request.is_quiet)
    if make_policy is None:
        # Without a policy, torch only copies here, and its threads would compete with the workers for cores:
        # storing 440 MB took 7-16 s with two threads on two busy cores, 1 s with one.
        torch.set_num_threads(1)
    frames = FrameLog(request.steps) if request.wants_frames else None
    with console.status(f"starting {request.num_envs} envs"):
        executor = _start(request, made)
    with executor:
        policy = None if make_policy is None else call_maker(make_policy, executor)
        collected = Collector(executor, request.steps, policy, frames, store).run(console)
        num_workers, seed = executor.num_workers, executor.seed
    files: dict[str, str] = {}
    unwritten: Exception | None = None
    try:
        files = _write(request, collected, frames, (store, seed), console)
    except (MediaError, OSError) as error:  # the figures are reported anyway
        unwritten = error
    figures = Figures(
        env=request.env,
        num_envs=request.num_envs,
        num_workers=num_workers,
        seed=seed,
        steps=request.steps,
        files=files,
        **{one.name: getattr(collected, one.name) for one in fields(collected) if one.name != "failure"},
        error=None if collected.failure is None else str(collected.failure),
    )
    console.print(table(figures))
    if request.json_path is not None:
        write_text(request.json_path, json.dumps(figures.to_plain(), indent=2) + "\n")
    for failure in filter(None, (collected.failure, unwritten)):
        complain(Console(stderr=True), failure)
    if collected.failure is not None or unwritten is not None:
        return EXIT_FAILED
    return EXIT_INTERRUPTED if collected.is_interrupted else 0


def _start(request: RolloutRequest, made: Made) -> BatchedEnv:
    factory, kwargs = made
    how: dict[str, Any] = {
        "num_workers": request.num_workers,
        "seed": request.seed,
        "options": _executor_options(request),
        "env_kwargs": kwargs or None,
    }
    if request.cluster is None:
        return (SerialEnv if request.is_serial else ParallelEnv)(request.num_envs, factory, **how)
    from envherd.executor.cluster import RayParallelEnv

    return RayParallelEnv(request.num_envs, factory, address=request.cluster, **how)


def _write(
    request: RolloutRequest,
    collected: Collected,
    frames: FrameLog | None,
    kept: tuple[RolloutStore | None, int],
    console: Console,
) -> dict[str, str]:
    """Write the requested files; return name -> path. `kept` is the store (or None) and the seed."""
    store, seed = kept
    files: dict[str, str] = {}
    if collected.steps_done == 0 or (store is None and frames is None):
        return files
    with console.status("writing"):
        if store is not None:
            store.finish(_facts(request, seed))
            files["out"] = str(request.out)
        files.update(write_pictures(frames, request.gif, request.png, request.env))
    return files


def make(name: str, max_steps: int | None, kwargs: dict[str, Any], *, with_frames: bool = False) -> Made:
    """Return the factory of the named env, and its keyword arguments.

    Raises:
        FactoryError: no such env, or its family takes no `max_steps`.
    """
    if max_steps is None:
        return factory_for(name, with_frames=with_frames), kwargs
    factory, limit = limited(name, max_steps, with_frames=with_frames)
    return factory, {**limit, **kwargs}


def _facts(request: RolloutRequest, seed: int) -> dict[str, Any]:
    """Return the facts that `envherd replay` needs in addition to the data."""
    facts = {"env": full_name(request.env), "env_kwargs": request.env_kwargs, "seed": seed}
    return {**facts, "max_steps": request.max_steps, "options": request.options}


def _executor_options(request: RolloutRequest) -> ExecutorOptions:
    """Return the options of the executor.

    Raises:
        FactoryError: the file of `--config` has an unknown option, or an invalid value.
    """
    try:
        options = ExecutorOptions(**request.options)
    except (TypeError, ValueError) as error:
        raise FactoryError(f"--config failed: {error}") from None
    return with_display(options, is_drawn=request.wants_frames)


def with_display(options: ExecutorOptions, *, is_drawn: bool) -> ExecutorOptions:
    """Return the options for envs that are drawn: without a display, MuJoCo needs MUJOCO_GL when workers start."""
    has_display = "DISPLAY" in os.environ or "MUJOCO_GL" in os.environ
    if not (is_drawn and sys.platform == "linux" and not has_display):
        return options
    return dataclasses.replace(options, env_vars={"MUJOCO_GL": "egl", **dict(options.env_vars)})


def call_maker(make_policy: Any, executor: BatchedEnv) -> Any:
    """Return `make_policy(executor)`, or `make_policy()` if it takes nothing."""
    takes_env = len(inspect.signature(make_policy).parameters) > 0
    return make_policy(executor) if takes_env else make_policy()
