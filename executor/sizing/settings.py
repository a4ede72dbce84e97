"""The settings to compare: numbers of envs and workers, and the mode of stepping. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from envherd.executor.sizing.measurement import Measurement

#: "sync": a step of all envs at a time. "first-k": `send`, and `recv` of the half that is ready first.
Mode = Literal["sync", "first-k"]
MODES: tuple[Mode, ...] = ("sync", "first-k")

#: Seconds of a step, including its share of a reset, from which `SerialEnv` is not tried on several cores, because
#: workers cost less than a tenth of that.
_TOO_LONG_FOR_SERIAL_S = 0.5e-3
#: An env waits if the processor is free for more than this share of its steps.
WAITS = 0.2
#: Largest number of workers per core, used only for envs that wait; and of workers in all.
_MOST_PER_CORE, _MOST_WAITING_WORKERS = 16, 128
#: Seconds of a worker's work in a batch that make the batch's cost negligible; least and largest number of envs per
#: worker.
_HIDES_S, _LEAST_ENVS, _MOST_ENVS = 1e-3, 4, 64
#: Fractions of the largest number of envs per worker that are also tried.
_PARTS = (4, 16)
#: Resets are costly from this share of an env's time and this duration of one reset on.
_COSTLY_SHARE, _COSTLY_S = 0.1, 2e-3


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
        modes: that may be advised.
        has_serial: whether `SerialEnv` may be advised.
        has_reset_ahead: whether resets ahead may be advised.
    """

    num_envs: int | None = None
    num_workers: int | None = None
    policy_s: float = 0.0
    target_steps_per_s: float | None = None
    episode_steps: int | None = None
    headroom: float = 0.2
    modes: tuple[Mode, ...] = MODES
    has_serial: bool = True
    has_reset_ahead: bool = True


#: For executors with worker processes, stepped and reset in the usual way.
WORKERS_ONLY = Goal(modes=("sync",), has_serial=False, has_reset_ahead=False)


def ladder(measured: Measurement, cores: float, goal: Goal, each: int | None = None) -> Iterator[Setting]:
    """Yield the settings to compare, with the largest number of envs for each; `smaller` yields those with fewer.

    Args:
        measured: of the env.
        cores: that may be used.
        goal: with the fixed numbers.
        each: envs per worker, if their number is free; None for `most_envs_per_worker`.
    """
    top = math.ceil(cores)
    rungs = worker_counts(measured, cores, goal)
    each = each or most_envs_per_worker(measured)
    if tries_serial(measured, cores, goal):
        yield Setting(num_envs=goal.num_envs or each, num_workers=0)
    for count in rungs:
        num_envs = goal.num_envs or count * each
        yield Setting(num_envs=num_envs, num_workers=count)
        if "first-k" in goal.modes and num_envs > 1 and count in (min(top, rungs[-1]), rungs[-1]):
            yield Setting(num_envs=num_envs, num_workers=count, mode="first-k")
    if tries_reset_ahead(measured, goal):
        num_envs = goal.num_envs or goal.num_workers or top
        yield Setting(num_envs=num_envs, num_workers=num_envs, reset_ahead=True)


def worker_counts(measured: Measurement, cores: float, goal: Goal) -> list[int]:
    """Return the numbers of workers: 1, half the cores, the cores; more if envs wait; or the fixed one."""
    most = goal.num_envs or _MOST_WAITING_WORKERS * math.ceil(cores)
    if goal.num_workers:
        return [min(goal.num_workers, most)]
    if goal.num_envs and measured.is_alone:
        return [goal.num_envs]
    top = math.ceil(cores)
    counts = {1, math.ceil(top / 2), top}
    if measured.waits_share > WAITS:
        most_busy = min(_MOST_WAITING_WORKERS, cores / max(1 / _MOST_PER_CORE, 1 - measured.waits_share))
        counts |= {top * 2**power for power in range(1, 8) if top * 2 ** (power - 1) < most_busy}
    return sorted({min(count, most) for count in counts})


def most_envs_per_worker(measured: Measurement) -> int:
    """Return the most envs per worker: enough to make a batch's cost negligible; 1 if envs must be alone."""
    if measured.is_alone or measured.spec.batch_shape:
        return 1
    needed = math.ceil(_HIDES_S / max(measured.step_mean_s, 1e-9))
    return min(_MOST_ENVS, max(_LEAST_ENVS, 2 ** math.ceil(math.log2(needed))))


def smaller(setting: Setting) -> Iterator[Setting]:
    """Yield the same setting with a quarter and a sixteenth of the envs, at least one per worker."""
    workers = max(1, setting.num_workers)
    each = setting.num_envs // workers
    if setting.reset_ahead:
        return
    for fewer in sorted({max(1, each // part) for part in _PARTS} - {each}, reverse=True):
        num_envs = fewer * workers
        yield Setting(num_envs=num_envs, num_workers=setting.num_workers, mode=setting.mode if num_envs > 1 else "sync")


def tries_serial(measured: Measurement, cores: float, goal: Goal) -> bool:
    """Return whether `SerialEnv` can be the best: on one core, with one env, or with short steps."""
    is_short = measured.step_mean_s + measured.end_share * measured.reset_median_s < _TOO_LONG_FOR_SERIAL_S
    is_possible = goal.has_serial and goal.num_workers is None and not (measured.is_alone and goal.num_envs != 1)
    return is_possible and (cores <= 1 or goal.num_envs == 1 or is_short)


def tries_reset_ahead(measured: Measurement, goal: Goal) -> bool:
    """Return whether resets are long and frequent enough to be made ahead."""
    is_costly = measured.reset_share >= _COSTLY_SHARE and measured.reset_median_s >= _COSTLY_S
    fits = goal.num_workers in (None, goal.num_envs) and not measured.spec.batch_shape
    return goal.has_reset_ahead and is_costly and fits


def counted(count: int, noun: str) -> str:
    """Return e.g. "1 env", "2 envs"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def time_text(seconds: float) -> str:
    """Return a duration as text, e.g. "7.2 us"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:,.1f} us"
    return f"{seconds * 1e3:,.2f} ms" if seconds < 1 else f"{seconds:,.2f} s"
