"""Settings: numbers of envs and workers, and the mode of stepping; what is wanted, and what is known of one. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from envherd.executor.machine.room import require_room

#: "sync": a step of all envs at a time. "first-k": `send`, and `recv` of the half that is ready first.
Mode = Literal["sync", "first-k"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to run envs.

    Attributes:
        num_envs: N.
        num_workers: worker processes; 0 is `SerialEnv`, in the caller's process.
        mode: how a training loop steps the envs.
    """

    num_envs: int
    num_workers: int
    mode: Mode = "sync"

    @property
    def most_per_worker(self) -> int:
        """Envs of the worker that has most."""
        return -(-self.num_envs // max(1, self.num_workers))

    @property
    def rank(self) -> tuple[int, bool, int]:
        """Sort key from small to large: processes, then the effort in user code, then envs."""
        return self.num_workers, self.mode != "sync", self.num_envs

    def __str__(self) -> str:
        """Describe it in words."""
        envs = counted(self.num_envs, "env")
        if not self.num_workers:
            return f"SerialEnv of {envs}"
        how = ", first-K" if self.mode == "first-k" else ""
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
        workers_only: advise only synchronous steps on worker processes.
    """

    num_envs: int | None = None
    num_workers: int | None = None
    policy_s: float = 0.0
    target_steps_per_s: float | None = None
    episode_steps: int | None = None
    headroom: float = 0.2
    workers_only: bool = False

    def require_room(self) -> None:
        """Refuse fixed numbers that this machine cannot hold; see `machine.room`."""
        num_workers = self.num_workers or 0
        require_room(self.num_envs or 1, min(num_workers, self.num_envs or num_workers))

    def is_met_by(self, run: Run) -> bool | None:
        """Return whether a run reaches the target; None without one."""
        return None if self.target_steps_per_s is None else run.steps_per_s >= self.target_steps_per_s


#: For executors with worker processes, stepped and reset in the usual way.
WORKERS_ONLY = Goal(workers_only=True)


@dataclass(frozen=True)
class Refusal:
    """Why a setting is not run.

    Attributes:
        kind: "memory", "open files", "processes", "GPU memory", "failure" or "budget".
        text: the reason, with the numbers.
    """

    kind: str
    text: str

    @property
    def is_of_machine(self) -> bool:
        """Whether the machine is too small."""
        return self.kind not in ("failure", "budget")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a setting makes: as it was run, or else predicted from the probe; or why it was not run.

    Attributes:
        setting: see `Setting`.
        steps_per_s: env-steps per second, with the usual number of resets, and with the policy.
        relative: speed relative to the fastest setting.
        busy_share: of its workers' time, spent on commands, 0..1.
        rounds: number of its turns; 0 if it was not run: then the figures are predicted.
        memory_bytes: of workers, helper and shared memory, from the probe's measurement.
        start_s: until it is ready and its envs are reset.
        refusal: why it was not run, or does not fit; None if it was run or may be.
    """

    setting: Setting
    steps_per_s: float = 0.0
    relative: float = 0.0
    busy_share: float = 0.0
    rounds: int = 0
    memory_bytes: int = 0
    start_s: float = 0.0
    refusal: Refusal | None = None

    @property
    def batch_s(self) -> float:
        """Seconds of one step of all envs, with the policy."""
        return self.setting.num_envs / self.steps_per_s

    @property
    def is_scaled(self) -> bool:
        """Whether the speed is scaled from the probe; otherwise the setting was run."""
        return self.rounds == 0

    def to_plain(self) -> dict[str, Any]:
        """Return it as documented in docs/reference/json.md."""
        plain = {**vars(self.setting), **vars(self)}
        del plain["setting"]
        return {**plain, "refusal": None if self.refusal is None else self.refusal.text}


def counted(count: int, noun: str) -> str:
    """Return e.g. "1 env", "2 envs"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def time_text(seconds: float) -> str:
    """Return a duration as text, e.g. "7.2 us"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:,.1f} us"
    return f"{seconds * 1e3:,.2f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def size_text(size: float) -> str:
    """Return a number of bytes as text with a unit."""
    if size < 2**20:
        return f"{size / 1024:,.1f} KiB"
    return f"{size / 2**20:,.1f} MiB" if size < 10 * 2**30 else f"{size / 2**30:,.1f} GiB"
