"""`envherd evaluate ENV`: plays whole episodes of envs with players, and reports the returns of the players."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from envherd.executor.cli.option_values import Env, EnvKwargs, Json, MaxSteps, Quiet, Workers

if TYPE_CHECKING:
    from envherd.executor.cli.env_names import Made
    from envherd.executor.show.results import Evaluation

#: Value in place of MODULE:FACTORY that selects random actions.
_RANDOM = "random"


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Evaluate policies: per-capita, collective and per-role returns, and equality, with 95 % confidence intervals."""

    env: Env
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="FACTORY(env) returns the policy of a player, a dict of policies by player and role, or a PerPlayer; "
            "default: random actions.",
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
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes.")] = 10
    envs: Annotated[int, typer.Option(min=1, help="Number of envs that play at once.")] = 4
    workers: Workers = None
    seed: Annotated[int, typer.Option(min=0, help="Root seed.")] = 0
    max_steps: MaxSteps = None
    env_kwargs: EnvKwargs = None
    json: Json = None
    quiet: Quiet = False

    def run(self) -> int:
        """Evaluate and report; return the exit code."""
        from envherd.executor.cli.commands import carry_out

        return carry_out(self._prepare, lambda prepared: self._work(*prepared))

    def _prepare(self) -> tuple[Made, Any, Any]:
        """Check the options before envs start; return the factory, and those of the policies or None."""
        from envherd.executor.cli.commands import policy_maker
        from envherd.executor.cli.env_names import made_for
        from envherd.executor.show.evaluate import for_evaluation
        from envherd.workers.adapters.meltingpot.factory import MeltingPotFactory

        factory, kwargs = made_for(self.env, self.env_kwargs, self.max_steps)
        if isinstance(factory, MeltingPotFactory):
            factory = for_evaluation(factory, has_background=self.background is not None)
        names = [None if name == _RANDOM else name for name in (self.policy, self.background)]
        return (factory, kwargs), policy_maker(names[0]), policy_maker(names[1], "--background")

    def _work(self, made: Made, maker: Any, background_maker: Any) -> int:
        """Play and report; return the exit code."""
        from envherd.executor.cli.commands import write_text
        from envherd.workers.errors import FactoryError

        console = Console(stderr=self.json == "-", quiet=self.quiet)
        try:
            with console.status(f"playing {self.episodes} episodes"):
                found = self._evaluate(made, maker, background_maker)
        except ValueError as error:
            if str(error).startswith(("evaluate failed", "PerPlayer failed")):  # the policies raised the others
                raise FactoryError(str(error)) from None
            raise
        console.print(table(found))
        write_text(self.json, json.dumps(found.to_dict(), indent=2) + "\n")
        return 0

    def _evaluate(self, made: Made, maker: Any, background_maker: Any) -> Evaluation:
        from envherd.executor.cli.commands import started
        from envherd.executor.options import ExecutorOptions
        from envherd.executor.show.evaluate import evaluate
        from envherd.executor.show.per_player import OTHERS

        how: dict[str, Any] = {"num_workers": self.workers, "seed": self.seed}
        how["options"] = ExecutorOptions(episode_statistics=True)
        focal = None if self.focal is None else [_player(name) for name in self.focal.split(",")]
        with started(made, min(self.envs, self.episodes), **how) as env:
            background: Any = None
            if self.background is not None:
                background = {OTHERS: None} if background_maker is None else background_maker(env)
            policies = None if maker is None else maker(env)
            return evaluate(policies, env, self.episodes, background=background, focal=focal, seed=self.seed)


def _player(name: str) -> int | str:
    return int(name) if name.strip().isdigit() else name.strip()


def table(found: Evaluation) -> Table:
    """Return the results as a table for the terminal."""
    title = f"{found.env}: {found.num_episodes} episodes of {found.lengths.mean():.0f} steps, seed {found.seed}"
    grid = Table(title=Text(title, "bold"), title_justify="left", box=box.ROUNDED, show_header=False)
    grid.add_column(style="dim")
    grid.add_column(justify="right")
    grid.add_row("focal return per capita", str(found.focal_per_capita))
    if found.background_per_capita is not None:
        grid.add_row("background return per capita", str(found.background_per_capita))
    grid.add_row("collective return", str(found.collective))
    grid.add_row("equality", str(found.equality), end_section=True)
    for (role, focal), one in found.by_role.items():
        grid.add_row(f"role {role}, {'focal' if focal else 'background'}, per capita", str(one))
    return grid
