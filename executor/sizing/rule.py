"""The rule: the settings worth running, from a probe's measurements, and whether they fit the machine. Pure.

docs/reports/sizing.md has it in words.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

from envherd.executor.machine.machine import Machine
from envherd.executor.machine.room import FILES_FIXED, FILES_PER_WORKER
from envherd.executor.sizing.settings import (
    Goal,
    Measurement,
    Refusal,
    Setting,
    counted,
    size_text,
)
from envherd.workers.errors import EnvherdError

#: An env waits if the processor is free for more than this share of its steps.
WAITS = 0.2
#: Most workers per core, only for envs that wait; and most workers in all.
_MOST_PER_CORE, _MOST_WAITING_WORKERS = 16, 128
#: Seconds of the steps of all envs below which a second worker costs more than it gains (CartPole, 2 processors: 8
#: envs, 0.12 ms: equal; 32 envs, 0.4 ms: two workers make 1.3 times the steps; 2026-11-27).
_SHORT_BATCH_S = 0.25e-3
#: Steps are uneven if their 99th percentile is more than this many medians and this many seconds, and the mean is more
#: than this many medians: if other programs stop the worker, only the percentile is.
_UNEVEN, _UNEVEN_S, _UNEVEN_MEAN = 4.0, 1e-3, 1.1
#: Resets are costly from this share of an env's time and this duration of one reset on.
_COSTLY_SHARE, _COSTLY_S = 0.1, 2e-3
#: Seconds of a worker's work in a batch that hide the batch's cost; least and most envs per worker.
_HIDES_S, _LEAST_ENVS, _MOST_ENVS = 1e-3, 4, 64


def settings_for(measured: Measurement, cores: float, goal: Goal) -> list[Setting]:
    """Return the settings to run: the rule's choice, then the alternatives that may be better; at most four.

    Args:
        measured: of the env.
        cores: processors that may be used.
        goal: fixed and wanted numbers.
    """
    each, most = _envs_per_worker(measured), _most_workers(measured, cores, goal)
    is_free = goal.num_workers is None and (
        goal.num_envs == 1 or not measured.why_alone
    )
    is_short = (goal.num_envs or each * most) * measured.whole_step_s < _SHORT_BATCH_S
    count = most
    if is_free and is_short:  # waking a second worker takes longer than the steps
        count = 1
    elif (
        is_free and goal.target_steps_per_s is not None
    ):  # as many workers as make it, by the probe
        count = min(
            most,
            max(1, math.ceil(goal.target_steps_per_s * measured.whole_step_s)),
        )
    sync = Setting(num_envs=goal.num_envs or count * each, num_workers=count)
    wanted = [sync]
    # Uneven steps, or costly resets: first-K, so that quick envs do not wait for slow ones.
    if (
        (steps_are_uneven(measured) or resets_are_costly(measured))
        and sync.num_envs > 1
        and not goal.workers_only
    ):
        wanted = [replace(sync, mode="first-k"), sync]
    # Another number of workers: half of them may be as fast, or all of them faster than one.
    if is_free and most > 1:
        other = most if count < most else math.ceil(count / 2)
        wanted.append(
            replace(
                wanted[0],
                num_envs=goal.num_envs or other * each,
                num_workers=other,
            )
        )
    if is_free and not goal.workers_only:
        # One env, or one processor: nothing can be done at the same time, or nothing that is worth a second worker.
        is_right = goal.num_envs == 1 or (
            cores <= 1 and (is_short or measured.waits_share <= WAITS)
        )
        wanted.insert(
            0 if is_right else 1,
            Setting(num_envs=goal.num_envs or each, num_workers=0),
        )
    return wanted


def _most_workers(measured: Measurement, cores: float, goal: Goal) -> int:
    """Return the fixed number of workers; or one per core, or more if envs wait, but at most one per env."""
    most = goal.num_envs or _MOST_WAITING_WORKERS * math.ceil(cores)
    if goal.num_workers is not None:
        return min(goal.num_workers, most)
    if goal.num_envs and measured.why_alone:
        return goal.num_envs
    count = math.ceil(cores)
    if measured.waits_share > WAITS:  # as many as keep the processors busy
        busy_share = max(1 / _MOST_PER_CORE, 1 - measured.waits_share)
        count = max(count, min(_MOST_WAITING_WORKERS, round(cores / busy_share)))
    return min(count, most)


def _envs_per_worker(measured: Measurement) -> int:
    """Return as many envs as hide a batch's cost, if their number is free; 1 if envs must be alone."""
    if measured.why_alone or measured.spec.batch_shape:
        return 1
    needed = math.ceil(_HIDES_S / max(measured.step_mean_s, 1e-9))
    return min(_MOST_ENVS, max(_LEAST_ENVS, 2 ** math.ceil(math.log2(needed))))


def steps_are_uneven(measured: Measurement) -> bool:
    """Return whether some steps take so long that other envs should not wait for them."""
    has_tail = measured.step_p99_s > max(_UNEVEN_S, _UNEVEN * measured.step_median_s)
    return has_tail and measured.step_mean_s > _UNEVEN_MEAN * measured.step_median_s


def resets_are_costly(measured: Measurement) -> bool:
    """Return whether resets are long and frequent enough to matter."""
    return measured.reset_share >= _COSTLY_SHARE and measured.reset_mean_s >= _COSTLY_S


