"""`envherd rollout ENV`: runs envs with a policy, reports their speed, and writes pictures and data."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text
from tensordict import TensorDict, TensorDictBase

from envherd.executor.cli.commands import (
    RolloutStore,
    carry_out,
    complain,
    drawing,
    noting_interrupt,
    policy_maker,
    table_of_facts,
)
from envherd.executor.cli.media import Pictures, Returns
from envherd.executor.cli.options import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    Rollout,
    write_json,
)
from envherd.executor.guests.monitor import Statistics
from envherd.executor.options import ExecutorOptions
from envherd.executor.parallel import ParallelEnv
from envherd.executor.rollouts.policy_state import run_policy
from envherd.executor.show.camera import MediaError
from envherd.executor.show.per_player import as_policy
from envherd.executor.sizing.rule import size_text
from envherd.workers.adapters.env_names import Made, full_name, made_for
from envherd.workers.errors import EnvherdError
from envherd.workers.processes import memory_of

if TYPE_CHECKING:
    from envherd.executor.cluster.rollouts import RayRollouts

SCHEMA = "envherd.rollout/1"
#: Fields of `WorkerStatistics` in the figures.
_OF_WORKER = ("worker_id", "pid", "env_ids", "busy_share", "uss_bytes", "pss_bytes")
#: Counts that are summed over the nodes of a cluster.
_SUMMED = (
    "env_steps",
    "agent_steps",
    "resets",
    "env_errors",
    "worker_losses",
    "interrupted",
)
#: Steps of a rollout on a cluster; the bar moves, and Ctrl-C ends the command, after this number.
_CHUNK = 50
#: Agents shown by name in the table; the JSON has all of them.
_MAX_NAMES = 16


def run(options: Rollout) -> int:
    """Run a rollout and report it; return the exit code."""
    return carry_out(
        lambda: _prepare(options),
        lambda prepared: _work(options, *prepared),
    )


def _prepare(options: Rollout) -> tuple[Made, Any, Pictures, RolloutStore | None]:
    """Check the options before envs start.

    Returns:
        The factory and its arguments, what makes the policy or None, the pictures, and the store or None.
    """
    pictures = Pictures(
        options.gif,
        options.png,
        options.steps,
        mp4=options.mp4,
        alone=options.alone,
        views=options.views,
        agent=options.agent,
        fps=options.fps,
    )
    if pictures.are_wanted and options.ray is not None:
        raise MediaError(
            "--gif, --png or --mp4 failed: expected envs on this machine, got --ray. Leave one out."
        )
    made = made_for(
        options.env,
        options.env_kwargs,
        options.max_steps,
        with_frames=pictures.are_drawn,
    )
    store = None if options.out is None else RolloutStore(options.out, options.steps)
    return made, policy_maker(options.policy), pictures, store


def _work(
    options: Rollout,
    made: Made,
    make_policy: Any,
    pictures: Pictures,
    store: RolloutStore | None,
) -> int:
    """Collect, write and report; return the exit code."""
    console = Console(stderr=options.json == "-", quiet=options.quiet)
    if make_policy is None:
        # Without a policy, torch only copies here, and its threads would compete with the workers for cores:
        # storing 440 MB took 7-16 s with two threads on two busy cores, 1 s with one.
        torch.set_num_threads(1)
    with console.status(f"starting {options.envs} envs"):
        factory, kwargs = made
        how: dict[str, Any] = {
            "env_kwargs": kwargs or None,
            "num_workers": options.workers,
            "seed": options.seed,
        }
        if options.ray is None:
            env: ParallelEnv | RayRollouts = ParallelEnv(
                options.envs,
                factory,
                options=drawing(ExecutorOptions()) if pictures.are_drawn else None,
                **how,
            )
        else:
            # Imported here: only --ray needs Ray.
            from envherd.executor.cluster.rollouts import RayRollouts

            env = RayRollouts(
                options.envs,
                factory,
                address=options.ray,
                **how,
            )
    with env, contextlib.closing(pictures):
        act = (
            None
            if make_policy is None
            else functools.partial(
                run_policy,
                as_policy("--policy", make_policy(env), env.specs[0]),
            )
        )
        counted, returns, failure = _collect(
            options,
            env,
            act,
            pictures,
            store,
            console,
        )
        found = figures(
            {
                "env": options.env,
                "num_envs": options.envs,
                "num_workers": env.num_workers,
                "seed": env.seed,
                "steps": options.steps,
            },
            counted,
            returns,
            _totals(env),
            memory_of(os.getpid(), is_alone=True),
        )
    failures: list[Exception] = [] if failure is None else [failure]
    try:
        if counted["steps_done"]:
            with console.status("writing"):
                if store is not None:
                    store.finish(
                        {
                            "env": full_name(options.env),
                            "env_kwargs": options.env_kwargs or {},
                            "seed": env.seed,
                            "max_steps": options.max_steps,
                        }
                    )
                    found["files"]["out"] = str(options.out)
                found["files"] |= pictures.write(options.env)
    except (MediaError, OSError) as error:  # the figures are reported anyway
        failures.append(error)
    console.print(table(found))
    write_json(options.json, found)
    for one in failures:
        complain(Console(stderr=True), one)
    if failures:
        return EXIT_FAILED
    return EXIT_INTERRUPTED if counted["interrupted"] else 0


def _totals(env: ParallelEnv | RayRollouts) -> Statistics:
    """Return the statistics of all envs; on a cluster without workers."""
    if isinstance(env, ParallelEnv):
        return env.statistics()
    nodes = env.statistics()
    return replace(
        nodes[0],
        workers=(),
        **{name: sum(getattr(one, name) for one in nodes) for name in _SUMMED},
    )


def _stepped(
    env: ParallelEnv | RayRollouts,
    act: Callable[[Any], Any] | None,
    root: Any,
    num_steps: int,
    *,
    is_drawn: bool,
) -> Iterator[TensorDictBase]:
    """Yield each step of all envs, from their root. Envs that are drawn are reset after it, not by it."""
    if isinstance(env, ParallelEnv):
        act = act or env.rand_action
        for _ in range(num_steps):
            if is_drawn:
                td = env.step(act(root))
                yield td
                root = env.reset(
                    TensorDict({"_reset": td["next", "done"]}, env.batch_size)
                )
            else:
                td, root = env.step_and_maybe_reset(act(root))
                yield td
        return
    # The first chunk resets the envs; the others continue their episodes.
    for first in range(0, num_steps, _CHUNK):
        yield from env.rollout(
            min(_CHUNK, num_steps - first),
            act,
            auto_reset=not first,
        ).unbind(1)


def _collect(
    options: Rollout,
    env: ParallelEnv | RayRollouts,
    act: Callable[[Any], Any] | None,
    pictures: Pictures,
    store: RolloutStore | None,
    console: Console,
) -> tuple[dict[str, Any], Returns, EnvherdError | None]:
    """Collect the steps. Ctrl-C, or an error after the first step, ends the loop; complete steps are kept.

    Returns:
        What the loop counts, as docs/cli.md has it: "steps_done", "collect_s", "keep_s", "interrupted" and "error"; the
        returns of the agents; and the error that ended the loop after at least one step, or None.

    Raises:
        MediaError: pictures are wanted, but no env has one. Raised before the first step.
        EnvherdError: an env or a worker failed in the first reset or step.
    """
    counted: dict[str, Any] = {
        "steps_done": 0,
        "collect_s": 0.0,
        "keep_s": 0.0,
        "interrupted": False,
        "error": None,
    }
    returns = Returns(env.specs[0], env.num_envs)
    failure: EnvherdError | None = None
    bar = Progress(
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        TextColumn(
            "{task.fields[rate]:,.0f} env-steps/s  {task.fields[episodes]} episodes",
            style="green",
        ),
        console=console,
    )
    task = bar.add_task("steps", total=options.steps, rate=0.0, episodes=0)
    with bar, torch.no_grad():
        root = None
        if isinstance(env, ParallelEnv):
            root = env.reset()
            pictures.look(env, 0, root)
        steps = _stepped(env, act, root, options.steps, is_drawn=pictures.are_wanted)
        with noting_interrupt() as pressed:
            try:
                for step in range(1, options.steps + 1):
                    start = time.perf_counter()
                    td = next(steps)
                    stepped = time.perf_counter()
                    returns.add(td["next"])
                    if store is not None:
                        store.add(td)
                    if isinstance(env, ParallelEnv):
                        pictures.look(env, step, td["next"])
                    counted["steps_done"] = step
                    counted["collect_s"] += stepped - start
                    now = time.perf_counter()
                    counted["keep_s"] += now - stepped
                    bar.update(
                        task,
                        completed=step,
                        rate=step * env.num_envs / counted["collect_s"],
                        episodes=returns.num_episodes,
                    )
                    counted["interrupted"] = bool(pressed)
                    if pressed or returns.num_episodes >= (
                        options.episodes or math.inf
                    ):
                        break
            except EnvherdError as error:
                # There is nothing to report or to write.
                if not counted["steps_done"]:
                    raise
                failure = error
                counted["error"] = str(error)
    return counted, returns, failure


def figures(
    requested: Mapping[str, Any],
    counted: Mapping[str, Any],
    returns: Returns,
    done: Statistics,
    parent: Mapping[str, int],
) -> dict[str, Any]:
    """Return the figures, ready for `json.dump`.

    Args:
        requested: "env", "num_envs", "num_workers", "seed" and "steps".
        counted: by the loop; see `_collect`.
        returns: of the agents.
        done: statistics of the executor after the last step.
        parent: bytes of this process, "uss" (private) and "pss" (with its share of shared memory).
    """
    env_steps = counted["steps_done"] * requested["num_envs"]
    env_steps_per_s = (
        env_steps / counted["collect_s"] if counted["collect_s"] > 0 else 0.0
    )
    # If the envs run in this process, its memory includes theirs.
    workers = (
        []
        if any(worker.pid == os.getpid() for worker in done.workers)
        else done.workers
    )
    return {
        "schema": SCHEMA,
        **requested,
        **counted,
        "env_steps": env_steps,
        "env_steps_per_s": env_steps_per_s,
        "agent_steps_per_s": env_steps_per_s
        * (done.agent_steps / done.env_steps if done.env_steps else 1),
        "episodes": returns.num_episodes,
        "mean_return": returns.means(),
        "mean_return_is_partial": returns.num_episodes == 0,
        "resets": done.resets,
        "env_errors": done.env_errors,
        "worker_losses": done.worker_losses,
        "interrupted_rows": done.interrupted,
        "workers": [
            {name: getattr(worker, name) for name in _OF_WORKER}
            for worker in done.workers
        ],
        "memory": {
            "workers_uss_bytes": sum(worker.uss_bytes for worker in workers),
            "workers_pss_bytes": sum(worker.pss_bytes for worker in workers),
            "parent_uss_bytes": parent["uss"],
            "parent_pss_bytes": parent["pss"],
        },
        "files": {},
    }


def table(found: Mapping[str, Any]) -> RenderableType:
    """Return the figures as a table for the terminal."""
    return Group(_summary(found), _workers(found))


def _summary(found: Mapping[str, Any]) -> Table:
    why = "enough episodes"
    if found["interrupted"]:
        why = "interrupted"
    elif found["error"]:
        why = "failed"
    done = found["steps_done"]
    collect_s = found["collect_s"]
    keep_s = found["keep_s"]
    asked = f" of {found['steps']} ({why})" if done < found["steps"] else ""
    keep = f", and {keep_s:.2f} s to draw and store" if keep_s > 0.1 * collect_s else ""
    names = list(found["mean_return"].items())
    more = f"  and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    returns = "  ".join(f"{name} {mean:.2f}" for name, mean in names[:_MAX_NAMES])
    troubles = {
        "env errors": "env_errors",
        "workers lost": "worker_losses",
        "rows interrupted": "interrupted_rows",
    }
    rows: dict[str, RenderableType] = {
        "env-steps/s": Text(f"{found['env_steps_per_s']:,.0f}", "bold green"),
        "agent-steps/s": Text(f"{found['agent_steps_per_s']:,.0f}", "bold green"),
        "steps": f"{done}{asked} x {found['num_envs']} envs in {collect_s:.2f} s{keep}",
        "episodes": f"{found['episodes']} ended",
        "return so far" if found["mean_return_is_partial"] else "mean return": returns
        + more,
        **{
            name: Text(str(found[key]), "bold red")
            for name, key in troubles.items()
            if found[key]
        },
        "seed": str(found["seed"]),
        **{kind: Text(path, "cyan") for kind, path in found["files"].items()},
    }
    return table_of_facts(found["env"], rows)


def _workers(found: Mapping[str, Any]) -> Table:
    workers = found["workers"]
    memory = found["memory"]
    # Workers in this process have no memory of their own; see `figures`.
    has_own = memory["workers_uss_bytes"] > 0
    busy = sum(worker["busy_share"] for worker in workers) / max(1, len(workers))
    grid = Table(box=box.ROUNDED, show_footer=True)
    grid.add_column("process", "all", no_wrap=True)
    grid.add_column("env ids", f"of {found['num_envs']}", justify="right")
    grid.add_column("busy", f"{busy:.0%}", justify="right")
    for name, kind in (("own memory (USS)", "uss"), ("with shared part (PSS)", "pss")):
        grid.add_column(
            name,
            size_text(memory[f"workers_{kind}_bytes"] + memory[f"parent_{kind}_bytes"]),
            justify="right",
        )
    for worker in workers:
        sizes = [
            size_text(worker[f"{kind}_bytes"]) if has_own else ""
            for kind in ("uss", "pss")
        ]
        ids = worker["env_ids"]
        shown = str(ids[0]) if len(ids) == 1 else f"{ids[0]}-{ids[-1]}"
        grid.add_row(
            f"worker {worker['worker_id']}",
            shown,
            f"{worker['busy_share']:.0%}",
            *sizes,
        )
    grid.add_row(
        "parent",
        "",
        "",
        size_text(memory["parent_uss_bytes"]),
        size_text(memory["parent_pss_bytes"]),
        style="dim",
    )
    return grid
