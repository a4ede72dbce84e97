"""The rule: the settings worth running, from a probe's measurements, and whether they fit the machine. Pure.

docs/reports/sizing.md has it in words.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from envherd.executor.machine.machine import Machine
from envherd.executor.machine.room import FILES_FIXED, FILES_PER_WORKER
from envherd.executor.sizing.settings import (
    Goal,
    Measurement,
    Run,
    Setting,
    counted,
    size_text,
)
from envherd.workers.errors import EnvherdError

_MIB = 2**20
#: An env waits if the processor is free for more than this share of its steps.
WAITS = 0.2
#: Least growth of one env in 1,000 steps that is not noise, in bytes.
GROWS = 2 * 2**20
#: Most workers per core, only for envs that wait.
_MOST_PER_CORE = 16
#: Most workers in all, only for envs that wait.
_MOST_WAITING_WORKERS = 128
#: Seconds of the steps of all envs below which a second worker costs more than it gains (CartPole, 2 processors: 8
#: envs, 0.12 ms: equal; 32 envs, 0.4 ms: two workers make 1.3 times the steps; 2026-11-27).
_SHORT_BATCH_S = 0.25e-3
#: The 99th percentile of uneven steps is more than this number of medians.
_UNEVEN = 4.0
#: The 99th percentile of uneven steps is more than this number of seconds.
_UNEVEN_S = 1e-3
#: The mean of uneven steps is more than this number of medians. If other programs stop the worker, only the percentile
#: grows.
_UNEVEN_MEAN = 1.1
#: Least share of an env's time that costly resets take.
_COSTLY_SHARE = 0.1
#: Least seconds of a costly reset.
_COSTLY_S = 2e-3
#: Seconds of a worker's work in a batch that hide the batch's cost.
_HIDES_S = 1e-3
_LEAST_ENVS = 4  # per worker
_MOST_ENVS = 64  # per worker


def settings_for(measured: Measurement, cores: float, goal: Goal) -> list[Setting]:
    """Return the settings to run: the rule's choice, then the alternatives that may be better; at most four.

    Args:
        measured: of the env.
        cores: processors that may be used.
        goal: fixed and wanted numbers.
    """
    each = _envs_per_worker(measured)
    most = _most_workers(measured, cores, goal)
    is_free = goal.num_workers is None and (
        goal.num_envs == 1 or not measured.why_alone
    )
    is_short = (goal.num_envs or each * most) * measured.whole_step_s < _SHORT_BATCH_S
    count = most
    if is_free and is_short:  # waking a second worker takes longer than the steps
        count = 1
    elif is_free and goal.target_steps_per_s is not None:
        # As many as make it, by the probe.
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
    # `SerialEnv` cannot replace the process of an env that leaks.
    leaks = measured.grown_per_1000_steps_bytes > GROWS
    if is_free and not (goal.workers_only or leaks):
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
    count = math.ceil(cores)
    if measured.waits_share > WAITS:  # as many as keep the processors busy
        busy_share = max(1 / _MOST_PER_CORE, 1 - measured.waits_share)
        count = max(count, min(_MOST_WAITING_WORKERS, round(cores / busy_share)))
    if goal.num_envs and measured.why_alone:
        count = goal.num_envs
    if goal.num_workers is not None:
        count = goal.num_workers
    return min(count, goal.num_envs or _MOST_WAITING_WORKERS * math.ceil(cores))


def _envs_per_worker(measured: Measurement) -> int:
    """Return as many envs as hide a batch's cost, if their number is free; 1 if envs must be alone."""
    if measured.why_alone or measured.is_batch:
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
        self.measured = measured
        self.machine = machine
        self.goal = goal
        self._row_bytes = measured.row_bytes * num_frames
        self.usable = int(machine.memory_available * (1 - goal.headroom))

    def judged(self, setting: Setting) -> Run:
        """Return what a setting needs, and why it does not fit, if it does not.

        It is ready when an executor has started, with a running helper, and its envs are reset.
        """
        one = self.measured
        machine = self.machine
        processes = setting.num_workers
        # With `SerialEnv` the caller's process counts as a worker.
        holders = max(1, processes)
        memory_bytes = (
            one.shared_bytes
            + holders * one.worker_bytes
            + (setting.num_envs - holders) * one.further_env_bytes
            + setting.num_envs * self._row_bytes
        )
        worker_s = (
            one.build_s
            + one.first_reset_s
            + (setting.most_per_worker - 1) * (one.build_further_s + one.reset_mean_s)
        )
        run = Run(
            setting=setting,
            memory_bytes=memory_bytes,
            start_s=worker_s * max(1.0, processes / machine.cores),
        )
        gpus = [
            gpu.memory_bytes if gpu.free_bytes is None else gpu.free_bytes
            for gpu in machine.gpus
        ]
        # A resource, what the setting takes of it, what there is (None without a limit), and the text of a refusal.
        needs = (
            (
                "memory",
                run.memory_bytes / _MIB,
                self.usable / _MIB,
                "takes {:,.0f} MiB of memory, {:,.0f} may be used",
            ),
            (
                "open files",
                FILES_FIXED + FILES_PER_WORKER * processes,
                machine.files_left,
                "takes {:,} open files, {:,} are left",
            ),
            (
                "processes",
                1 + processes * (1 + one.num_threads),
                machine.processes_left,
                "takes {:,} processes and threads, {:,} are left",
            ),
            (
                "GPU memory",
                holders * one.gpu_bytes / _MIB,
                sum(gpus) / _MIB if gpus else None,
                "takes {:,.0f} MiB of GPU memory, {:,.0f} are free",
            ),
        )
        for resource, taken, left, text in needs:
            if run.refusal is None and left is not None and taken > left:
                run.too_little = resource
                run.refusal = text.format(taken, left)
        return run

    def fitting(self, wanted: Sequence[Setting]) -> list[Run]:
        """Return the wanted settings, judged; for those that do not fit also the largest that does.

        Raises:
            DoesNotFit: one env, one for each of the wanted workers, or the wanted number of envs does not fit.
        """
        found: dict[Setting, Run] = {}
        for setting in wanted:
            tried = [self.judged(one) for one in self._down_from(setting)]
            fitting = [one for one in tried if one.refusal is None]
            for run in (tried[0], *fitting[:1]):
                found.setdefault(run.setting, run)
        runs = list(found.values())
        if any(one.refusal is None for one in runs):
            return runs
        smallest = tried[-1]
        num_envs = smallest.setting.num_envs
        one = self.measured
        room = self.machine.memory_available
        raise DoesNotFit(
            f"sizing failed: expected room for {counted(num_envs, 'env')}, got too little ({smallest.too_little}). "
            f"{num_envs} would take {size_text(smallest.memory_bytes)}; {size_text(room)} are available, of which "
            f"{self.goal.headroom:.0%} are left alone. Raise the limit, ask for fewer envs, or make the env smaller. "
            f"Measured: {size_text(one.shared_bytes)} shared, {size_text(one.worker_bytes)} for a worker with its "
            f"first env, {size_text(one.further_env_bytes)} for each further one.",
            needed_bytes=smallest.memory_bytes,
            room_bytes=room,
        )

    def _down_from(self, setting: Setting) -> list[Setting]:
        """Return a setting and smaller ones, the largest first: with fewer envs per worker, then fewer workers."""
        most = setting.num_workers
        each = setting.most_per_worker
        sizes = [(most, each >> power) for power in range(each.bit_length())]
        if self.goal.num_workers is None:
            sizes += [(workers, 1) for workers in range(most - 1, 0, -1)]
        return [
            replace(
                setting,
                num_workers=workers,
                num_envs=self.goal.num_envs or max(1, workers) * size,
            )
            for workers, size in sizes
        ]
