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

from envherd.executor.cli.config import read_config, settings
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
    read_keyword_arguments,
)

if TYPE_CHECKING:
    from envherd.executor.batched import BatchedEnv
    from envherd.executor.cli.commands import Made
    from envherd.executor.cli.figures import Collected
    from envherd.executor.cli.media import FrameLog
    from envherd.executor.cli.storing import RolloutStore
    from envherd.executor.options import ExecutorOptions

#: Seconds between updates of the progress bar; few updates, so that they do not slow down fast envs.
_REFRESH_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Run envs in parallel and report speed, returns and memory.

    After Ctrl-C, the command reports and writes the steps collected until then.
    """

    context: typer.Context
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
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=read_config,
            is_eager=True,
            help="YAML file with options, e.g. from `envherd size --yaml`.",
        ),
    ] = None
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

        settings(self.context)  # refuses wrong entries of --config
        return carry_out(self._prepare, lambda prepared: self._work(*prepared))

    @property
    def _wants_frames(self) -> bool:
        return self.gif is not None or self.png is not None

    def _prepare(self) -> tuple[Made, ExecutorOptions, Any, RolloutStore | None]:
        """Check the options before envs start.

        Returns:
            The factory and its arguments, the executor's options, what makes the policy or None, and the store or None.
        """
        from envherd.executor.cli.commands import make
        from envherd.executor.cli.env_names import callable_at
        from envherd.executor.cli.media import require_pillow
        from envherd.executor.cli.storing import RolloutStore

        kwargs = read_keyword_arguments(self.env_kwargs)
        made = make(self.env, self.max_steps, kwargs, with_frames=self._wants_frames)
        make_policy = None if self.policy is None else callable_at(self.policy, f"--policy {self.policy}")
        if self._wants_frames:
            require_pillow()
        store = None if self.out is None else RolloutStore(self.out, self.steps)
        return made, self._options(), make_policy, store

    def _options(self) -> ExecutorOptions:
        """Return the options of the executor.

        Raises:
            FactoryError: the file of `--config` has an unknown option, or an invalid value.
        """
        from envherd.executor.cli.commands import with_display
        from envherd.executor.options import ExecutorOptions
        from envherd.workers.errors import FactoryError

        try:
            options = ExecutorOptions(**settings(self.context)[1])
        except (TypeError, ValueError) as error:
            raise FactoryError(f"--config failed: {error}") from None
        return with_display(options, is_drawn=self._wants_frames)

    def _work(self, made: Made, options: ExecutorOptions, make_policy: Any, store: RolloutStore | None) -> int:
        """Collect, write and report; return the exit code."""
        import torch

        from envherd.executor.cli.commands import call_maker, complain, write_text
        from envherd.executor.cli.figures import figures, table
        from envherd.executor.cli.media import FrameLog
        from envherd.executor.show.camera import MediaError
        from envherd.workers.processes import memory_of

        console = Console(stderr=self.json == "-", quiet=self.quiet)
        if make_policy is None:
            # Without a policy, torch only copies here, and its threads would compete with the workers for cores:
            # storing 440 MB took 7-16 s with two threads on two busy cores, 1 s with one.
            torch.set_num_threads(1)
        frames = FrameLog(self.steps) if self._wants_frames else None
        with console.status(f"starting {self.envs} envs"):
            env = self._start(made, options)
        with env:
            act = env.rand_action if make_policy is None else call_maker(make_policy, env)
            collected = self._collect(env, act, frames, store, console)
            memory = memory_of(os.getpid(), is_alone=True)
            requested = {"env": self.env, "num_envs": self.envs, "num_workers": env.num_workers, "seed": env.seed}
            found = figures({**requested, "steps": self.steps}, collected, env.statistics(), memory)
        unwritten: Exception | None = None
        try:
            if collected.steps_done:
                found["files"] = self._write(frames, store, found["seed"], console)
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

    def _start(self, made: Made, options: ExecutorOptions) -> BatchedEnv:
        factory, kwargs = made
        how: dict[str, Any] = {"num_workers": self.workers, "seed": self.seed, "options": options}
        how["env_kwargs"] = kwargs or None
        if self.cluster is not None:
            from envherd.executor.cluster import RayParallelEnv

            return RayParallelEnv(self.envs, factory, address=self.cluster, **how)
        from envherd.executor.parallel import ParallelEnv
        from envherd.executor.serial import SerialEnv

        is_serial, _ = settings(self.context)
        return (SerialEnv if is_serial else ParallelEnv)(self.envs, factory, **how)

    def _collect(
        self,
        env: BatchedEnv,
        act: Callable[[Any], Any],
        frames: FrameLog | None,
        store: RolloutStore | None,
        console: Console,
    ) -> Collected:
        """Collect the steps. Ctrl-C, or an error after the first step, ends the loop; complete steps are kept.

        Raises:
            MediaError: `frames` is set, but no env has a picture. Raised before the first step.
            EnvherdError: an env or a worker failed in the first reset or step.
        """
        import torch

        from envherd.executor.cli.figures import Collected
        from envherd.executor.cli.interrupts import DeferredInterrupt
        from envherd.executor.cli.returns import Returns
        from envherd.executor.show.camera import Camera
        from envherd.workers.errors import EnvherdError

        found, camera = Collected(returns=Returns(env.spec, env.num_envs)), Camera(env)
        clock, shown = time.perf_counter, 0.0
        bar = _bar(console)
        task = bar.add_task("steps", total=self.steps, rate=0.0, episodes=0)
        with bar, torch.no_grad(), DeferredInterrupt() as interrupts:
            try:
                root = env.reset()
                if frames is not None:
                    frames.add(0, camera.look(root))
                for step in range(1, self.steps + 1):
                    start = clock()
                    td, following = env.step_and_maybe_reset(act(root))
                    interrupts.hold()
                    stepped = clock()
                    found.returns.add(td["next"])
                    if store is not None:
                        store.add(td)
                    if frames is not None and frames.wants(step):
                        frames.add(step, camera.look(td["next"]))
                    root = following
                    found.steps_done = step
                    found.collect_s += stepped - start
                    found.keep_s += clock() - stepped
                    if clock() - shown > _REFRESH_S or step == self.steps:
                        shown, rate = clock(), step * env.num_envs / found.collect_s
                        bar.update(task, completed=step, rate=rate, episodes=found.returns.num_episodes)
                    interrupts.release()
            except KeyboardInterrupt:
                found.is_interrupted = True
            except EnvherdError as error:
                if found.steps_done == 0:
                    raise
                found.failure = error
        return found

    def _write(
        self, frames: FrameLog | None, store: RolloutStore | None, seed: int, console: Console
    ) -> dict[str, str]:
        """Write the requested files; return name -> path."""
        from envherd.executor.cli.env_names import full_name
        from envherd.executor.cli.media import write_pictures

        with console.status("writing"):
            if store is not None:
                kwargs, options = read_keyword_arguments(self.env_kwargs), settings(self.context)[1]
                facts = {"env": full_name(self.env), "env_kwargs": kwargs, "seed": seed}
                store.finish({**facts, "max_steps": self.max_steps, "options": options})
            written = {} if store is None else {"out": str(self.out)}
            return {**written, **write_pictures(frames, self.gif, self.png, self.env)}


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