class DoesNotFit(EnvherdError, RuntimeError):
    """Not even one env fits the limits."""


class Limits:
    """The limits of a machine for settings of one env.

    Args:
        measured: of the env.
        machine: the available resources.
        goal: with the headroom to keep.
        num_frames: of the executor's ring.

    Attributes:
        usable: bytes of memory without the headroom.
    """

    def __init__(
        self,
        measured: Measurement,
        machine: Machine,
        goal: Goal,
        num_frames: int = 4,
    ) -> None:
        self.measured, self.machine, self.goal = measured, machine, goal
        self._row_bytes = measured.row_bytes * num_frames
        self.usable = int(machine.memory_available * (1 - goal.headroom))

    def memory_bytes(self, setting: Setting) -> int:
        """Return bytes of workers, helper and shared memory, without the learner's."""
        one, processes = self.measured, max(1, setting.num_workers)
        further = (setting.num_envs - processes) * one.further_env_bytes
        return (
            one.shared_bytes
            + processes * one.worker_bytes
            + further
            + setting.num_envs * self._row_bytes
        )

    def start_s(self, setting: Setting) -> float:
        """Return seconds until an executor is ready and its envs are reset, with a running helper."""
        one, rest = self.measured, setting.most_per_worker - 1
        each = (
            one.build_s
            + one.first_reset_s
            + rest * (one.build_further_s + one.reset_mean_s)
        )
        return each * max(1.0, setting.num_workers / self.machine.cores)

    def refusal(self, setting: Setting) -> Refusal | None:
        """Return why a setting does not fit, or None if it does."""
        one, machine, processes = self.measured, self.machine, setting.num_workers
        gpus = [
            gpu.memory_bytes if gpu.free_bytes is None else gpu.free_bytes
            for gpu in machine.gpus
        ]
        for kind, taken, left, unit, of in (
            ("memory", self.memory_bytes(setting), self.usable, 2**20, "may be used"),
            (
                "open files",
                FILES_FIXED + FILES_PER_WORKER * processes,
                machine.files_left,
                1,
                "are left",
            ),
            (
                "processes",
                1 + processes * (1 + one.num_threads),
                machine.processes_left,
                1,
                "are left",
            ),
            (
                "GPU memory",
                max(1, processes) * (one.gpu_bytes or 0),
                sum(gpus) if gpus else None,
                2**20,
                "are free",
            ),
        ):
            if left is not None and taken > left:
                what = (
                    f"MiB of {kind}"
                    if unit > 1
                    else f"{kind}{' and threads' * (kind == 'processes')}"
                )
                return Refusal(
                    kind,
                    f"takes {taken / unit:,.0f} {what}, {left / unit:,.0f} {of}",
                )
        return None

    def fitting(self, wanted: Iterable[Setting]) -> dict[Setting, Refusal | None]:
        """Return the wanted settings with the reasons of those that do not fit; for these also the largest that fits.

        Raises:
            DoesNotFit: one env, or the wanted number of envs, does not fit.
        """
        found: dict[Setting, Refusal | None] = {}
        for setting in wanted:
            found[setting] = self.refusal(setting)
            fitted = self.fitted(setting)
            if fitted is not None:
                found.setdefault(fitted, None)
        refusals = [refusal for refusal in found.values() if refusal is not None]
        if len(refusals) < len(found):
            return found
        one, goal, room = self.measured, self.goal, self.machine.memory_available
        num_envs = goal.num_envs or 1
        needed = self.memory_bytes(
            Setting(num_envs=num_envs, num_workers=min(goal.num_workers or 1, num_envs))
        )
        raise DoesNotFit(
            f"sizing failed: expected room for {counted(num_envs, 'env')}, got too little ({refusals[0].kind}). "
            f"{num_envs} would take {size_text(needed)}; {size_text(room)} are available, of which {goal.headroom:.0%} "
            f"are left alone. Raise the limit, ask for fewer envs, or make the env smaller. Measured: "
            f"{size_text(one.shared_bytes)} shared, {size_text(one.worker_bytes)} for a worker with its first env, "
            f"{size_text(one.further_env_bytes)} for each further one.",
            needed_bytes=needed,
            room_bytes=room,
        )

    def fitted(self, setting: Setting) -> Setting | None:
        """Return the largest setting that fits, reducing first envs per worker and then workers; None if none fits."""

        def of(workers: int, each: int) -> Setting:
            return replace(
                setting,
                num_workers=workers,
                num_envs=self.goal.num_envs or max(1, workers) * each,
            )

        if self.refusal(setting) is None:
            return setting
        most, each = setting.num_workers, setting.most_per_worker
        fewest = min(1, most) if self.goal.num_workers is None else most
        fewer_envs = (of(most, each >> power) for power in range(1, each.bit_length()))
        fewer_workers = (of(workers, 1) for workers in range(most - 1, fewest - 1, -1))
        return next(
            (one for one in (*fewer_envs, *fewer_workers) if self.refusal(one) is None),
            None,
        )

    def most_envs(self, num_workers: int) -> int | None:
        """Return how many envs fit the memory with `num_workers` workers; None for more than a thousand per worker."""
        workers = max(1, num_workers)
        left = self.usable - self.memory_bytes(
            Setting(num_envs=workers, num_workers=workers)
        )
        most = workers + left // max(
            1,
            self.measured.further_env_bytes + self._row_bytes,
        )
        return most if most < 1000 * workers else None
