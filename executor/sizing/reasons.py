"""Sentences that explain a choice: first the bottleneck, then notable facts about the env."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from envherd.executor.sizing.choosing import GOOD_ENOUGH
from envherd.executor.sizing.driving import Figures
from envherd.executor.sizing.limits import Limits
from envherd.executor.sizing.scaling import Prediction
from envherd.executor.sizing.search import Run
from envherd.executor.sizing.settings import WAITS, Goal, Setting, counted, time_text

_MIB = 2**20
#: Least share of a batch that is worth a sentence.
_WORTH_A_SENTENCE = 0.15
#: Least busy share of workers if the envs are the bottleneck.
_BUSY = 0.6
#: Steps vary if their 99th percentile is above this many medians.
_VARIES = 4.0
#: Least growth of one env that is not noise: bytes in 1,000 steps, and in a reset.
_GROWS, _GROWS_PER_RESET = 2 * _MIB, 2 * _MIB
#: Share of the time spent waiting for a processor above which measurements are doubtful.
_DISTURBED = 0.2


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts behind the reasons.

    Attributes:
        limits: of the planned machine, with the env's figures.
        goal: of the search.
        runs: all settings that were considered here.
        chosen, predicted: the setting, and its prediction.
        base: the run of the chosen setting, or the run that it was scaled from.
        best_steps_per_s: of all settings.
        figures: of the chosen setting's executor here.
    """

    limits: Limits
    goal: Goal
    runs: tuple[Run, ...]
    chosen: Setting
    predicted: Prediction
    base: Run
    best_steps_per_s: float
    figures: Figures

    @property
    def meets_target(self) -> bool | None:
        """Whether the target is reached; None without one."""
        target = self.goal.target_steps_per_s
        return None if target is None else self.predicted.steps_per_s >= target


def reasons(facts: Facts) -> tuple[str, tuple[str, ...]]:
    """Return the bottleneck and the sentences."""
    binding, sentence = _binding(facts)
    lines = [sentence, *_target(facts), *_kind(facts), *_scaled(facts), *_about_env(facts)]
    return binding, tuple(lines)


def _binding(facts: Facts) -> tuple[str, str]:
    """Return the bottleneck and its sentence."""
    predicted = facts.predicted
    if facts.meets_target:
        return "target", (
            f"{facts.goal.target_steps_per_s:,.0f} env-steps/s are wanted: this is the smallest setting that makes "
            f"them ({facts.best_steps_per_s:,.0f} is the most of those that were compared)."
        )
    if predicted.policy_s > predicted.batch_s / 2:
        policy_ms, batch_ms = predicted.policy_s * 1e3, predicted.batch_s * 1e3
        return "policy", f"the policy binds: it takes {policy_ms:,.2f} ms of a batch's {batch_ms:,.2f}."
    return _limited(facts) or _waiting_for_caller(facts) or _envs_bind(facts) or _processors_bind(facts)


def _waiting_for_caller(facts: Facts) -> tuple[str, str] | None:
    """Return the reason why workers wait, if they are not busy."""
    busy, median_s, p99_s = facts.base.busy_share, facts.figures.step_p50_s or 1.0, facts.figures.step_p99_s or 1.0
    if not facts.base.setting.num_workers or busy >= _BUSY:
        return None
    if p99_s > _VARIES * median_s and facts.limits.measured.contention < _DISTURBED:
        return "step variance", (
            f"step variance binds: workers are busy for {busy:.0%} of the time and wait for the slowest; steps take "
            f"{median_s * 1e3:,.2f} ms in the median, {p99_s * 1e3:,.2f} ms at the 99th percentile."
        )
    return "overhead", (
        f"the caller binds: workers are busy for {busy:.0%} of the time; handing rows over and waking each other "
        f"takes the rest of a batch of {facts.predicted.batch_s * 1e3:,.2f} ms."
    )


def _envs_bind(facts: Facts) -> tuple[str, str] | None:
    base, goal, measured = facts.base, facts.goal, facts.limits.measured
    if base.reset_share > base.busy_share / 2:
        return "resets", f"resets bind: they take {base.reset_share:.0%} of the workers' time."
    if measured.waits_share > WAITS:
        return "waiting", (
            f"waiting binds: the processor is free for {measured.waits_share:.0%} of a step, so more workers than "
            f"cores pay, until they compete for the processors."
        )
    cores = facts.limits.machine.cores
    if goal.num_envs is not None and facts.chosen.num_workers == goal.num_envs < cores:
        return "num_envs", f"the number of envs binds: {counted(goal.num_envs, 'env')} cannot use {cores:g} cores."
    return None


def _processors_bind(facts: Facts) -> tuple[str, str]:
    machine = facts.limits.machine
    if machine.is_throttled:
        return "quota", (
            f"the CPU quota binds: the control group allows {machine.cores:g} cores' worth of time, although "
            f"{counted(len(machine.cpus), 'processor')} can be seen."
        )
    if not facts.chosen.num_workers:
        return "env step", "the env's step binds: the envs step one after the other in this process."
    threads = len(machine.cpus) - machine.physical_cores
    smt = f", {threads} of them hyper-threads" if threads else ""
    busy = facts.base.busy_share
    return "cores", f"cores bind: {machine.cores:g} may be used{smt}; workers are busy for {busy:.0%} of the time."


