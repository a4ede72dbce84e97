"""What a setting takes and makes by the probe, here or on another machine, and whether it fits. Pure arithmetic.

A batch's time consists of the envs' and of the caller's time. The first is divided among the workers that have
processors; the second is constant (Amdahl's law). The model assumes cores as fast as this machine's, enough memory and
cache for all, and steps of equal length.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace

from envherd.executor.machine.machine import Machine
from envherd.executor.machine.room import FILES_FIXED, FILES_PER_WORKER
from envherd.executor.sizing.measurement import Measurement
from envherd.executor.sizing.settings import Goal, Refusal, Run, Setting, counted
from envherd.workers.errors import EnvherdError

#: Seconds of a batch in addition to the envs', and of these for each env (CartPole, 2 processors: 27 us with 8 envs in
#: SerialEnv, about 150 us with 64 envs on 2 workers; 2026-11-27).
_BATCH_S, _ENV_S = 30e-6, 1e-6
_MIB = 2**20


class DoesNotFit(EnvherdError, RuntimeError):
    """Not even one env fits the limits."""


class Limits:
    """The limits of a machine for settings of one env.

    Args:
        measured: of the env.
        machine: the available resources.
        goal: with the headroom to keep, and the policy's time.
        num_frames: of the executor's ring.
        is_here: whether the env was measured on this machine, next to the same other programs.

    Attributes:
        room: bytes of memory that are available.
        usable: of these, without the headroom.
    """

    def __init__(
        self, measured: Measurement, machine: Machine, goal: Goal, num_frames: int = 4, *, is_here: bool = True
    ) -> None:
        self.measured, self.machine, self.goal = measured, machine, goal
        self._num_frames = num_frames
        self._lost_share = measured.contention if is_here else 0.0
        self.room = machine.memory_available
        self.usable = int(self.room * (1 - goal.headroom))

    def memory_bytes(self, setting: Setting) -> int:
        """Return bytes of workers, helper and shared memory, without the learner's."""
        one, processes = self.measured, max(1, setting.num_workers)
        slab = setting.num_envs * one.row_bytes * self._num_frames
        return (
            one.shared_bytes
            + processes * one.worker_bytes
            + (setting.num_envs - processes) * one.further_env_bytes
            + slab
        )

    def start_s(self, setting: Setting) -> float:
        """Return seconds until an executor is ready and its envs are reset, with a running helper."""
        one = self.measured
        rest = setting.most_per_worker - 1
        each = one.build_s + one.first_reset_s + rest * (one.build_further_s + one.reset_median_s)
        return each * max(1.0, setting.num_workers / self.machine.cores)

    def predict(self, setting: Setting) -> Run:
        """Return what a setting makes by the probe."""
        one, workers = self.measured, max(1, setting.num_workers)
        # Envs that wait let more workers run at the same time; threads of envs let fewer.
        cores = self.machine.cores * one.step_mean_s / max(one.cpu_per_step_s, 1e-9)
        envs_s = setting.most_per_worker * one.whole_step_s * max(1.0, workers / cores)
        caller_s = _BATCH_S + setting.num_envs * _ENV_S
        batch_s = self.goal.policy_s + (caller_s + envs_s) / max(0.1, 1 - self._lost_share)
        return Run(
            setting=setting,
            steps_per_s=setting.num_envs / batch_s,
            memory_bytes=self.memory_bytes(setting),
            start_s=self.start_s(setting),
            refusal=self.refusal(setting),
        )

    def refusal(self, setting: Setting) -> Refusal | None:
        """Return why a setting does not fit, or None if it does."""
        one, machine, processes = self.measured, self.machine, setting.num_workers
        taken = self.memory_bytes(setting)
        if taken > self.usable:
            return Refusal("memory", f"takes {taken / _MIB:,.0f} MiB of memory, {self.usable / _MIB:,.0f} may be used")
        files = FILES_FIXED + FILES_PER_WORKER * processes
        if machine.files_left is not None and files > machine.files_left:
            return Refusal("open files", f"takes {files:,} open files, {machine.files_left:,} are left")
        threads = 1 + processes * (1 + one.num_threads)
        if machine.processes_left is not None and threads > machine.processes_left:
            return Refusal("processes", f"takes {threads:,} processes and threads, {machine.processes_left:,} are left")
        rooms = [gpu.memory_bytes if gpu.free_bytes is None else gpu.free_bytes for gpu in machine.gpus]
        needed = max(1, processes) * (one.gpu_bytes or 0)
        if rooms and needed > sum(rooms):
            text = f"takes {needed / _MIB:,.0f} MiB of GPU memory, {sum(rooms) / _MIB:,.0f} are free"
            return Refusal("GPU memory", text)
        return None

    def fitting(self, wanted: Iterable[Setting]) -> dict[Setting, Refusal | None]:
        """Return the wanted settings with the reasons of those that do not fit; for these also the largest that fits.

        Raises:
            DoesNotFit: one env, or the wanted number of envs, does not fit.
        """
        found: dict[Setting, Refusal | None] = {}
        for setting in wanted:
            fitted = self.fitted(setting)
            if fitted != setting:
                found[setting] = self.refusal(setting)
            if fitted is not None:
                found.setdefault(fitted, None)
        refusals = [refusal for refusal in found.values() if refusal is not None]
        if len(refusals) == len(found):
            raise self._does_not_fit(refusals[0])
        return found

    def fitted(self, setting: Setting) -> Setting | None:
        """Return the largest setting that fits, reducing first envs per worker and then workers; None if none fits."""
        if self.refusal(setting) is None:
            return setting

        def of(workers: int, each: int) -> Setting:
            return replace(setting, num_workers=workers, num_envs=self.goal.num_envs or max(1, workers) * each)

        fewest = min(1, setting.num_workers) if self.goal.num_workers is None else setting.num_workers
        counts = range(fewest, setting.num_workers + 1)
        num_fitting = bisect_left(counts, 1, key=lambda workers: self.refusal(of(workers, 1)) is not None)
        if not num_fitting:
            return None
        workers, each = counts[num_fitting - 1], setting.most_per_worker
        while each > 1 and self.refusal(of(workers, each)) is not None:
            each //= 2
        return of(workers, each)

    def most_envs(self, num_workers: int) -> int | None:
        """Return how many envs fit the memory with `num_workers` workers; None for more than a thousand per worker."""
        workers = max(1, num_workers)
        first, more = (
            self.memory_bytes(Setting(num_envs=count, num_workers=workers)) for count in (workers, workers + 16)
        )
        most = workers + int((self.usable - first) / max(1.0, (more - first) / 16))
        return most if most < 1000 * workers else None

    def _does_not_fit(self, refusal: Refusal) -> DoesNotFit:
        one, goal = self.measured, self.goal
        wanted = Setting(num_envs=goal.num_envs or 1, num_workers=min(goal.num_workers or 1, goal.num_envs or 1))
        needed = self.memory_bytes(wanted)
        return DoesNotFit(
            f"sizing failed: expected room for {counted(wanted.num_envs, 'env')}, got too little ({refusal.kind}). "
            f"{wanted.num_envs} would take {needed / _MIB:,.0f} MiB; {self.room / _MIB:,.0f} MiB are available, of "
            f"which {goal.headroom:.0%} are left alone. Raise the limit, ask for fewer envs, or make the env smaller. "
            f"Measured: {one.shared_bytes / _MIB:,.0f} MiB shared, {one.worker_bytes / _MIB:,.0f} MiB for a worker "
            f"with its first env, {one.further_env_bytes / _MIB:,.0f} for each further one.",
            needed_bytes=needed,
            room_bytes=self.room,
        )
