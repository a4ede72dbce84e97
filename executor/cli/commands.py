"""Shared code of the commands: what runs an env, what converts errors to exit codes, and what writes results.

Guarantees: `carry_out` prints expected errors (see `carry_out`) and returns an exit code. It raises all others.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from rich import box
from rich.console import Console, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
)

from envherd.executor.batched import BatchedEnv
from envherd.executor.cli.options import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from envherd.executor.cluster.shares import ClusterError
from envherd.executor.machine.machine import TooMany
from envherd.executor.options import ExecutorOptions
from envherd.executor.show.camera import MediaError
from envherd.executor.start.zygote import has_frames_of_others
from envherd.shm import platforms
from envherd.workers.adapters.named import named_callable
from envherd.workers.errors import EnvherdError, FactoryError

Prepared = TypeVar("Prepared")
#: Value in place of MODULE:FACTORY that selects random actions.
RANDOM = "random"
#: How the messages of envherd's own errors begin.
_OWN = re.compile(r"[^:\n]+ failed: expected ")


def carry_out(
    prepare: Callable[[], Prepared],
    work: Callable[[Prepared], int],
) -> int:
    """Run a command in two parts; return its exit code.

    Prints `EnvherdError`, `MediaError`, `StoreError`, `OSError`, `MemoryError`, Ctrl-C, and those `TypeError` and
    `ValueError` that have a message of envherd.

    Args:
        prepare: checks the options. Its errors are usage errors (exit code 2), as are all `ClusterError`
            and `TooMany`.
        work: runs the command with the result of `prepare`; returns the exit code.
    """
    # As `python -m` does.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    errors = Console(stderr=True)
    code = EXIT_USAGE
    try:
        # Until this returns, an error is one of usage.
        prepared = prepare()
        code = EXIT_FAILED
        return work(prepared)
    except BrokenPipeError:  # the reader of the output has ended, which typer handles
        raise
    except (EnvherdError, MediaError, StoreError, OSError, MemoryError) as error:
        complain(errors, error)
        return EXIT_USAGE if isinstance(error, (ClusterError, TooMany)) else code
    except (TypeError, ValueError) as error:
        if _OWN.match(str(error)) is None:  # of a policy or another part of the user's
            raise
        complain(errors, error)
        return code
    except KeyboardInterrupt:
        errors.print("interrupted")
        return EXIT_INTERRUPTED


def complain(console: Console, error: Exception) -> None:
    """Print the message of an error, and the traceback in the worker if it shows more than the message."""
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    if (
        isinstance(error, OSError)
        and error.strerror is not None
        and not isinstance(error, EnvherdError)
    ):
        where = "" if error.filename is None else f"accessing {error.filename} failed: "
        text = f"{where}{error.strerror}."
    console.print(Text("error: ", "bold red").append(text, "default"), soft_wrap=True)
    remote = getattr(error, "remote_traceback", None)
    is_refusal = (
        remote and "envherd.workers.errors." in remote.rstrip().rpartition("\n")[2]
    )
    # Of wrong arguments.
    is_call = (
        remote and isinstance(error, FactoryError) and not has_frames_of_others(remote)
    )
    if remote and not (is_refusal or is_call or remote in text):
        console.print(
            Text(f"\nin the process of the env:\n{remote}", "dim"), soft_wrap=True
        )


def table_of_facts(
    title: str,
    facts: Mapping[str, RenderableType],
    lines_below: Collection[str] = (),
    justify: JustifyMethod = "left",
) -> Table:
    """Return a table of names and values.

    Args:
        title: above it.
        facts: value by name.
        lines_below: names of the rows with a line below them.
        justify: of the values. If they are not at the left, a narrow terminal wraps the names too.
    """
    grid = Table(
        title=Text(title, "bold"),
        title_justify="left",
        box=box.ROUNDED,
        show_header=False,
    )
    grid.add_column(style="dim", no_wrap=justify == "left")
    grid.add_column(overflow="fold", justify=justify)
    for name, value in facts.items():
        grid.add_row(name, value, end_section=name in lines_below)
    return grid


@contextlib.contextmanager
def noting_interrupt() -> Iterator[list[int]]:
    """Yield a list to which the first Ctrl-C adds an item, so that a loop can end after a whole step.

    The second Ctrl-C raises KeyboardInterrupt. For the main thread, to which Python delivers signals.
    """
    pressed: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  # Python passes both to handlers
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def drawing(options: ExecutorOptions) -> ExecutorOptions:
    """Return options of envs that will be drawn. Without a display, MuJoCo needs MUJOCO_GL when workers start."""
    has_display = platforms.has_display() or "MUJOCO_GL" in os.environ
    return options if has_display else replace(options, env_vars={"MUJOCO_GL": "egl"})


def policy_maker(
    name: str | None,
    option: str = "--policy",
) -> Callable[[BatchedEnv], Any] | None:
    """Return what makes the policy that an option MODULE:FACTORY names, from an executor; None for random actions.

    Raises:
        FactoryError: there is no such factory.
    """
    if name is None or name == RANDOM:
        return None
    factory = named_callable(name, f"{option} {name}")

    def make_policy(env: BatchedEnv) -> Any:
        try:
            policy = factory(env)
        except Exception as error:
            error.add_note(
                f"{option} names a function that gets the executor and returns the policy; {name} raised."
            )
            raise
        if policy is None:  # which would stand for random actions
            raise FactoryError(
                f"{option} {name} failed: expected a policy, got None. Return it from the function."
            )
        return policy

    return make_policy


# ---- storing -----------------------------------------------------------------------------------
# A rollout on disk: a memory-mapped TensorDict, written step by step, so that memory does not grow.
#
# Batches with text, objects or differing shapes are the exception: they stay in memory until `finish` writes them.
#
# `tensordict.TensorDict.load_memmap(DIR, allow_pickle=False)` returns it, `[N, T]` with the keys of
# `ParallelEnv.rollout`.
#
# Guarantees: no file is replaced or removed.

STORE_SCHEMA = "envherd.stored/1"
#: The file in the directory that is not part of the TensorDict.
_FACTS = "envherd.json"


class StoreError(RuntimeError):
    """The directory has other files, or the rollout does not fit on the disk."""


class RolloutStore:
    """Writes batches `[N]`, one per step, to a directory as one batch `[N, T]`.

    Args:
        directory: created if it does not exist.
        num_steps: T, unless `finish` is called earlier.

    Raises:
        StoreError: the directory is not empty.
    """

    def __init__(self, directory: Path, num_steps: int) -> None:
        self.directory = directory
        self.num_steps = num_steps
        self.num_stored = 0
        self._on_disk: TensorDictBase | None = None
        self._in_memory: list[TensorDictBase] = []
        found = next(directory.iterdir(), None) if directory.is_dir() else directory
        if found is not None and os.path.lexists(found):
            raise StoreError(
                f"writing {directory} failed: expected a new or empty directory, got {found}. Remove it, or choose "
                f"another directory."
            )

    def add(self, td: TensorDictBase) -> None:
        """Store the batch `[N]` of a step, with action and `next`; it is copied.

        Raises:
            StoreError: at the first step, if the disk has no room for `num_steps` such batches.
        """
        if self.num_stored == 0:
            # Checked first, because writing to a memory map on a full disk kills the process.
            size = td.bytes() * self.num_steps
            free = shutil.disk_usage(self.directory.parent).free
            if size > free:
                raise StoreError(
                    f"writing {self.directory} failed: expected room for {size / 1e9:,.1f} GB, got {free / 1e9:,.1f} "
                    f"GB. Collect fewer steps or envs, or name a directory on another disk."
                )
            if not has_odd_leaves(td):
                shape = (td.shape[0], self.num_steps, *td.shape[1:])
                self._on_disk = (
                    td.unsqueeze(1).expand(shape).memmap_like(self.directory)
                )
        if self._on_disk is None:
            self._in_memory.append(td.clone())
        else:
            self._on_disk[:, self.num_stored].update_(td)
        self.num_stored += 1

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Complete the files; cut them to the number of stored steps, at least one.

        Args:
            facts: plain data, which a reader needs to run it again.
        """
        if self._on_disk is None:
            LazyStackedTensorDict.maybe_dense_stack(self._in_memory, 1).memmap(
                self.directory
            )
        elif self.num_stored < self.num_steps:
            with tempfile.TemporaryDirectory(
                prefix=".shorter-",
                dir=self.directory,
            ) as shorter:
                self._on_disk[:, : self.num_stored].contiguous().memmap(shorter)
                for path in Path(shorter).rglob("*"):
                    if path.is_file():
                        os.replace(path, self.directory / path.relative_to(shorter))
        (self.directory / _FACTS).write_text(
            json.dumps({"schema": STORE_SCHEMA, **facts}, indent=2) + "\n"
        )


def has_odd_leaves(td: TensorDictBase) -> bool:
    """Return whether a batch has leaves without a fixed size on disk: text, objects, differing shapes."""
    if isinstance(td, LazyStackedTensorDict) or not isinstance(td, TensorDict):
        return True
    return any(
        is_tensor_collection(value) and has_odd_leaves(value) for value in td.values()
    )
