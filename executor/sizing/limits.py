"""What fits: memory with headroom, open files, processes, GPU memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from envherd.executor.sizing.model import FILES_FIXED, FILES_PER_WORKER, Model, Setting
from envherd.executor.sizing.modes import MODES, Mode
from envherd.executor.sizing.words import counted


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What is wanted.

    Attributes:
        num_envs: fixed, or None to choose.
        num_workers: fixed, or None to choose.
        policy_s: seconds of the policy for each batch.
        target_steps_per_s: take the smallest setting that is so fast.
        headroom: share of the available memory that is left alone.
        modes: that may be advised.
    """

    num_envs: int | None = None
    num_workers: int | None = None
    policy_s: float = 0.0
    target_steps_per_s: float | None = None
    headroom: float = 0.2
    modes: tuple[Mode, ...] = MODES


class Limits:
    """What does not fit, and why.

    Args:
        model: of the env on the machine.
        goal: what is wanted.

    Attributes:
        room: bytes of memory that are available.
        refused_by: what has refused settings so far, and how many.
    """

    def __init__(self, model: Model, goal: Goal) -> None:
        machine = model.machine
        self._model = model
        self._goal = goal
        self.room = machine.memory_available
        self._usable = self.room * (1 - goal.headroom)
        self._files = machine.files_left
        self._processes = machine.processes_left
        gpu_rooms = [gpu.memory_bytes if gpu.free_bytes is None else gpu.free_bytes for gpu in machine.gpus]
        self._gpu_room = sum(gpu_rooms) if gpu_rooms else None
        self.refused_by: dict[str, int] = {}

    @property
    def least_bytes(self) -> int:
        """Bytes that the fewest envs which are wanted take."""
        return self._model.memory_bytes(self._goal.num_envs or 1, self._goal.num_workers or 1)

    def allow(self, setting: Setting) -> bool:
        """Return whether a setting fits, and count what refuses it."""
        name = next(self._refusals(setting), None)
        if name is not None:
            self.refused_by[name] = self.refused_by.get(name, 0) + 1
        return name is None

    def fits(self, setting: Setting) -> bool:
        """Return whether a setting fits; what refuses it is not counted."""
        return next(self._refusals(setting), None) is None

    def _refusals(self, setting: Setting) -> Iterator[str]:
        measured, workers = self._model.measured, max(1, setting.num_workers)
        if self._model.memory_bytes(setting.num_envs, workers) > self._usable:
            yield "memory"
        if self._files is not None and FILES_FIXED + FILES_PER_WORKER * workers > self._files:
            yield "open files"
        threads = 1 + workers * (1 + measured.num_threads)
        if self._processes is not None and threads > self._processes:
            yield "processes"
        if measured.gpu_bytes and self._gpu_room is not None and workers * measured.gpu_bytes > self._gpu_room:
            yield "GPU memory"

    def most_envs(self, num_workers: int) -> int | None:
        """Return how many envs fit the memory on so many workers, or None for over a thousand for each."""
        workers = max(1, num_workers)
        first = self._model.memory_bytes(workers, workers)
        each = (self._model.memory_bytes(workers + 16, workers) - first) / 16
        most = workers + int((self._usable - first) / max(1.0, each))
        return most if most < 1000 * workers else None

    def complaint(self) -> str:
        """Say what does not fit."""
        mib = 2**20
        envs = self._goal.num_envs or 1
        names = ", ".join(self.refused_by) or "memory"
        return (
            f"sizing failed: expected room for {counted(envs, 'env')}, got too little ({names}). "
            f"{envs} would take {self.least_bytes / mib:,.0f} MiB; {self.room / mib:,.0f} MiB are available, of which "
            f"{self._goal.headroom:.0%} are left alone. Raise the limit, ask for fewer envs, or make the env smaller."
        )
