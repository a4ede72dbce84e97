"""What the commands take and return: their options and their exit codes.

The options of a command are a dataclass, whose docstring is the help and whose fields are the options. Values are
checked while the command line is parsed, before anything starts.

The module of a command has its name, and a function `run(options)`. It is imported when the options have been read,
because that takes seconds, for which a help text and a wrong option need not wait.
"""

import gc
import importlib
import json
import os
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

# Exit codes; 0 is success.
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
#: The largest duration, in seconds.
_DAY_S = 86_400
#: Bytes of a text that an option names, far more than keyword arguments take.
_LARGEST_TEXT = 1 << 28
#: Above all root seeds that are drawn.
_LARGEST = 2**63


def picture(suffix: str) -> Callable[[Path | None], Path | None]:
    """Return the callback of an option that takes the path of a picture.

    Args:
        suffix: required end of the file's name; it selects the format.
    """

    def check(path: Path | None) -> Path | None:
        if path is not None and path.suffix.lower() != suffix:
            raise typer.BadParameter(
                f"expected a path that ends in {suffix}, got {str(path)!r}."
            )
        if path is not None:
            require_place(path)
        return path

    return check


def text_file(path: str | None) -> str | None:
    """Check the path of a file to write; the callback of options that also take `-`."""
    if path == "-" and sys.stdout is None:
        raise typer.BadParameter(
            "expected an open standard output for -, got a closed one."
        )
    if path not in (None, "-"):
        require_place(Path(path))
    return path


def write_json(path: str | None, report: Any, indent: int | None = 2) -> None:
    """Write a report as JSON to a file, or to standard output if `path` is `-`. If it is None, write nothing."""
    text = json.dumps(report, indent=indent) + "\n"
    if path == "-":
        sys.stdout.write(text)
        # An error belongs to the command, and a reader of `envherd top` waits for each line.
        sys.stdout.flush()
    elif path is not None:
        Path(path).write_text(text)


def require_number(name: str, value: Any) -> None:
    """Refuse NaN, infinity and numbers that no machine counts to, which the ranges of options let through.

    Args:
        name: of the option's field.
        value: of the option, of any type.

    Raises:
        typer.BadParameter: such a number.
    """
    if isinstance(value, (int, float)) and not abs(value) < _LARGEST:
        raise typer.BadParameter(
            f"expected a number below 2**63, got {value if isinstance(value, float) else 'a larger one'}.",
            param_hint=f"--{name.replace('_', '-')}",
        )


def new_folder(path: Path | None) -> Path | None:
    """Check the path of a folder to write; the callback of such options."""
    if path is not None and not path.is_dir():
        require_place(path)
    return path


def require_place(path: Path) -> None:
    """Refuse a path that cannot be written to. Commands replace a file that is there, and make no parent folder.

    A pipe with a name is refused: opening it waits for a reader. One without a name (`>(jq)`, /dev/stdout) has one.

    Raises:
        typer.BadParameter: there is a folder or no file, its parent folder does not exist, writing there is not
            permitted, or the path is not UTF-8, which torch cannot open.
    """
    name = str(path)
    real = Path(os.path.realpath(path))
    parent = real.parent if path.parent.is_dir() else path.parent
    for is_refused, got in (
        (path.is_dir(), f"the folder {name!r}"),
        (not parent.is_dir(), f"{name!r}: there is no folder {str(parent)!r}"),
        (
            os.path.lexists(real) and not (real.is_file() or real.is_char_device()),
            f"{name!r}: a pipe, a socket, a disk or a circular link",
        ),
        (
            not os.access(path if path.exists() else path.parent, os.W_OK),
            f"{name!r}: permission denied",
        ),
        (name.encode(errors="ignore").decode() != name, f"{name!r}: not UTF-8"),
    ):
        if is_refused:
            raise typer.BadParameter(
                f"expected a path that can be written to, got {got}."
            )


