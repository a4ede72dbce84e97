"""`envherd evaluate ENV...`: plays whole episodes of one env or of several tasks, and reports success and returns."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from envherd.executor.batched import BatchedEnv
from envherd.executor.cli.commands import (
    carry_out,
    policy_maker,
    table_of_facts,
)
from envherd.executor.cli.options import EXIT_FAILED, Evaluate, write_json
from envherd.executor.show.evaluate import evaluate, join_policies, tasks_of
from envherd.executor.show.per_player import OTHERS
from envherd.executor.show.results import Evaluation, Evaluations


def run(options: Evaluate) -> int:
    """Evaluate and report; return the exit code."""
    return carry_out(
        lambda: _prepare(options),
        lambda prepared: _work(options, *prepared),
    )


def _prepare(options: Evaluate) -> tuple[dict[str, Any], Any, Any]:
    """Check the options before envs start; return the factories by task, and those of the policies or None."""
    tasks = tasks_of(
        options.env,
        options.env_kwargs,
        has_background=options.background is not None,
    )
    return (
        tasks,
        policy_maker(options.policy),
        policy_maker(options.background, "--background"),
    )


def _work(
    options: Evaluate,
    tasks: dict[str, Any],
    maker: Any,
    background_maker: Any,
) -> int:
    """Play and report; return the exit code."""
    console = Console(stderr=options.json == "-", quiet=options.quiet)
    focal: list[int | str] | None = None
    if options.focal is not None:
        focal = [
            int(name) if name.isdecimal() else name
            for name in map(str.strip, options.focal.split(","))
        ]

    def policy_for(_task: str, env: BatchedEnv) -> Any:
        background: Any = None
        if options.background is not None:
            background = (
                {OTHERS: None} if background_maker is None else background_maker(env)
            )
        return join_policies(
            None if maker is None else maker(env),
            env.spec,
            background,
            focal,
        )

    with console.status(f"playing {options.episodes} episodes of {len(tasks)} envs"):
        found = evaluate(
            None,
            tasks,
            options.episodes,
            policy_for=policy_for,
            focal=focal,
            num_workers=options.workers,
            seed=options.seed,
            max_steps=options.max_steps,
        )
    is_single = len(tasks) == 1
    one = next(iter(found.tasks.values()))
    console.print(table(one) if is_single else table_of_tasks(found))
    for name, task in found.tasks.items():
        for failed in task.failures[:3]:
            console.print(
                f"{name}: episode {failed.episode} failed: {failed.error}",
                highlight=False,
                markup=False,
            )
    write_json(options.json, (one if is_single else found).to_dict())
    return EXIT_FAILED if found.num_failed else 0


def table(found: Evaluation) -> Table:
    """Return the results of one env as a table for the terminal."""
    rows = {
        "episodes that failed": found.num_failed or None,
        "success": found.success,
        "success in any step": None
        if found.success_once == found.success
        else found.success_once,
        "length": found.length,
    }
    if len(found.players) == 1:
        rows |= {"return": found.collective}
    else:
        rows |= {
            "focal return per capita": found.focal_per_capita,
            "background return per capita": found.background_per_capita,
            "collective return": found.collective,
            "equality": found.equality,
            **{
                f"role {kind.role}, {'focal' if kind.is_focal else 'background'}, per capita": one
                for kind, one in found.by_role.items()
            },
        }
    return table_of_facts(
        f"{found.env}: {found.num_episodes} episodes, seed {found.seed}",
        {name: str(one) for name, one in rows.items() if one is not None},
        lines_below=("length", "equality"),
        justify="right",
    )


def table_of_tasks(found: Evaluations) -> Table:
    """Return the results of several tasks as a table for the terminal."""
    grid = Table(
        title=Text(f"{len(found.tasks)} tasks", "bold"),
        title_justify="left",
        box=box.ROUNDED,
    )
    grid.add_column("task")
    for name in ("episodes", "failed", "success", "return", "length"):
        grid.add_column(name, justify="right")
    for name, one in found.tasks.items():
        grid.add_row(
            name,
            str(one.num_episodes),
            str(one.num_failed),
            str(one.success or ""),
            str(one.focal_per_capita),
            str(one.length),
            end_section=name == next(reversed(found.tasks)),
        )
    grid.add_row(
        "all",
        str(sum(one.num_episodes for one in found.tasks.values())),
        str(found.num_failed),
        str(found.success or ""),
        str(found.focal_per_capita),
        "",
    )
    return grid
