"""`envherd rollout ENV`: runs envs with a policy, reports their speed, and writes pictures and data."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from envherd.executor.batched import BatchedEnv
from envherd.executor.cli.commands import carry_out, complain, noting_interrupt, policy_maker, started, write_text
from envherd.executor.cli.env_names import Made, full_name, made_for
from envherd.executor.cli.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED
from envherd.executor.cli.figures import Collected, figures, table
from envherd.executor.cli.media import Pictures
from envherd.executor.cli.options import Rollout
from envherd.executor.cli.returns import Returns
from envherd.executor.cli.storing import RolloutStore
from envherd.executor.show.camera import MediaError
from envherd.workers.errors import EnvherdError
from envherd.workers.processes import memory_of

#: Seconds between updates of the progress bar; few updates, so that they do not slow down fast envs.
_REFRESH_S = 0.1


def run(options: Rollout) -> int:
    """Run a rollout and report it; return the exit code."""
    return carry_out(lambda: _prepare(options), lambda prepared: _work(options, *prepared))


def _prepare(options: Rollout) -> tuple[Made, Any, Pictures, RolloutStore | None]:
    """Check the options before envs start.

    Returns:
        The factory and its arguments, what makes the policy or None, the pictures, and the store or None.
    """
    pictures = Pictures(options.gif, options.png, options.steps)
    made = made_for(options.env, options.env_kwargs, options.max_steps, with_frames=pictures.are_wanted)
    store = None if options.out is None else RolloutStore(options.out, options.steps)
    return made, policy_maker(options.policy), pictures, store


def _work(options: Rollout, made: Made, make_policy: Any, pictures: Pictures, store: RolloutStore | None) -> int:
    """Collect, write and report; return the exit code."""
    console = Console(stderr=options.json == "-", quiet=options.quiet)
    if make_policy is None:
        # Without a policy, torch only copies here, and its threads would compete with the workers for cores:
        # storing 440 MB took 7-16 s with two threads on two busy cores, 1 s with one.
        torch.set_num_threads(1)
    with console.status(f"starting {options.envs} envs"):
        how: dict[str, Any] = {"num_workers": options.workers, "seed": options.seed}
        env = started(made, options.envs, is_drawn=pictures.are_wanted, cluster=options.cluster, **how)
    with env:
        act = env.rand_action if make_policy is None else make_policy(env)
        collected = _collect(options, env, act, pictures, store, console)
        memory = memory_of(os.getpid(), is_alone=True)
        requested = {"env": options.env, "num_envs": options.envs, "num_workers": env.num_workers, "seed": env.seed}
        found = figures({**requested, "steps": options.steps}, collected, env.statistics(), memory)
    unwritten: Exception | None = None
    try:
        if collected.steps_done:
            with console.status("writing"):
                if store is not None:
                    facts = {"env": full_name(options.env), "env_kwargs": options.env_kwargs or {}, "seed": env.seed}
                    store.finish({**facts, "max_steps": options.max_steps})
                    found["files"]["out"] = str(options.out)
                found["files"] |= pictures.write(options.env)
    except (MediaError, OSError) as error:  # the figures are reported anyway
        unwritten = error
    console.print(table(found))
    write_text(options.json, json.dumps(found, indent=2) + "\n")
    failures = [failure for failure in (collected.failure, unwritten) if failure is not None]
    for failure in failures:
        complain(Console(stderr=True), failure)
    if failures:
        return EXIT_FAILED
    return EXIT_INTERRUPTED if collected.is_interrupted else 0


def _collect(
    options: Rollout,
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
    found = Collected(returns=Returns(env.spec, env.num_envs))
    clock, shown = time.perf_counter, 0.0
    bar = _bar(console)
    task = bar.add_task("steps", total=options.steps, rate=0.0, episodes=0)
    with bar, torch.no_grad():
        root = env.reset()
        pictures.look(env, 0, root)
        with noting_interrupt() as pressed:
            try:
                for step in range(1, options.steps + 1):
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
                    if clock() - shown > _REFRESH_S or step == options.steps:
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
