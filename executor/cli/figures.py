"""The figures of a rollout, as a table for readers and as JSON for programs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from envherd.executor.cli.returns import ReturnSummary
from envherd.executor.monitor.statistics import Statistics

SCHEMA = "envherd.rollout/1"
_MIB = 1024**2
#: Agents shown by name in the table; the JSON has all of them.
_MAX_NAMES = 16


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of one rollout.

    Attributes:
        env: its name, as the user wrote it.
        num_envs: N.
        num_workers: worker processes; 0 if the envs run in this process.
        seed: the root seed in use.
        steps: requested steps of the whole batch.
        steps_done: completed steps of the whole batch.
        collect_s: seconds in the policy, in steps and in resets of envs whose episode ended. Excludes the
            start of workers, the first reset, and `keep_s`.
        keep_s: seconds for drawing, counting and storing.
        is_interrupted: Ctrl-C ended the rollout.
        error: message of the error that ended it, or None.
        returns: per agent.
        statistics: of the executor, after the last step.
        parent_uss_bytes: private memory of this process.
        parent_pss_bytes: the same plus its share of shared memory.
        files: written files: "out", "gif", "png" -> path.
    """

    env: str
    num_envs: int
    num_workers: int
    seed: int
    steps: int
    steps_done: int
    collect_s: float
    keep_s: float
    is_interrupted: bool
    returns: ReturnSummary
    statistics: Statistics
    parent_uss_bytes: int
    parent_pss_bytes: int
    error: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def env_steps(self) -> int:
        """Completed steps, summed over envs."""
        return self.steps_done * self.num_envs

    @property
    def env_steps_per_s(self) -> float:
        """Steps of single envs per second."""
        return self.env_steps / self.collect_s if self.collect_s > 0 else 0.0

    @property
    def agent_steps_per_s(self) -> float:
        """`env_steps_per_s` times the agents of an env."""
        done = self.statistics
        return self.env_steps_per_s * (done.agent_steps / done.env_steps if done.env_steps else 1)

    @property
    def is_serial(self) -> bool:
        """Whether the envs run in this process, whose memory includes theirs."""
        return any(worker.pid == os.getpid() for worker in self.statistics.workers)

    @property
    def all_uss_bytes(self) -> int:
        """Private memory of all processes, each counted once."""
        workers = 0 if self.is_serial else sum(worker.uss_bytes for worker in self.statistics.workers)
        return workers + self.parent_uss_bytes

    @property
    def all_pss_bytes(self) -> int:
        """The same plus their shares of shared memory."""
        workers = 0 if self.is_serial else sum(worker.pss_bytes for worker in self.statistics.workers)
        return workers + self.parent_pss_bytes

    def to_plain(self) -> dict[str, Any]:
        """Return the figures as documented in docs/cli.md, ready for `json.dump`."""
        done = self.statistics
        return {
            "schema": SCHEMA,
            "env": self.env,
            "num_envs": self.num_envs,
            "num_workers": self.num_workers,
            "seed": self.seed,
            "steps": self.steps,
            "steps_done": self.steps_done,
            "interrupted": self.is_interrupted,
            "error": self.error,
            "collect_s": self.collect_s,
            "keep_s": self.keep_s,
            "env_steps": self.env_steps,
            "env_steps_per_s": self.env_steps_per_s,
            "agent_steps_per_s": self.agent_steps_per_s,
            "episodes": self.returns.num_episodes,
            "mean_return": dict(self.returns.per_agent),
            "mean_return_is_partial": self.returns.is_partial,
            "resets": done.resets,
            "env_errors": done.env_errors,
            "worker_losses": done.worker_losses,
            "interrupted_rows": done.interrupted,
            "workers": [
                {
                    "worker_id": worker.worker_id,
                    "pid": worker.pid,
                    "env_ids": list(worker.env_ids),
                    "busy_share": worker.busy_share,
                    "uss_bytes": worker.uss_bytes,
                    "pss_bytes": worker.pss_bytes,
                }
                for worker in done.workers
            ],
            "memory": {
                "workers_uss_bytes": self.all_uss_bytes - self.parent_uss_bytes,
                "workers_pss_bytes": self.all_pss_bytes - self.parent_pss_bytes,
                "parent_uss_bytes": self.parent_uss_bytes,
                "parent_pss_bytes": self.parent_pss_bytes,
            },
            "files": dict(self.files),
        }


def table(figures: Figures) -> RenderableType:
    """Return the figures as a table for the terminal."""
    return Group(_summary(figures), _workers(figures))


def _summary(figures: Figures) -> Table:
    grid = Table(title=Text(figures.env, "bold"), title_justify="left", box=box.ROUNDED, show_header=False)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    why = "interrupted" if figures.is_interrupted else "failed"
    asked = f" of {figures.steps} ({why})" if figures.steps_done < figures.steps else ""
    keep = f", and {figures.keep_s:.2f} s to draw and store" if figures.keep_s > 0.1 * figures.collect_s else ""
    grid.add_row("env-steps/s", Text(f"{figures.env_steps_per_s:,.0f}", "bold green"))
    grid.add_row("agent-steps/s", Text(f"{figures.agent_steps_per_s:,.0f}", "bold green"))
    grid.add_row("steps", f"{figures.steps_done}{asked} x {figures.num_envs} envs in {figures.collect_s:.2f} s{keep}")
    grid.add_row("episodes", f"{figures.returns.num_episodes} ended")
    grid.add_row("return so far" if figures.returns.is_partial else "mean return", _returns(figures.returns))
    for name, count in _troubles(figures.statistics):
        grid.add_row(name, Text(str(count), "bold red"))
    grid.add_row("seed", str(figures.seed))
    for kind, path in figures.files.items():
        grid.add_row(kind, Text(path, "cyan"))
    return grid


def _returns(returns: ReturnSummary) -> str:
    names = list(returns.per_agent.items())
    shown = "  ".join(f"{name} {mean:.2f}" for name, mean in names[:_MAX_NAMES])
    more = f"  and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{shown}{more}"


def _troubles(done: Statistics) -> list[tuple[str, int]]:
    counts = (
        ("env errors", done.env_errors),
        ("workers lost", done.worker_losses),
        ("rows interrupted", done.interrupted),
    )
    return [(name, count) for name, count in counts if count]


def _workers(figures: Figures) -> Table:
    workers = figures.statistics.workers
    own, fair = figures.all_uss_bytes, figures.all_pss_bytes
    busy = sum(worker.busy_share for worker in workers) / max(1, len(workers))
    grid = Table(box=box.ROUNDED, show_footer=True)
    grid.add_column("process", "all", no_wrap=True)
    grid.add_column("envs", str(figures.num_envs), justify="right")
    grid.add_column("busy", f"{busy:.0%}", justify="right")
    grid.add_column("own memory (USS)", _mib(own), justify="right")
    grid.add_column("with shared part (PSS)", _mib(fair), justify="right")
    for worker in workers:
        memory = ("", "") if figures.is_serial else (_mib(worker.uss_bytes), _mib(worker.pss_bytes))
        cells = (f"{worker.busy_share:.0%}", *memory)
        grid.add_row(f"worker {worker.worker_id}", _ids(worker.env_ids), *cells)
    grid.add_row("parent", "", "", _mib(figures.parent_uss_bytes), _mib(figures.parent_pss_bytes), style="dim")
    return grid


def _ids(env_ids: tuple[int, ...]) -> str:
    return str(env_ids[0]) if len(env_ids) == 1 else f"{env_ids[0]}-{env_ids[-1]}"


def _mib(size: int) -> str:
    return f"{size / _MIB:,.0f} MiB"
