"""The values of sizing: settings, what is wanted, and what was measured of an env and of a setting. Pure."""

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
    """

    num_envs: int
    num_workers: int
    mode: Mode = "sync"

    @property
    def most_per_worker(self) -> int:
        """Envs of the worker that has most."""
        return -(-self.num_envs // max(1, self.num_workers))

    def __str__(self) -> str:
        """Describe it in words."""
        envs = counted(self.num_envs, "env")
        how = ", first-K" if self.mode == "first-k" else ""
        return (
            f"{envs} on {counted(self.num_workers, 'worker')}{how}"
            if self.num_workers
            else f"SerialEnv of {envs}"
        )


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


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One env, measured alone in a worker process. Times are seconds, sizes bytes.

    Attributes:
        row_bytes: of one env in a batch: its transition, its next root, its inputs.
        is_batch: whether the env is itself a batch of envs.
        build_s: the first build in a process, including imports that the factory does not announce.
        build_further_s: a further build in the same process; `build_s` if there was none.
        first_reset_s: the first reset.
        reset_mean_s: mean of the resets after the first, without the share of `contention`.
        step_median_s: median of a step, with its row, to 10 %.
        step_p99_s: 99th percentile of a step, with its row, to 10 %.
        step_mean_s: of a step, with its row, without the time in which the worker waited for a processor.
        cpu_per_step_s: processor seconds of a step, of all threads and child processes.
        hidden_cpu_share: share of `cpu_per_step_s` that the env's threads and processes use.
        num_threads: threads (and processes) that the env has started.
        steps_measured: number of steps behind the figures.
        end_share: share of steps that ended an episode; 0 if none did.
        contention: share of the time of steps in which the worker waited for a processor.
        worker_bytes: memory of a worker with its first env.
        further_env_bytes: added by each further env.
        shared_bytes: what exists once for all workers: the helper, and libraries.
        grown_per_1000_steps_bytes: of one env; small ones are noise.
        gpu_bytes: memory of GPUs that the probe used; 0 if it is unknown.
        why_alone: why a process can have only one such env: the error of several in one process; empty if it can.
    """

    row_bytes: int
    is_batch: bool
    build_s: float
    build_further_s: float
    first_reset_s: float
    reset_mean_s: float
    step_median_s: float
    step_p99_s: float
    step_mean_s: float
    cpu_per_step_s: float
    hidden_cpu_share: float
    num_threads: int
    steps_measured: int
    end_share: float
    contention: float
    worker_bytes: int
    further_env_bytes: int
    shared_bytes: int
    grown_per_1000_steps_bytes: int
    gpu_bytes: int = 0
    why_alone: str = ""

    @property
    def waits_share(self) -> float:
        """Share of a step in which the processor is free."""
        return max(0.0, 1 - self.cpu_per_step_s / self.step_mean_s)

    @property
    def whole_step_s(self) -> float:
        """Seconds of a step and its share of a reset."""
        return self.step_mean_s + self.end_share * self.reset_mean_s

    @property
    def reset_share(self) -> float:
        """Share of an env's time that its resets take; 0 if no episode ended."""
        return 1 - self.step_mean_s / self.whole_step_s if self.end_share else 0.0

    def whole_steps(self, steps: int, resets: int) -> float:
        """Return the number of steps (each with its share of a reset) with the same work as these steps and resets."""
        return (
            steps * self.step_mean_s + resets * self.reset_mean_s
        ) / self.whole_step_s


@dataclass(kw_only=True, eq=False)
class Run:
    """A setting that is considered: what it needs, and what it makes or why it was not run.

    Attributes:
        setting: see `Setting`.
        memory_bytes: of workers, helper and shared memory, from the probe's measurement.
        start_s: until it is ready and its envs are reset.
        refusal: why it was not run, with the numbers; None if it was run.
        too_little: what the machine has too little of, for a setting that does not fit, alone or next to those that run
            at the same time; else None.
        steps_per_s: env-steps per second, with the usual number of resets, and with the policy.
        busy_share: of its workers' time, spent on commands, 0..1.
        rounds: number of its turns.
    """

    setting: Setting
    memory_bytes: int
    start_s: float
    refusal: str | None = None
    too_little: str | None = None
    steps_per_s: float = 0.0
    busy_share: float = 0.0
    rounds: int = 0

    @property
    def batch_s(self) -> float:
        """Seconds of one step of all envs, with the policy."""
        return self.setting.num_envs / self.steps_per_s


def counted(count: int, noun: str) -> str:
    """Return e.g. "1 env", "2 envs"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def time_text(seconds: float) -> str:
    """Return a duration as text, e.g. "7.2 µs"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:,.1f} µs"
    return f"{seconds * 1e3:,.2f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def size_text(size: float) -> str:
    """Return a number of bytes as text with a unit."""
    if size < 2**20:
        return f"{size / 1024:,.1f} KiB"
    return (
        f"{size / 2**20:,.1f} MiB" if size < 10 * 2**30 else f"{size / 2**30:,.1f} GiB"
    )
