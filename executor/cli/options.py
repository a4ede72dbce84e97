"""What the commands take: of each a dataclass, whose docstring is the help and whose fields are the options.

The module of a command has its name, and a function `run(options)`. It is imported when the options have been read,
because that takes seconds, for which a help text and a wrong option need not wait.
"""

import gc
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from envherd.executor.cli.option_values import (
    ENV_HELP,
    Env,
    EnvKwargs,
    Gif,
    Json,
    MaxSteps,
    Quiet,
    Sheet,
    Workers,
    new_folder,
    picture,
    text_file,
)

#: The largest duration, in seconds.
_DAY_S = 86_400


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
    out: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            callback=text_file,
            help="Keep the episodes in this JSON, and continue from it.",
        ),
    ] = None
    videos: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            callback=new_folder,
            help="Write videos of episodes (MP4).",
        ),
    ] = None
    filmed: Annotated[
        int,
        typer.Option(
            min=1,
            help="With --videos: how many episodes of each ENV to record.",
        ),
    ] = 1
    json: Json = None
    quiet: Quiet = False


@dataclass(frozen=True, kw_only=True)
class Replay(Command):
    """Repeat the actions of a stored rollout, or of the episode in a crash capsule, from the same seed.

    The exit code of a rollout is 0 if all observations, rewards and flags are equal, and 1 at the first difference.
    That of a capsule is 0 if the env fails again in the same step and the same way, 1 if anything else happens, and 3
    if no step fails. PATH runs no code: if its env is not looked up by name in an installed package, name the env with
    --env.
    """

    directory: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A folder that `envherd rollout --out DIR` wrote, or a file of ExecutorOptions(capsules=DIR).",
            show_default=False,
        ),
    ]
    env: Annotated[
        str | None,
        typer.Option(metavar="ENV", help="Run this env, in place of the one in PATH."),
    ] = None
    env_kwargs: EnvKwargs = None
    workers: Workers = None
    gif: Gif = None
    png: Sheet = None
    trust: Annotated[
        bool,
        typer.Option(
            "--trust",
            help="Run whatever code a capsule names: import its env, load its pickle.",
        ),
    ] = False
    pdb: Annotated[
        bool,
        typer.Option(
            "--pdb",
            help="Capsule: stop in the debugger before the last step.",
        ),
    ] = False
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            callback=picture(".mp4"),
            help="Capsule: write a video (MP4).",
        ),
    ] = None
    quiet: Quiet = False

    def __post_init__(self) -> None:
        """Refuse options that PATH does not take."""
        if self.directory.is_file():
            if self.workers or self.gif or self.png:
                raise typer.BadParameter(
                    "expected no --workers, --gif or --png for a capsule, which has one env."
                )
        elif self.trust or self.pdb or self.record:
            raise typer.BadParameter(
                f"expected a capsule for --trust, --pdb and --record, got {self.directory}."
            )


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
