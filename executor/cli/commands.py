"""Shared code of the commands: what runs an env, what converts errors to exit codes, and what writes results.

Guarantees: `carry_out` prints expected errors (see `carry_out`) and returns an exit code. It raises all others.
"""

import contextlib
import inspect
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any, TypeVar

from rich import box
from rich.console import Console, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from envherd.executor.batched import BatchedEnv
from envherd.executor.cli.options import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from envherd.executor.cli.storing import StoreError
from envherd.executor.cluster.shares import ClusterError
from envherd.executor.guests.capsules.file import CapsuleError, DamagedFile
from envherd.executor.machine.room import TooMany
from envherd.executor.options import ExecutorOptions
from envherd.executor.parallel import ParallelEnv
from envherd.executor.show.camera import MediaError
from envherd.executor.start.process_log import has_frames_of_others
from envherd.shm import platforms
from envherd.workers.adapters.env_names import Made
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
    *,
    searches_here: bool = True,
) -> int:
    """Run a command in two parts; return its exit code.

    Prints `EnvherdError`, `MediaError`, `StoreError`, `OSError`, `MemoryError`, Ctrl-C, and those `TypeError` and
    `ValueError` that have a message of envherd.

    Args:
        prepare: checks the options. Its errors are usage errors (exit code 2), as are all `ClusterError`,
            `CapsuleError`, `DamagedFile` and `TooMany`.
        work: runs the command with the result of `prepare`; returns the exit code.
        searches_here: search modules in the current directory first, as `python -m` does. False if the command line
            names none: the directory may hold modules of others.
    """
    if searches_here and os.getcwd() not in sys.path:
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
        return (
            EXIT_USAGE
            if isinstance(error, (ClusterError, CapsuleError, DamagedFile, TooMany))
            else code
        )
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


def started(
    made: Made,
    num_envs: int,
    *,
    is_drawn: bool = False,
    **how: Any,
) -> ParallelEnv:
    """Return an executor of a named env.

    Args:
        made: of the env.
        num_envs: N.
        is_drawn: the envs will be drawn; see `drawing`.
        **how: further arguments of the executor.
    """
    factory, kwargs = made
    if is_drawn:
        how["options"] = drawing(how.get("options") or ExecutorOptions())
    return ParallelEnv(num_envs, factory, env_kwargs=kwargs or None, **how)


def drawing(options: ExecutorOptions) -> ExecutorOptions:
    """Return options of envs that will be drawn. Without a display, MuJoCo needs MUJOCO_GL when workers start."""
    has_display = platforms.has_display() or "MUJOCO_GL" in os.environ
    return options if has_display else replace(options, env_vars={"MUJOCO_GL": "egl"})


def policy_maker(
    name: str | None,
    option: str = "--policy",
) -> Callable[[BatchedEnv], Any] | None:
    """Return what makes the policy that an option MODULE:FACTORY names, from an executor; None for random actions.

    The factory may take the executor, or nothing.

    Raises:
        FactoryError: there is no such factory.
    """
    if name is None or name == RANDOM:
        return None
    factory = named_callable(name, f"{option} {name}")
    takes_env = True
    with contextlib.suppress(ValueError):  # a builtin may have no signature
        kinds = {one.kind for one in inspect.signature(factory).parameters.values()}
        takes_env = not kinds <= {
            inspect.Parameter.KEYWORD_ONLY,
            inspect.Parameter.VAR_KEYWORD,
        }

    def make_policy(env: BatchedEnv) -> Any:
        try:
            policy = factory(env) if takes_env else factory()
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
