"""Implements `envherd evaluate`, from its options to its exit code."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from envherd.executor.cli.commands import carry_out, write_text
from envherd.executor.cli.env_names import callable_at
from envherd.executor.cli.running import Made, call_maker, make
from envherd.executor.options import ExecutorOptions
from envherd.executor.parallel import ParallelEnv
from envherd.executor.show.evaluate import evaluate
from envherd.executor.show.per_player import OTHERS
from envherd.executor.show.results import Evaluation
from envherd.workers.adapters.meltingpot.factory import MeltingPotFactory
from envherd.workers.errors import FactoryError

#: Value in place of MODULE:FACTORY that selects random actions.
_RANDOM = "random"


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest:
    """The options of the command line."""

    env: str
    policy: str | None = None
    background: str | None = None
    focal: str | None = None
    num_episodes: int = 10
    num_envs: int = 4
    num_workers: int | None = None
    seed: int = 0
    max_steps: int | None = None
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    is_quiet: bool = False
    json_path: str | None = None


def run(request: EvaluateRequest) -> int:
    """Evaluate and report; return the exit code. `carry_out` handles errors."""
    return carry_out(lambda: _prepare(request), lambda prepared: _work(request, *prepared))


def _prepare(request: EvaluateRequest) -> tuple[Made, Any, Any]:
    """Check the options before envs start; return the factory, and those of the policies or None."""
    return _make(request), _maker(request.policy, "--policy"), _maker(request.background, "--background")


def _work(request: EvaluateRequest, made: Made, maker: Any, background_maker: Any) -> int:
    """Play and report; return the exit code."""
    console = Console(stderr=request.json_path == "-", quiet=request.is_quiet)
    try:
        found = _evaluate(request, made, maker, background_maker, console)
    except ValueError as error:
        if str(error).startswith(("evaluate failed", "PerPlayer failed")):  # the policies raised the others
            raise FactoryError(str(error)) from None
        raise
    console.print(table(found))
    write_text(request.json_path, json.dumps(found.to_dict(), indent=2) + "\n")
    return 0


def _make(request: EvaluateRequest) -> Made:
    """Return the factory and its keyword arguments. With `--background`, a scenario is built without its bots."""
    factory, kwargs = make(request.env, request.max_steps, request.env_kwargs)
    if isinstance(factory, MeltingPotFactory):
        bots = request.background is None or not factory.is_scenario
        factory = replace(factory, world_rgb=False, deterministic=True, bots=bots)
    return factory, kwargs


def _maker(name: str | None, option: str) -> Any:
    return None if name in (None, _RANDOM) else callable_at(name, f"{option} {name}")


def _evaluate(request: EvaluateRequest, made: Made, maker: Any, background_maker: Any, console: Console) -> Evaluation:
    factory, kwargs = made
    options = ExecutorOptions(episode_statistics=True)
    num_envs = min(request.num_envs, request.num_episodes)
    focal = None if request.focal is None else [_player(name) for name in request.focal.split(",")]
    with (
        console.status(f"playing {request.num_episodes} episodes"),
        ParallelEnv(
            num_envs,
            factory,
            num_workers=request.num_workers,
            seed=request.seed,
            env_kwargs=kwargs or None,
            options=options,
        ) as env,
    ):
        background: Any = None
        if request.background is not None:
            background = {OTHERS: None} if background_maker is None else call_maker(background_maker, env)
        policies = None if maker is None else call_maker(maker, env)
        return evaluate(policies, env, request.num_episodes, background=background, focal=focal, seed=request.seed)


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
