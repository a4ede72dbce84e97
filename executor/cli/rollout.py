"""`envherd rollout ENV`: runs envs with a policy, reports their speed, and writes pictures and data."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from envherd.executor.cli.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED
from envherd.executor.cli.option_values import (
    Env,
    EnvKwargs,
    Gif,
    Json,
    MaxSteps,
    Policy,
    Quiet,
    Seed,
    Sheet,
    Workers,
    new_folder,
)

if TYPE_CHECKING:
    from envherd.executor.batched import BatchedEnv
    from envherd.executor.cli.env_names import Made
    from envherd.executor.cli.figures import Collected
    from envherd.executor.cli.media import Pictures
    from envherd.executor.cli.storing import RolloutStore

#: Seconds between updates of the progress bar; few updates, so that they do not slow down fast envs.
_REFRESH_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Run envs in parallel and report speed, returns and memory.

    After Ctrl-C, the command reports and writes the steps collected until then. A second Ctrl-C ends it at once.
    """

    env: Env
    envs: Annotated[int, typer.Option(min=1, help="Number of envs.")] = 4
    workers: Workers = None
    cluster: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run on the nodes of a Ray cluster: HOST:PORT of its head, or auto."),
    ] = None
    steps: Annotated[int, typer.Option(min=1, help="Steps of each env; envs whose episode ends are reset.")] = 200
    seed: Seed = None
    policy: Policy = None
    max_steps: MaxSteps = None
    env_kwargs: EnvKwargs = None
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", callback=new_folder, help="Write the data: a memory-mapped TensorDict."),
    ] = None
    gif: Gif = None
    png: Sheet = None
    json: Json = None
    quiet: Quiet = False

    def run(self) -> int:
        """Run a rollout and report it; return the exit code."""
        from envherd.executor.cli.commands import carry_out

        return carry_out(self._prepare, lambda prepared: self._work(*prepared))

    def _prepare(self) -> tuple[Made, Any, Pictures, RolloutStore | None]:
        """Check the options before envs start.

        Returns:
            The factory and its arguments, what makes the policy or None, the pictures, and the store or None.
        """
        from envherd.executor.cli.commands import policy_maker
        from envherd.executor.cli.env_names import made_for
        from envherd.executor.cli.media import Pictures
        from envherd.executor.cli.storing import RolloutStore

        pictures = Pictures(self.gif, self.png, self.steps)
        made = made_for(self.env, self.env_kwargs, self.max_steps, with_frames=pictures.are_wanted)
        store = None if self.out is None else RolloutStore(self.out, self.steps)
        return made, policy_maker(self.policy), pictures, store

    def _work(self, made: Made, make_policy: Any, pictures: Pictures, store: RolloutStore | None) -> int:
        """Collect, write and report; return the exit code."""
        import torch

        from envherd.executor.cli.commands import complain, started, write_text
        from envherd.executor.cli.env_names import full_name
        from envherd.executor.cli.figures import figures, table
        from envherd.executor.show.camera import MediaError
        from envherd.workers.processes import memory_of

        console = Console(stderr=self.json == "-", quiet=self.quiet)
        if make_policy is None:
            # Without a policy, torch only copies here, and its threads would compete with the workers for cores:
            # storing 440 MB took 7-16 s with two threads on two busy cores, 1 s with one.
            torch.set_num_threads(1)
        with console.status(f"starting {self.envs} envs"):
            how: dict[str, Any] = {"num_workers": self.workers, "seed": self.seed}
            env = started(made, self.envs, is_drawn=pictures.are_wanted, cluster=self.cluster, **how)
        with env:
            act = env.rand_action if make_policy is None else make_policy(env)
            collected = self._collect(env, act, pictures, store, console)
            memory = memory_of(os.getpid(), is_alone=True)
            requested = {"env": self.env, "num_envs": self.envs, "num_workers": env.num_workers, "seed": env.seed}
            found = figures({**requested, "steps": self.steps}, collected, env.statistics(), memory)
        unwritten: Exception | None = None
        try:
            if collected.steps_done:
                with console.status("writing"):
                    if store is not None:
                        facts = {"env": full_name(self.env), "env_kwargs": self.env_kwargs or {}, "seed": env.seed}
                        store.finish({**facts, "max_steps": self.max_steps})
                        found["files"]["out"] = str(self.out)
                    found["files"] |= pictures.write(self.env)
        except (MediaError, OSError) as error:  # the figures are reported anyway
            unwritten = error
        console.print(table(found))
        write_text(self.json, json.dumps(found, indent=2) + "\n")
        failures = [failure for failure in (collected.failure, unwritten) if failure is not None]
        for failure in failures:
            complain(Console(stderr=True), failure)
        if failures:
            return EXIT_FAILED
        return EXIT_INTERRUPTED if collected.is_interrupted else 0

    def _collect(
        self,
        env: BatchedEnv,
        act: Callable[[Any], Any],
        pictures: Pictures,
        store: RolloutStore | None,
        console: Console,
    ) -> Collected:
        """Collect the steps. Ctrl-C, or an error after the first step, ends the loop; complete steps are kept.

        Raises:
            MediaError: pictures are wanted, but no env has one. Raised before the first step.
            EnvherdError: an env or a worker failed in the first reset or step.
        """
        import torch

        from envherd.executor.cli.commands import noting_interrupt
        from envherd.executor.cli.figures import Collected
        from envherd.executor.cli.returns import Returns
        from envherd.workers.errors import EnvherdError

        found = Collected(returns=Returns(env.spec, env.num_envs))
        clock, shown = time.perf_counter, 0.0
        bar = _bar(console)
        task = bar.add_task("steps", total=self.steps, rate=0.0, episodes=0)
        with bar, torch.no_grad():
            root = env.reset()
            pictures.look(env, 0, root)
            with noting_interrupt() as pressed:
                try:
                    for step in range(1, self.steps + 1):
                        start = clock()
                        td, root = env.step_and_maybe_reset(act(root))
                        stepped = clock()
                        found.returns.add(td["next"])
                        if store is not None:
                            store.add(td)
                        pictures.look(env, step, td["next"])
                        found.steps_done = step
                        found.collect_s += stepped - start
                        found.keep_s += clock() - stepped
                        if clock() - shown > _REFRESH_S or step == self.steps:
                            shown, rate = clock(), step * env.num_envs / found.collect_s
                            bar.update(task, completed=step, rate=rate, episodes=found.returns.num_episodes)
                        if pressed:
                            found.is_interrupted = True
                            break
                except EnvherdError as error:
                    if found.steps_done == 0:
                        raise
                    found.failure = error
        return found


def _bar(console: Console) -> Progress:
    steps = "{task.completed:.0f}/{task.total:.0f} steps"
    speed = "{task.fields[rate]:,.0f} env-steps/s  {task.fields[episodes]} episodes"
    return Progress(
        SpinnerColumn(),
        BarColumn(bar_width=None),
        TextColumn(steps, table_column=Column(no_wrap=True)),
        TextColumn(speed, style="green", table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        console=console,
        expand=True,
    )
