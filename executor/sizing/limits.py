"""A setting's resources and the limits for them: memory with headroom, files, processes, GPU memory."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from envherd.executor.machine.machine import Machine
from envherd.executor.sizing.measurement import Measurement
from envherd.executor.sizing.settings import Goal, Setting, counted
from envherd.workers.errors import EnvherdError

#: Number of descriptors that the executor keeps open, in all and for each worker.
FILES_FIXED, FILES_PER_WORKER = 6, 3
_MIB = 2**20


class DoesNotFit(EnvherdError, RuntimeError):
    """Not even one env fits the limits."""


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


class Limits:
    """The limits of a machine for settings of one env.

    Args:
        measured: of the env.
        machine: the available resources.
        goal: with the headroom to keep.
        num_frames: of the executor's ring.

    Attributes:
        room: bytes of memory that are available.
        usable: of these, without the headroom.
    """

    def __init__(self, measured: Measurement, machine: Machine, goal: Goal, num_frames: int = 4) -> None:
        self.measured, self.machine = measured, machine
        self._goal, self._num_frames = goal, num_frames
        self.room = machine.memory_available
        self.usable = int(self.room * (1 - goal.headroom))

    def memory_bytes(self, setting: Setting) -> int:
        """Return bytes of workers, helper and shared memory, without the learner's."""
        one, processes = self.measured, setting.num_processes
        envs = setting.num_envs * (1 + setting.reset_ahead)
        slab = setting.num_envs * one.row_bytes * self._num_frames
        if not processes:
            return one.first_env_bytes + (envs - 1) * one.further_env_bytes + slab
        first = processes * (one.worker_bytes + one.first_env_bytes)
        return one.shared_bytes + first + (envs - processes) * one.further_env_bytes + slab

    def start_s(self, setting: Setting) -> float:
        """Return seconds until an executor is ready and its envs are reset, with a running helper."""
        one = self.measured
        rest = setting.most_per_worker - 1
        each = one.build_s + one.first_reset_s + rest * (one.build_further_s + one.reset_median_s)
        return each * max(1.0, setting.num_processes / self.machine.cores)

    def refusal(self, setting: Setting) -> Refusal | None:
        """Return why a setting does not fit, or None if it does."""
        one, machine, processes = self.measured, self.machine, setting.num_processes
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

    def fitted(self, setting: Setting) -> Setting | None:
        """Return the largest setting that fits, reducing first envs per worker and then workers; None if none fits."""
        if self.refusal(setting) is None:
            return setting
        if setting.reset_ahead:
            return None
        if not setting.num_workers:
            fitting = self._filled(setting, setting.num_envs)
            return fitting if self.refusal(fitting) is None else None
        fewest = 1 if self._goal.num_workers is None else setting.num_workers

        def fewer(workers: int) -> Setting:
            return replace(setting, num_workers=workers, num_envs=self._goal.num_envs or workers)

        counts = range(fewest, setting.num_workers + 1)
        num_fitting = bisect_left(counts, 1, key=lambda workers: self.refusal(fewer(workers)) is not None)
        return self._filled(fewer(counts[num_fitting - 1]), setting.most_per_worker) if num_fitting else None

    def _filled(self, setting: Setting, most_each: int) -> Setting:
        """Return a setting with as many envs per worker as fit, at least one, if their number is not fixed."""
        if self._goal.num_envs is not None:
            return setting
        while most_each > 1:
            more = replace(setting, num_envs=max(1, setting.num_workers) * most_each)
            if self.refusal(more) is None:
                return more
            most_each //= 2
        return replace(setting, num_envs=max(1, setting.num_workers))

    def most_envs(self, num_workers: int) -> int | None:
        """Return how many envs fit the memory with `num_workers` workers; None for more than a thousand per worker."""
        workers = max(1, num_workers)
        first, more = (
            self.memory_bytes(Setting(num_envs=count, num_workers=workers)) for count in (workers, workers + 16)
        )
        most = workers + int((self.usable - first) / max(1.0, (more - first) / 16))
        return most if most < 1000 * workers else None

    def does_not_fit(self, refusal: Refusal) -> DoesNotFit:
        """Return the error for a refusal."""
        one, goal = self.measured, self._goal
        wanted = Setting(num_envs=goal.num_envs or 1, num_workers=min(goal.num_workers or 1, goal.num_envs or 1))
        needed = self.memory_bytes(wanted)
        return DoesNotFit(
            f"sizing failed: expected room for {counted(wanted.num_envs, 'env')}, got too little ({refusal.kind}). "
            f"{wanted.num_envs} would take {needed / _MIB:,.0f} MiB; {self.room / _MIB:,.0f} MiB are available, of "
            f"which {goal.headroom:.0%} are left alone. Raise the limit, ask for fewer envs, or make the env smaller. "
            f"Measured: {one.shared_bytes / _MIB:,.0f} MiB shared, {one.first_env_bytes / _MIB:,.0f} MiB for the first "
            f"env of a worker, {one.further_env_bytes / _MIB:,.0f} for each further one.",
            needed_bytes=needed,
            room_bytes=self.room,
        )