def _text_of(path: Path) -> str:
    """Return what a file holds; refuses devices and pipes, which may have no end, and large files.

    Reads as much as the file's size, which is 0 for files of the kernel: reading these may wait.

    Raises:
        OSError, ValueError: there is no such file, or it cannot be read.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_TEXT:
        raise ValueError(
            f"a device, a pipe or a folder, or more than {_LARGEST_TEXT >> 20} MiB"
        )
    with path.open("rb") as file:
        return file.read(status.st_size).decode()


def _json_object(text: str) -> dict[str, Any]:
    """Return the keyword arguments in a text, or in the file that `@PATH` names; the parser of `--env-kwargs`."""
    try:
        if text.startswith("@"):
            text = _text_of(Path(text[1:]))
        found = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise typer.BadParameter(
            f"expected a JSON object, got {text!r} ({error})."
        ) from None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"expected a JSON object, got {text!r}.")
    return found


# ---- options of several commands -------------------------------------------------------------------

ENV_HELP = (
    "meltingpot:NAME, gymnasium:ID, dm_control:DOMAIN/TASK, pettingzoo:ID-OR-MODULE, gymnasium_vec:ID[:ROWS], "
    "envpool:TASK[:ROWS], torchrl:MODULE:CALLABLE or python:MODULE:CALLABLE (a callable that "
    "returns an env)."
)

Env = Annotated[str, typer.Argument(metavar="ENV", help=ENV_HELP, show_default=False)]
EnvKwargs = Annotated[
    dict[str, Any] | None,
    typer.Option(
        metavar="JSON",
        parser=_json_object,
        help="Keyword arguments of the env as a JSON object, "
        "e.g. '{\"max_episode_steps\": 50}', or @FILE that holds one.",
    ),
]
MaxSteps = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Truncate episodes after this number of steps (meltingpot, gymnasium, pettingzoo).",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of worker processes; default: one per usable core.",
    ),
]
Gif = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        callback=picture(".gif"),
        help="Write an animation (GIF).",
    ),
]
Sheet = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        callback=picture(".png"),
        help="Write a contact sheet (PNG).",
    ),
]
Json = Annotated[
    str | None,
    typer.Option(
        metavar="[PATH]",
        callback=text_file,
        help="Write the results as JSON; - or no PATH prints them.",
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print only errors, and what is written to -."),
]


# ---- commands --------------------------------------------------------------------------------------


class Command:
    """The base of all options."""

    quiet = False

    def run(self) -> int:
        """Run the command; return the exit code."""
        name = f"envherd.executor.cli.{type(self).__name__.lower()}"
        if name not in sys.modules:
            # Without garbage collection, imports take a fifth less time, and the exit a second less.
            gc.collect()
            gc.disable()
            try:
                with Console(stderr=True, quiet=self.quiet).status("starting"):
                    importlib.import_module(name)
            finally:
                gc.freeze()
                gc.enable()
        code: int = sys.modules[name].run(self)
        return code


@dataclass(frozen=True, kw_only=True)
class Rollout(Command):
    """Run envs in parallel and report speed, returns and memory.

    After Ctrl-C, the command reports and writes the steps collected until then. A second Ctrl-C ends it at once.
    """

    env: Env
    envs: Annotated[int, typer.Option(min=1, help="Number of envs.")] = 4
    workers: Workers = None
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Run on the nodes of a Ray cluster: HOST:PORT of its head, auto, or local (a new one).",
        ),
    ] = None
    steps: Annotated[
        int,
        typer.Option(
            min=1,
            help="Steps of each env; envs whose episode ends are reset.",
        ),
    ] = 200
    episodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Stop as soon as this number of episodes, of all envs, has ended.",
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Root seed; default: drawn and printed."),
    ] = None
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="FACTORY(env) returns the policy; default: random actions.",
        ),
    ] = None
    max_steps: MaxSteps = None
    env_kwargs: EnvKwargs = None
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            callback=new_folder,
            help="Write the data: a memory-mapped TensorDict.",
        ),
    ] = None
    gif: Gif = None
    png: Sheet = None
    mp4: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            callback=picture(".mp4"),
            help="Write a video of the first env (MP4).",
        ),
    ] = None
    alone: Annotated[
        bool,
        typer.Option(
            "--alone",
            help="Show the first env alone; in the GIF without captions.",
        ),
    ] = False
    views: Annotated[
        bool,
        typer.Option(
            "--views",
            help="Show the first env's world and what each of its agents observes, with the return so far.",
        ),
    ] = False
    agent: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="I",
            help="Show what agent I of the first env observes.",
        ),
    ] = None
    fps: Annotated[
        float,
        typer.Option(
            min=1,
            max=240,
            help="Steps per second of a video, and of a GIF of the first env alone.",
        ),
    ] = 20.0
    json: Json = None
    quiet: Quiet = False

    def __post_init__(self) -> None:
        """Refuse options that do not go together."""
        is_of_one = self.alone or self.views or self.agent is not None
        if is_of_one and (self.gif, self.png, self.mp4) == (None, None, None):
            raise typer.BadParameter("expected --mp4 or --gif, got neither.")
        if self.views and self.agent is not None:
            raise typer.BadParameter(
                "expected --views or --agent, got both. Leave one out."
            )


@dataclass(frozen=True, kw_only=True)
class Evaluate(Command):
    """Evaluate policies in one env or in several tasks: success, returns and lengths, with 95 % confidence intervals.

    For envs with agents, also: per-capita, collective and per-role returns, and equality.
    """

    env: Annotated[
        list[str],
        typer.Argument(
            metavar="ENV...",
            help=f"One or several of: {ENV_HELP}",
            show_default=False,
        ),
    ]
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="FACTORY(env) returns the policy of a task: a callable, for agents also a dict of policies by agent "
            "and role, or a PerPlayer; default: random actions.",
        ),
    ] = None
    background: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="The same for other agents, or random; default: the bots of a scenario.",
        ),
    ] = None
    focal: Annotated[
        str | None,
        typer.Option(
            metavar="I,J,...",
            help="The focal agents; default: those of the scenario, or all.",
        ),
    ] = None
    episodes: Annotated[
        int,
        typer.Option(min=1, help="Number of episodes of each ENV."),
    ] = 10
    workers: Workers = None
    seed: Annotated[int, typer.Option(min=0, help="Root seed.")] = 0
    max_steps: MaxSteps = None
    env_kwargs: EnvKwargs = None
    json: Json = None
    quiet: Quiet = False


@dataclass(frozen=True, kw_only=True)
class Check(Command):
    """Run an env with random actions and check the rules that training relies on.

    The command builds and steps the env in this process and in two workers. The exit code is 1 if a rule is broken or
    no episode ended.
    """

    env: Env
    steps: Annotated[
        int,
        typer.Option(
            min=1,
            max=1_000_000,  # the command keeps all steps in memory
            help="Steps of each of two envs; episodes must end within them.",
        ),
    ] = 200
    random: Annotated[
        bool,
        typer.Option(
            "--random",
            help="Skip the comparisons of two runs, for envs that seeds do not determine.",
        ),
    ] = False
    together: Annotated[
        int,
        typer.Option(
            min=0,
            help="Also compare this many envs in one process with envs in a process each.",
        ),
    ] = 0
    env_kwargs: EnvKwargs = None
    json: Json = None


@dataclass(frozen=True, kw_only=True)
class Size(Command):
    """Measure ENV on this machine and recommend workers, envs and a way to step them, with reasons.

    The recommendation considers CPU affinity, CPU quota, memory limit, open files and the current load.
    """

    env: Env
    envs: Annotated[
        int | None,
        typer.Option(min=1, help="Fix the number of envs; default: chosen."),
    ] = None
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Fix the number of workers; default: chosen."),
    ] = None
    policy_ms: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=60_000,
            help="Milliseconds that the policy takes per batch.",
        ),
    ] = 0.0
    target_steps_per_s: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Recommend the smallest setting with this many env-steps per second.",
        ),
    ] = None
    episode_steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Steps of an episode; default: measured. Set it for very long episodes.",
        ),
    ] = None
    budget: Annotated[
        float,
        typer.Option(min=0.5, max=_DAY_S, help="Maximum seconds of the measurement."),
    ] = 20.0
    headroom: Annotated[
        float,
        typer.Option(min=0.0, max=0.9, help="Share of the memory to leave free."),
    ] = 0.2
    env_kwargs: EnvKwargs = None
    json: Json = None
    quiet: Quiet = False


@dataclass(frozen=True, kw_only=True)
class Top(Command):
    """Watch this user's running executors: speed, load, memory and current command of each worker.

    Ctrl-C ends it.
    """

    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False
    json: Annotated[
        str | None,
        typer.Option(
            metavar="[PATH]",
            callback=text_file,
            help="Write the latest reading as JSON; - or no PATH prints it: one object with --once, else one per line.",
        ),
    ] = None
    interval: Annotated[
        float,
        typer.Option(min=0.1, max=_DAY_S, help="Refresh interval in seconds."),
    ] = 1.0
    pid: Annotated[
        int | None,
        typer.Option(help="Show only the executors of this process."),
    ] = None
    stack: Annotated[
        int | None,
        typer.Option(
            metavar="WORKER",
            help="Also show the Python stack of the worker in this row, from 0.",
        ),
    ] = None
