"""`envherd evaluate ENV...`: plays whole episodes of one env or of several tasks, and reports success and returns."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from envherd.executor.cli.exit_codes import EXIT_FAILED
from envherd.executor.cli.option_values import (
    ENV_HELP,
    EnvKwargs,
    Json,
    MaxSteps,
    Quiet,
    Workers,
    new_folder,
    text_file,
    write_text,
)

if TYPE_CHECKING:
    from envherd.executor.batched import BatchedEnv
    from envherd.executor.show.results import Evaluation, Evaluations

#: Value in place of MODULE:FACTORY that selects random actions.
_RANDOM = "random"


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Evaluate policies in one env or in several tasks: success, returns and lengths, with 95 % confidence intervals.

    For envs with players, also: per-capita, collective and per-role returns, and equality.
    """

    env: Annotated[
        list[str], typer.Argument(metavar="ENV...", help=f"One or several of: {ENV_HELP}", show_default=False)
    ]
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="FACTORY(env) returns the policy of a task: a callable, for players also a dict of policies by player "
            "and role, or a PerPlayer; default: random actions.",
        ),
    ] = None
    background: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY", help="The same for other players, or random; default: the bots of a scenario."
        ),
    ] = None
    focal: Annotated[
        str | None,
        typer.Option(metavar="I,J,...", help="The focal players; default: those of the scenario, or all."),
    ] = None
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes of each ENV.")] = 10
    workers: Workers = None
    seed: Annotated[int, typer.Option(min=0, help="Root seed.")] = 0
    max_steps: MaxSteps = None
    env_kwargs: EnvKwargs = None
    out: Annotated[
        str | None,
        typer.Option(metavar="PATH", callback=text_file, help="Keep the episodes in this JSON, and continue from it."),
    ] = None
    videos: Annotated[
        Path | None, typer.Option(metavar="DIR", callback=new_folder, help="Write films of episodes (MP4).")
    ] = None
    filmed: Annotated[int, typer.Option(min=1, help="With --videos: how many episodes of each ENV to film.")] = 1
    json: Json = None
    quiet: Quiet = False

    def run(self) -> int:
        """Evaluate and report; return the exit code."""
        from envherd.executor.cli.commands import carry_out

        return carry_out(self._prepare, lambda prepared: self._work(*prepared))

    def _prepare(self) -> tuple[dict[str, Any], Any, Any]:
        """Check the options before envs start; return the factories by task, and those of the policies or None."""
        from envherd.executor.cli.commands import policy_maker
        from envherd.executor.show.evaluate import for_evaluation
        from envherd.executor.show.video import require_imageio
        from envherd.workers.adapters.env_names import made_for
        from envherd.workers.adapters.meltingpot.factory import MeltingPotFactory
        from envherd.workers.errors import FactoryError

        if self.videos is not None:
            require_imageio()
        tasks: dict[str, Any] = {}
        for name in self.env:
            if name in tasks:
                raise FactoryError(f"evaluate failed: expected each ENV once, got {name!r} again.")
            factory, kwargs = made_for(name, self.env_kwargs, None, with_frames=self.videos is not None)
            if isinstance(factory, MeltingPotFactory):
                factory = for_evaluation(factory, has_background=self.background is not None)
            tasks[name] = functools.partial(factory, **kwargs) if kwargs else factory
        names = [None if name == _RANDOM else name for name in (self.policy, self.background)]
        return tasks, policy_maker(names[0]), policy_maker(names[1], "--background")

    def _work(self, tasks: dict[str, Any], maker: Any, background_maker: Any) -> int:
        """Play and report; return the exit code."""
        console = Console(stderr=self.json == "-", quiet=self.quiet)
        with console.status(f"playing {self.episodes} episodes of {len(tasks)} envs"):
            found = self._evaluate(tasks, maker, background_maker)
        is_single = len(tasks) == 1
        one = next(iter(found.tasks.values()))
        console.print(table(one) if is_single else table_of_tasks(found))
        for name, task in found.tasks.items():
            for failed in task.failures[:3]:
                console.print(f"{name}: episode {failed.episode} failed: {failed.error}", highlight=False, markup=False)
        write_text(self.json, json.dumps((one if is_single else found).to_dict(), indent=2) + "\n")
        return EXIT_FAILED if found.num_failed else 0

    def _evaluate(self, tasks: dict[str, Any], maker: Any, background_maker: Any) -> Evaluations:
        from envherd.executor.cli.commands import drawing
        from envherd.executor.show.evaluate import default_options, evaluate, join_policies
        from envherd.executor.show.per_player import OTHERS

        focal = None if self.focal is None else [_player(name) for name in self.focal.split(",")]

        def policy_for(_task: str, env: BatchedEnv) -> Any:
            background: Any = None
            if self.background is not None:
                background = {OTHERS: None} if background_maker is None else background_maker(env)
            return join_policies(None if maker is None else maker(env), env.spec, background, focal)

        return evaluate(
            None,
            tasks,
            self.episodes,
            policy_for=policy_for,
            focal=focal,
            num_workers=self.workers,
            seed=self.seed,
            max_steps=self.max_steps,
            options=drawing(default_options()) if self.videos is not None else None,
            out=self.out,
            label=f"{self.policy or _RANDOM} against {self.background}",
            videos=self.videos,
            filmed=self.filmed,
        )


def _player(name: str) -> int | str:
    return int(name) if name.strip().isdecimal() else name.strip()


def table(found: Evaluation) -> Table:
    """Return the results of one env as a table for the terminal."""
    title = f"{found.env}: {found.num_episodes} episodes, seed {found.seed}"
    grid = Table(title=Text(title, "bold"), title_justify="left", box=box.ROUNDED, show_header=False)
    grid.add_column(style="dim")
    grid.add_column(justify="right")
    if found.num_failed:
        grid.add_row("episodes that failed", str(found.num_failed))
    if found.success is not None:
        grid.add_row("success", str(found.success))
        if found.success_once is not None and found.success_once != found.success:
            grid.add_row("success in any step", str(found.success_once))
        if found.num_failed:
            grid.add_row("success, with failed episodes", str(found.success_of_all))
    grid.add_row("length", str(found.length), end_section=True)
    if len(found.players) == 1:
        grid.add_row("return", str(found.collective))
        return grid
    grid.add_row("focal return per capita", str(found.focal_per_capita))
    if found.background_per_capita is not None:
        grid.add_row("background return per capita", str(found.background_per_capita))
    grid.add_row("collective return", str(found.collective))
    grid.add_row("equality", str(found.equality), end_section=True)
    for (role, focal), one in found.by_role.items():
        grid.add_row(f"role {role}, {'focal' if focal else 'background'}, per capita", str(one))
    return grid


def table_of_tasks(found: Evaluations) -> Table:
    """Return the results of several tasks as a table for the terminal."""
    grid = Table(title=Text(f"{len(found.tasks)} tasks", "bold"), title_justify="left", box=box.ROUNDED)
    grid.add_column("task")
    for name in ("episodes", "failed", "success", "return", "length"):
        grid.add_column(name, justify="right")
    for name, one in found.tasks.items():
        success = "" if one.success is None else str(one.success)
        measures = (success, str(one.focal_per_capita), str(one.length))
        is_last = name == next(reversed(found.tasks))
        grid.add_row(name, str(one.num_episodes), str(one.num_failed), *measures, end_section=is_last)
    number = sum(one.num_episodes for one in found.tasks.values())
    success = "" if found.success is None else str(found.success)
    grid.add_row("all", str(number), str(found.num_failed), success, str(found.focal_per_capita), "")
    return grid
