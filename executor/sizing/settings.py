"""Settings: numbers of envs and workers, and the mode of stepping. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: "sync": a step of all envs at a time. "first-k": `send`, and `recv` of the half that is ready first.
Mode = Literal["sync", "first-k"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to run envs.

    Attributes:
        num_envs: N.
        num_workers: worker processes; 0 is `SerialEnv`, in the caller's process.
        mode: how a training loop steps the envs.
        reset_ahead: `ExecutorOptions(reset_ahead=True)`: a worker and a spare for each env.
    """

    num_envs: int
    num_workers: int
    mode: Mode = "sync"
    reset_ahead: bool = False

    @property
    def num_processes(self) -> int:
        """Worker processes, spares included."""
        return 2 * self.num_envs if self.reset_ahead else self.num_workers

    @property
    def most_per_worker(self) -> int:
        """Envs of the worker that has most."""
        return -(-self.num_envs // max(1, self.num_workers))

    @property
    def rank(self) -> tuple[int, bool, int]:
        """Sort key from small to large: processes, then the effort in user code, then envs."""
        return self.num_processes, self.mode != "sync", self.num_envs

    def __str__(self) -> str:
        """Describe it in words."""
        envs = counted(self.num_envs, "env")
        if not self.num_workers:
            return f"SerialEnv of {envs}"
        how = ", resets ahead" if self.reset_ahead else ", first-K" if self.mode == "first-k" else ""
        return f"{envs} on {counted(self.num_workers, 'worker')}{how}"


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Fixed and wanted numbers.

    Attributes:
        num_envs: fixed, or None to choose.
        num_workers: fixed, or None to choose.
        policy_s: seconds of the policy for each batch.
        target_steps_per_s: choose the smallest setting that reaches this speed.
        episode_steps: length of episodes; None for the probe's estimate.
        headroom: share of the available memory to leave free.
        workers_only: advise only synchronous steps on worker processes, without resets ahead.
    """

    num_envs: int | None = None
    num_workers: int | None = None
    policy_s: float = 0.0
    target_steps_per_s: float | None = None
    episode_steps: int | None = None
    headroom: float = 0.2
    workers_only: bool = False


#: For executors with worker processes, stepped and reset in the usual way.
WORKERS_ONLY = Goal(workers_only=True)


def counted(count: int, noun: str) -> str:
    """Return e.g. "1 env", "2 envs"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def time_text(seconds: float) -> str:
    """Return a duration as text, e.g. "7.2 us"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:,.1f} us"
    return f"{seconds * 1e3:,.2f} ms" if seconds < 1 else f"{seconds:,.2f} s"
