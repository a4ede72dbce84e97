"""Shared code of the commands: what runs an env, what converts errors to exit codes, and what writes results.

Guarantees: `carry_out` prints expected errors (see `carry_out`) and returns an exit code. It raises all others.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from envherd.executor.batched import BatchedEnv
from envherd.executor.cli.env_names import Factory, factory_for, limited
from envherd.executor.cli.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from envherd.executor.cli.storing import StoreError
from envherd.executor.cluster.errors import ClusterError
from envherd.executor.options import ExecutorOptions
from envherd.executor.show.camera import MediaError
from envherd.workers.errors import EnvherdError

Prepared = TypeVar("Prepared")
#: A factory, and the keyword arguments for its calls.
Made = tuple[Factory, dict[str, Any]]


def carry_out(prepare: Callable[[], Prepared], work: Callable[[Prepared], int], *, searches_here: bool = True) -> int:
    """Run a command in two parts; return its exit code.

    Prints `EnvherdError`, `MediaError`, `StoreError`, `OSError` and Ctrl-C.

    Args:
        prepare: checks the options. Its errors are usage errors (exit code 2), as is every `ClusterError`.
        work: runs the command with the result of `prepare`; returns the exit code.
        searches_here: search modules in the current directory first, as `python -m` does. False if the command line
            names none: the directory may hold modules of others.
    """
    if searches_here and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    errors, code = Console(stderr=True), EXIT_USAGE
    try:
        prepared = prepare()
        code = EXIT_FAILED
        return work(prepared)
    except (EnvherdError, MediaError, StoreError, OSError) as error:
        complain(errors, error)
        return EXIT_USAGE if isinstance(error, ClusterError) else code
    except KeyboardInterrupt:
        errors.print("interrupted")
        return EXIT_INTERRUPTED


def complain(console: Console, error: Exception) -> None:
    """Print the message of an error, and the traceback in the worker unless envherd itself raised the error there."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None and not isinstance(error, EnvherdError):
        text = f"accessing {error.filename} failed: {error.strerror}."
    console.print(Text("error: ", "bold red").append(text, "default"), soft_wrap=True)
    remote = getattr(error, "remote_traceback", None)
    is_refusal = remote and "envherd.workers.errors." in remote.rstrip().rpartition("\n")[2]
    if remote and not is_refusal:
        console.print(Text(f"\nin the worker:\n{remote}", "dim"), soft_wrap=True)


def write_text(path: str | None, text: str) -> None:
    """Write a text to a file, or to standard output if `path` is `-`. If it is None, write nothing."""
    if path == "-":
        sys.stdout.write(text)
    elif path is not None:
        Path(path).write_text(text)


def make(name: str, max_steps: int | None, kwargs: dict[str, Any], *, with_frames: bool = False) -> Made:
    """Return the factory of the named env, and its keyword arguments.

    Raises:
        FactoryError: no such env, or its family takes no `max_steps`.
    """
    if max_steps is None:
        return factory_for(name, with_frames=with_frames), kwargs
    factory, limit = limited(name, max_steps, with_frames=with_frames)
    return factory, {**limit, **kwargs}


def with_display(options: ExecutorOptions, *, is_drawn: bool) -> ExecutorOptions:
    """Return the options for envs that are drawn: without a display, MuJoCo needs MUJOCO_GL when workers start."""
    has_display = "DISPLAY" in os.environ or "MUJOCO_GL" in os.environ
    given: Any = options.env_vars
    is_chosen = callable(given) or options.has_list
    if has_display or is_chosen or not is_drawn or sys.platform != "linux":
        return options
    return dataclasses.replace(options, env_vars={"MUJOCO_GL": "egl", **dict(given)})


def call_maker(make_policy: Any, executor: BatchedEnv) -> Any:
    """Return `make_policy(executor)`, or `make_policy()` if it takes nothing."""
    takes_env = len(inspect.signature(make_policy).parameters) > 0
    return make_policy(executor) if takes_env else make_policy()
