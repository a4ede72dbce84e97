"""The rule: the settings worth running, whether they fit the machine, and why. Values and sentences. Pure.

docs/reports/sizing.md has it in words.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from envherd.executor.machine.machine import FILES_FIXED, FILES_PER_WORKER, Machine
from envherd.workers.errors import EnvherdError

# ---- settings ----------------------------------------------------------------------------------
# The values of sizing: settings, what is wanted, and what was measured of an env and of a setting. Pure.

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


# ---- rule --------------------------------------------------------------------------------------

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
        # A resource, what the setting takes of it, what there is (None without a limit), and the text of a refusal.
        needs = (
            (
                "memory",
                run.memory_bytes / 2**20,
                self.usable / 2**20,
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


# ---- reasons -----------------------------------------------------------------------------------
# Sentences that explain a choice: first the bottleneck, then notable facts about the env. Pure.

#: Least share of a batch that is worth a sentence.
_WORTH_A_SENTENCE = 0.15
#: Least busy share of workers if the envs are the bottleneck.
_BUSY = 0.6
#: Resets bind from this share of an env's time on.
_MOSTLY_RESETS = 0.5
#: Share of the probe's time spent waiting for a processor, and of the processors' time that other programs took, above
#: which measurements are doubtful.
DISTURBED = 0.2


def explain(
    limits: Limits,
    chosen: Run,
    runs: Sequence[Run],
    others_share: float,
) -> tuple[str, list[str]]:
    """Return what binds, in one or two words; and sentences: on that, on the choice, the env, and other programs.

    Args:
        limits: of the machine.
        chosen: the run of the chosen setting.
        runs: all settings that were considered.
        others_share: of the processors' time, that other programs took meanwhile.
    """
    goal = limits.goal
    target = goal.target_steps_per_s
    machine = limits.machine
    measured = limits.measured
    num_workers = chosen.setting.num_workers
    cores = machine.cores
    is_idle = num_workers > 0 and chosen.busy_share < _BUSY
    busy = f"workers are busy for {chosen.busy_share:.0%} of the time"
    batch = time_text(chosen.batch_s)
    threads = len(machine.cpus) - machine.physical_cores
    smt = f", {threads} of them hyper-threads" if threads else ""
    # What may bind: whether it does if none before it does, its name, and the figures that show it.
    bottlenecks = (
        (
            target is not None and chosen.steps_per_s >= target,
            "target",
            f"{target or 0:,.0f} env-steps/s are wanted: this is the smallest that makes them.",
        ),
        (
            goal.policy_s > chosen.batch_s / 2,
            "policy",
            f"the policy binds: it takes {time_text(goal.policy_s)} of a batch's {batch}.",
        ),
        *(
            (
                one.setting.num_workers >= num_workers,
                one.too_little,
                f"{one.too_little} binds: {one.setting} {one.refusal}.",
            )
            for one in runs
            if one.too_little is not None
        ),
        (
            is_idle and steps_are_uneven(measured),
            "step variance",
            (
                f"step variance binds: {busy} and wait for the slowest; steps take {time_text(measured.step_median_s)} "
                f"in the median, {time_text(measured.step_p99_s)} at the 99th percentile."
            ),
        ),
        (
            is_idle,
            "overhead",
            f"the caller binds: {busy}; handing rows over and waking each other takes the rest of a batch of {batch}.",
        ),
        (
            measured.reset_share > _MOSTLY_RESETS,
            "resets",
            f"resets bind: they take {measured.reset_share:.0%} of an env's time.",
        ),
        (
            num_workers > 0 and measured.waits_share > WAITS,
            "waiting",
            (
                f"waiting binds: the processor is free for {measured.waits_share:.0%} of a step, so more workers than "
                f"cores pay, until they compete for the processors."
            ),
        ),
        (
            goal.num_envs is not None and goal.num_envs <= num_workers < cores,
            "num_envs",
            f"the number of envs binds: {counted(goal.num_envs or 0, 'env')} cannot use {cores:g} cores.",
        ),
        (
            machine.is_throttled,
            "quota",
            (
                f"the CPU quota binds: the control group allows {cores:g} cores' worth of time, although "
                f"{counted(len(machine.cpus), 'processor')} can be seen."
            ),
        ),
        (
            not num_workers,
            "env step",
            "the env's step binds: the envs step one after the other in this process.",
        ),
        (
            True,
            "cores",
            f"cores bind: {cores:g} may be used{smt}; {busy}.",
        ),
    )
    grown = measured.grown_per_1000_steps_bytes
    reset = time_text(measured.reset_mean_s)
    others = "".join(
        f", {one.setting} {one.steps_per_s:,.0f}"
        for one in runs
        if one.refusal is None and one is not chosen
    )
    left = (
        max(0, machine.memory_available - chosen.memory_bytes)
        * 1000
        / max(1, grown * chosen.setting.num_envs)
    )
    quota = "the CPU quota was used up, or " if machine.is_throttled else ""
    facts = (
        (
            target is not None and chosen.steps_per_s < target,
            (
                f"the target of {target or 0:,.0f} env-steps/s is out of reach here by a factor of "
                f"{(target or 0) / chosen.steps_per_s:.1f}."
            ),
        ),
        (
            not num_workers,
            (
                f"SerialEnv, in the caller's process, makes {chosen.steps_per_s:,.0f} env-steps/s{others}. An env that "
                f"crashes takes the program with it; --workers 1 keeps it apart."
            ),
        ),
        (
            chosen.setting.mode == "first-k",
            (
                "stepping first-K pays: use send() and recv(min_envs=num_envs // 2), so that quick envs do not wait "
                "for slow ones."
            ),
        ),
        (
            bool(measured.why_alone),
            f"each env needs its own worker: {measured.why_alone}",
        ),
        (
            measured.reset_share > _WORTH_A_SENTENCE,
            f"resets take {measured.reset_share:.0%} of an env's time ({reset} each).",
        ),
        (
            not measured.end_share,
            (
                f"no episode ended in {measured.steps_measured:,} steps, so resets ({reset} each) are not in these "
                f"speeds; --episode-steps says how long episodes are."
            ),
        ),
        (
            measured.hidden_cpu_share > _WORTH_A_SENTENCE,
            (
                f"the env computes in {counted(measured.num_threads, 'thread')} besides the worker's, "
                f"{measured.hidden_cpu_share:.0%} of its processor time: workers compete for cores earlier."
            ),
        ),
        (
            grown > GROWS,
            (
                f"the env grows by {size_text(grown)} per 1,000 steps: at this rate memory is full after about "
                f"{left:,.0f} steps of each env. ExecutorOptions(max_worker_memory=...) replaces workers that "
                f"have grown; SerialEnv cannot."
            ),
        ),
        (
            max(measured.contention, others_share) > DISTURBED,
            (
                f"{quota}other programs used the machine: they took {others_share:.0%} of the processors' time, and "
                f"the probe waited for a processor for {measured.contention:.0%} of its time. Another run may advise "
                f"otherwise: measure when the machine is idle."
            ),
        ),
    )
    # The last one always applies.
    name, sentence = next(
        (name, text) for applies, name, text in bottlenecks if applies
    )
    return name, [sentence, *(text for applies, text in facts if applies)]
