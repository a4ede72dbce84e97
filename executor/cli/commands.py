"""Shared code of the commands: it converts errors to exit codes, and writes results.

Guarantees: `carry_out` prints expected errors (see `carry_out`) and returns an exit code. It raises all others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from envherd.executor.cli.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from envherd.executor.cli.media import FrameLog, write_contact_sheet, write_gif
from envherd.executor.cli.storing import StoreError
from envherd.executor.cluster.errors import ClusterError
from envherd.executor.show.camera import MediaError
from envherd.workers.errors import EnvherdError

Prepared = TypeVar("Prepared")


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


def write_pictures(frames: FrameLog | None, gif: Path | None, png: Path | None, title: str) -> dict[str, str]:
    """Write the frames of a rollout as a GIF and as a contact sheet, each if it has a path; return name -> path."""
    files = {}
    for name, path, write in (("gif", gif, write_gif), ("png", png, write_contact_sheet)):
        if frames is not None and path is not None:
            write(path, frames, title=title)
            files[name] = str(path)
    return files
