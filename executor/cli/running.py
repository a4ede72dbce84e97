"""What `envherd rollout` does, from its options to its exit code."""

from __future__ import annotations

import inspect
import json
import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from envherd.executor.batched import BatchedEnv
from envherd.executor.cli.collecting import Collected, Collector
from envherd.executor.cli.env_names import Factory, callable_at, factory_for
from envherd.executor.cli.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from envherd.executor.cli.figures import Figures, table
from envherd.executor.cli.media import FrameLog, MediaError, require_pillow, write_contact_sheet, write_gif
from envherd.executor.cli.storing import RolloutStore, StoreError
from envherd.executor.cluster.errors import ClusterError
from envherd.executor.options import ExecutorOptions
from envherd.executor.parallel import ParallelEnv
from envherd.workers.errors import EnvherdError


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options, as given."""

    env: str
    num_envs: int
    num_workers: int | None = None
    cluster: str | None = None
    steps: int
    seed: int | None = None
    policy: str | None = None
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    out: Path | None = None
    gif: Path | None = None
    png: Path | None = None
    json_path: str | None = None

    @property
    def wants_frames(self) -> bool:
        """Whether a picture is to be drawn."""
        return self.gif is not None or self.png is not None


def run(request: Request) -> int:
    """Run a rollout and report it; return the exit code. Errors are printed, never raised."""
    console = Console(stderr=request.json_path == "-")
    errors = Console(stderr=True)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # modules named in options are looked for here first, as `python -m` does
    is_prepared = False
    try:
        factory, make_policy, store = _prepare(request)
        is_prepared = True
        collected = _run(request, factory, make_policy, store, console)
    except ClusterError as error:
        complain(errors, error)
        return EXIT_USAGE
    except (EnvherdError, MediaError, StoreError, OSError) as error:
        complain(errors, error)
        return EXIT_FAILED if is_prepared else EXIT_USAGE
    except KeyboardInterrupt:
        errors.print("interrupted")
        return EXIT_INTERRUPTED
    if collected.failure is not None:
        complain(errors, collected.failure)
        return EXIT_FAILED
    return EXIT_INTERRUPTED if collected.is_interrupted else 0


def _prepare(request: Request) -> tuple[Factory, Any, RolloutStore | None]:
    """Refuse at once what cannot work."""
    factory = factory_for(request.env, with_frames=request.wants_frames)
    make_policy = None if request.policy is None else callable_at(request.policy, f"--policy {request.policy}")
    if request.wants_frames:
        require_pillow()
    store = None if request.out is None else RolloutStore(request.out, request.steps)
    return factory, make_policy, store


def _run(
    request: Request, factory: Factory, make_policy: Any, store: RolloutStore | None, console: Console
) -> Collected:
    """Collect, write and report."""
    if make_policy is None:
        # Only copies are left to torch here, and threads for them would wait for cores that the workers use:
        # storing 440 MB took 7-16 s with two threads on two busy cores, 1 s with one.
        torch.set_num_threads(1)
    frames = FrameLog(request.steps) if request.wants_frames else None
    with console.status(f"starting {request.num_envs} envs"):
        executor = _start(request, factory)
    with executor:
        policy = None if make_policy is None else _call(make_policy, executor)
        collected = Collector(executor, request.steps, policy, frames, store).run(console)
        num_workers, seed = executor.num_workers, executor.seed
    files = _write(request, collected, frames, store, console)
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
    _write_json(request.json_path, figures)
    return collected


def _start(request: Request, factory: Factory) -> BatchedEnv:
    how: dict[str, Any] = {"num_workers": request.num_workers, "seed": request.seed, "options": _options(request)}
    how["env_kwargs"] = request.env_kwargs or None
    if request.cluster is None:
        return ParallelEnv(request.num_envs, factory, **how)
    from envherd.executor.cluster import RayParallelEnv

    return RayParallelEnv(request.num_envs, factory, address=request.cluster, **how)


def _write(
    request: Request, collected: Collected, frames: FrameLog | None, store: RolloutStore | None, console: Console
) -> dict[str, str]:
    """Write what was asked for; return what was written."""
    files: dict[str, str] = {}
    if collected.steps_done == 0 or (store is None and frames is None):
        return files
    with console.status("writing"):
        if store is not None:
            store.finish()
            files["out"] = str(request.out)
        if frames is not None and request.gif is not None:
            write_gif(request.gif, frames, title=request.env)
            files["gif"] = str(request.gif)
        if frames is not None and request.png is not None:
            write_contact_sheet(request.png, frames, title=request.env)
            files["png"] = str(request.png)
    return files


def _write_json(path: str | None, figures: Figures) -> None:
    if path is None:
        return
    text = json.dumps(figures.to_plain(), indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def _options(request: Request) -> ExecutorOptions:
    """MuJoCo draws without a display only if a variable says so before it is imported."""
    has_display = "DISPLAY" in os.environ or "MUJOCO_GL" in os.environ
    draws_blind = request.wants_frames and sys.platform == "linux" and not has_display
    return ExecutorOptions(env_vars=(("MUJOCO_GL", "egl"),) if draws_blind else ())


def _call(make_policy: Any, executor: BatchedEnv) -> Any:
    """Return `make_policy(executor)`, or `make_policy()` if it takes nothing."""
    takes_env = len(inspect.signature(make_policy).parameters) > 0
    return make_policy(executor) if takes_env else make_policy()


def complain(console: Console, error: Exception) -> None:
    """Print an error as a reader needs it: the message, and where a worker failed, its traceback."""
    console.print(Text("error: ", "bold red").append(str(error), "default"), soft_wrap=True)
    remote = getattr(error, "remote_traceback", None)
    is_refusal = remote and "envherd.workers.errors." in remote.rstrip().rpartition("\n")[2]
    if remote and not is_refusal:
        console.print(Text(f"\nin the worker:\n{remote}", "dim"), soft_wrap=True)