def _limited(facts: Facts) -> tuple[str, str] | None:
    """Return the limit that excluded settings with more workers, if the chosen one has the most of the rest."""
    refused = [one for one in facts.runs if one.refusal is not None and one.refusal.is_of_machine]
    larger = [one for one in refused if one.setting.num_workers > facts.chosen.num_workers > 0]
    is_largest = facts.chosen.num_workers == max(one.setting.num_workers for one in facts.runs if one.refusal is None)
    if not larger or not is_largest or facts.predicted.is_scaled:
        return None
    refusal = larger[0].refusal
    assert refusal is not None
    return refusal.kind, f"{refusal.kind} binds: {larger[0].setting} {refusal.text}."


def _target(facts: Facts) -> Iterator[str]:
    if facts.meets_target is False:
        factor = (facts.goal.target_steps_per_s or 0.0) / facts.best_steps_per_s
        yield (
            f"the target of {facts.goal.target_steps_per_s:,.0f} env-steps/s is out of reach here by a factor of "
            f"{factor:.1f}."
        )


def _kind(facts: Facts) -> Iterator[str]:
    """Yield sentences that compare the chosen kind of setting with the others."""
    ran = [one for one in facts.runs if one.refusal is None]
    serial = [one for one in ran if not one.setting.num_workers]
    workers = [one for one in ran if one.setting.num_workers]
    if not facts.chosen.num_workers:
        best = max((one.steps_per_s for one in workers), default=0.0)
        yield (
            f"SerialEnv, in the caller's process, makes {facts.predicted.steps_per_s:,.0f} env-steps/s; worker "
            f"processes make {best:,.0f} at most. With SerialEnv, an env that crashes takes the program with it."
        )
    elif serial and (best := max(one.steps_per_s for one in serial)) >= GOOD_ENOUGH * facts.predicted.steps_per_s:
        yield f"SerialEnv, in the caller's process, makes {best:,.0f} env-steps/s."
    if facts.chosen.reset_ahead:
        yield (
            f"resets ahead pay: use ExecutorOptions(reset_ahead=True), which takes "
            f"{counted(facts.chosen.num_processes, 'worker')} of one env."
        )
    elif facts.chosen.mode == "first-k":
        yield (
            "stepping first-K pays: use send() and recv(min_envs=num_envs // 2), so that quick envs do not wait for "
            "slow ones."
        )


def _scaled(facts: Facts) -> Iterator[str]:
    if facts.predicted.is_scaled:
        yield (
            f"nothing was run on that machine: the speed is scaled from {facts.base.steps_per_s:,.0f} env-steps/s of "
            f"{facts.base.setting} here, with cores like this machine's."
        )


def _about_env(facts: Facts) -> Iterator[str]:
    measured = facts.limits.measured
    if measured.reset_share > _WORTH_A_SENTENCE:
        yield f"resets take {measured.reset_share:.0%} of an env's time ({time_text(measured.reset_median_s)} each)."
    if measured.end_share == 0 and not facts.base.resets:
        yield (
            f"no episode ended in {measured.steps_measured:,} steps, so resets ({time_text(measured.reset_median_s)} "
            f"each) are not in these speeds; --episode-steps says how long episodes are."
        )
    if measured.hidden_cpu_share > _WORTH_A_SENTENCE:
        yield (
            f"the env computes in {counted(measured.num_threads, 'thread')} besides the worker's, "
            f"{measured.hidden_cpu_share:.0%} of its processor time: workers compete for cores earlier."
        )
    yield from _growth(facts)
    if measured.contention > _DISTURBED:
        quota = "the CPU quota was used up, or " if facts.limits.machine.is_throttled else ""
        yield (
            f"{quota}other processes used the machine: the probe waited for a processor for "
            f"{measured.contention:.0%} of its time. Speeds are those of a busy machine."
        )
    if measured.stopped_by:
        yield f"the probe was ended early: {measured.stopped_by}"


def _growth(facts: Facts) -> Iterator[str]:
    measured = facts.limits.measured
    grown = measured.grown_per_1000_steps_bytes
    if grown > _GROWS:
        steps = max(0, facts.limits.room - facts.predicted.memory_bytes) / (grown * facts.chosen.num_envs) * 1000
        yield (
            f"the env grows by {grown / _MIB:,.1f} MiB per 1,000 steps: at this rate memory is full after about "
            f"{steps:,.0f} steps of each env."
        )
    if measured.grown_per_reset_bytes > _GROWS_PER_RESET:
        yield f"the env grew by {measured.grown_per_reset_bytes / _MIB:,.1f} MiB per reset; watch it in `envherd top`."
