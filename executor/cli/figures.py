"""The figures of a rollout: a dict for programs, which docs/cli.md documents, and a table of it for readers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from envherd.executor.cli.returns import Returns
from envherd.executor.cli.sizing_report import size_text
from envherd.executor.monitor.statistics import Statistics
from envherd.workers.errors import EnvherdError

SCHEMA = "envherd.rollout/1"
#: Fields of `WorkerStatistics` in the figures.
_OF_WORKER = ("worker_id", "pid", "env_ids", "busy_share", "uss_bytes", "pss_bytes")
#: Agents shown by name in the table; the JSON has all of them.
_MAX_NAMES = 16


@dataclass(kw_only=True)
class Collected:
    """What the loop of a rollout counts.

    Attributes:
        returns: of the agents.
        steps_done: completed steps of the whole batch.
        collect_s: seconds in the policy, in steps and in resets of envs whose episode ended. Excludes the
            start of workers, the first reset, and `keep_s`.
        keep_s: seconds for drawing, counting and storing.
        is_interrupted: Ctrl-C ended the rollout.
        failure: the error that ended the rollout after at least one step, or None.
    """

    returns: Returns
    steps_done: int = 0
    collect_s: float = 0.0
    keep_s: float = 0.0
    is_interrupted: bool = False
    failure: EnvherdError | None = None


def figures(
    requested: Mapping[str, Any], collected: Collected, done: Statistics, parent: Mapping[str, int]
) -> dict[str, Any]:
    """Return the figures, ready for `json.dump`.

    Args:
        requested: "env", "num_envs", "num_workers", "seed" and "steps".
        collected: by the loop.
        done: statistics of the executor after the last step.
        parent: bytes of this process, "uss" (private) and "pss" (with its share of shared memory).
    """
    env_steps = collected.steps_done * requested["num_envs"]
    env_steps_per_s = env_steps / collected.collect_s if collected.collect_s > 0 else 0.0
    # If the envs run in this process, its memory includes theirs.
    workers = [] if any(worker.pid == os.getpid() for worker in done.workers) else done.workers
    return {
        "schema": SCHEMA,
        **requested,
        "steps_done": collected.steps_done,
        "interrupted": collected.is_interrupted,
        "error": None if collected.failure is None else str(collected.failure),
        "collect_s": collected.collect_s,
        "keep_s": collected.keep_s,
        "env_steps": env_steps,
        "env_steps_per_s": env_steps_per_s,
        "agent_steps_per_s": env_steps_per_s * (done.agent_steps / done.env_steps if done.env_steps else 1),
        "episodes": collected.returns.num_episodes,
        "mean_return": collected.returns.means(),
        "mean_return_is_partial": collected.returns.num_episodes == 0,
        "resets": done.resets,
        "env_errors": done.env_errors,
        "worker_losses": done.worker_losses,
        "interrupted_rows": done.interrupted,
        "workers": [{name: getattr(worker, name) for name in _OF_WORKER} for worker in done.workers],
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
    grid = Table(title=Text(found["env"], "bold"), title_justify="left", box=box.ROUNDED, show_header=False)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    why = "interrupted" if found["interrupted"] else "failed"
    done, collect_s, keep_s = found["steps_done"], found["collect_s"], found["keep_s"]
    asked = f" of {found['steps']} ({why})" if done < found["steps"] else ""
    keep = f", and {keep_s:.2f} s to draw and store" if keep_s > 0.1 * collect_s else ""
    grid.add_row("env-steps/s", Text(f"{found['env_steps_per_s']:,.0f}", "bold green"))
    grid.add_row("agent-steps/s", Text(f"{found['agent_steps_per_s']:,.0f}", "bold green"))
    grid.add_row("steps", f"{done}{asked} x {found['num_envs']} envs in {collect_s:.2f} s{keep}")
    grid.add_row("episodes", f"{found['episodes']} ended")
    names = list(found["mean_return"].items())
    more = f"  and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    returns = "  ".join(f"{name} {mean:.2f}" for name, mean in names[:_MAX_NAMES])
    grid.add_row("return so far" if found["mean_return_is_partial"] else "mean return", returns + more)
    troubles = ("env_errors", "env errors"), ("worker_losses", "workers lost"), ("interrupted_rows", "rows interrupted")
    for key, name in troubles:
        if found[key]:
            grid.add_row(name, Text(str(found[key]), "bold red"))
    grid.add_row("seed", str(found["seed"]))
    for kind, path in found["files"].items():
        grid.add_row(kind, Text(path, "cyan"))
    return grid


def _workers(found: Mapping[str, Any]) -> Table:
    workers, memory = found["workers"], found["memory"]
    has_own = memory["workers_uss_bytes"] > 0
    busy = sum(worker["busy_share"] for worker in workers) / max(1, len(workers))
    grid = Table(box=box.ROUNDED, show_footer=True)
    grid.add_column("process", "all", no_wrap=True)
    grid.add_column("envs", str(found["num_envs"]), justify="right")
    grid.add_column("busy", f"{busy:.0%}", justify="right")
    for name, kind in (("own memory (USS)", "uss"), ("with shared part (PSS)", "pss")):
        total = memory[f"workers_{kind}_bytes"] + memory[f"parent_{kind}_bytes"]
        grid.add_column(name, size_text(total), justify="right")
    for worker in workers:
        sizes = (size_text(worker["uss_bytes"]), size_text(worker["pss_bytes"])) if has_own else ("", "")
        ids = worker["env_ids"]
        shown = str(ids[0]) if len(ids) == 1 else f"{ids[0]}-{ids[-1]}"
        grid.add_row(f"worker {worker['worker_id']}", shown, f"{worker['busy_share']:.0%}", *sizes)
    own = (size_text(memory[f"parent_{kind}_bytes"]) for kind in ("uss", "pss"))
    grid.add_row("parent", "", "", *own, style="dim")
    return grid
