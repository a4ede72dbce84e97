"""Sentences that explain a choice: first the bottleneck, then notable facts about the env."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from envherd.executor.sizing.limits import Limits
from envherd.executor.sizing.rule import WAITS, steps_are_uneven
from envherd.executor.sizing.scaling import Prediction
from envherd.executor.sizing.search import GOOD_ENOUGH, Run
from envherd.executor.sizing.settings import Goal, Setting, counted, time_text

_MIB = 2**20
#: Least share of a batch that is worth a sentence.
_WORTH_A_SENTENCE = 0.15
#: Least busy share of workers if the envs are the bottleneck.
_BUSY = 0.6
#: Resets bind from this share of an env's time on.
_MOSTLY_RESETS = 0.5
#: Least growth of one env in 1,000 steps that is not noise, in bytes.
_GROWS = 2 * _MIB
#: Share of the time spent waiting for a processor above which measurements are doubtful.
_DISTURBED = 0.2


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts behind the reasons.

    Attributes:
        limits: of the planned machine, with the env's figures.
        goal: of the sizing.
        runs: all settings that were considered here.
        chosen, predicted: the setting, and its prediction.
        serial: the prediction of `SerialEnv` with as many envs; None if it is no choice.
    """

    limits: Limits
    goal: Goal
    runs: tuple[Run, ...]
    chosen: Setting
    predicted: Prediction
    serial: Prediction | None

    @property
    def meets_target(self) -> bool | None:
        """Whether the target is reached; None without one."""
        target = self.goal.target_steps_per_s
        return None if target is None else self.predicted.steps_per_s >= target

    @property
    def busy_share(self) -> float | None:
        """Busy share of the chosen setting's workers; None if it was not run."""
        return next((one.busy_share for one in self.runs if one.setting == self.chosen and one.rounds), None)


def reasons(facts: Facts) -> tuple[str, tuple[str, ...]]:
    """Return the bottleneck and the sentences."""
    binding, sentence = _binding(facts)
    return binding, (sentence, *_target(facts), *_kind(facts), *_scaled(facts), *_about_env(facts))


def _binding(facts: Facts) -> tuple[str, str]:
    """Return the bottleneck and its sentence."""
    predicted = facts.predicted
    if facts.meets_target:
        return "target", (
            f"{facts.goal.target_steps_per_s:,.0f} env-steps/s are wanted: this is the smallest one that makes them."
        )
    if predicted.policy_s > predicted.batch_s / 2:
        policy_ms, batch_ms = predicted.policy_s * 1e3, predicted.batch_s * 1e3
        return "policy", f"the policy binds: it takes {policy_ms:,.2f} ms of a batch's {batch_ms:,.2f}."
    return _limited(facts) or _waiting_for_caller(facts) or _envs_bind(facts) or _processors_bind(facts)


def _limited(facts: Facts) -> tuple[str, str] | None:
    """Return the limit of the machine that excluded larger settings, if there are any."""
    wanted = [one for one in facts.runs if one.refusal is not None and one.refusal.is_of_machine]
    larger = [one for one in wanted if one.setting.num_processes >= facts.chosen.num_processes]
    if not larger:
        return None
    refusal = larger[0].refusal
    assert refusal is not None
    return refusal.kind, f"{refusal.kind} binds: {larger[0].setting} {refusal.text}."


def _waiting_for_caller(facts: Facts) -> tuple[str, str] | None:
    """Return the reason why workers wait, if they are not busy."""
    busy, measured = facts.busy_share, facts.limits.measured
    if busy is None or busy >= _BUSY:
        return None
    if steps_are_uneven(measured):
        return "step variance", (
            f"step variance binds: workers are busy for {busy:.0%} of the time and wait for the slowest; steps take "
            f"{measured.step_median_s * 1e3:,.2f} ms in the median, {measured.step_p99_s * 1e3:,.2f} ms at the 99th "
            f"percentile."
        )
    return "overhead", (
        f"the caller binds: workers are busy for {busy:.0%} of the time; handing rows over and waking each other "
        f"takes the rest of a batch of {facts.predicted.batch_s * 1e3:,.2f} ms."
    )


def _envs_bind(facts: Facts) -> tuple[str, str] | None:
    goal, measured = facts.goal, facts.limits.measured
    if measured.reset_share > _MOSTLY_RESETS:
        return "resets", f"resets bind: they take {measured.reset_share:.0%} of an env's time."
    if measured.waits_share > WAITS:
        return "waiting", (
            f"waiting binds: the processor is free for {measured.waits_share:.0%} of a step, so more workers than "
            f"cores pay, until they compete for the processors."
        )
    cores = facts.limits.machine.cores
    if goal.num_envs is not None and goal.num_envs <= facts.chosen.num_workers < cores:
        return "num_envs", f"the number of envs binds: {counted(goal.num_envs, 'env')} cannot use {cores:g} cores."
    return None


def _processors_bind(facts: Facts) -> tuple[str, str]:
    machine, busy = facts.limits.machine, facts.busy_share
    if machine.is_throttled:
        return "quota", (
            f"the CPU quota binds: the control group allows {machine.cores:g} cores' worth of time, although "
            f"{counted(len(machine.cpus), 'processor')} can be seen."
        )
    if not facts.chosen.num_workers:
        return "env step", "the env's step binds: the envs step one after the other in this process."
    threads = len(machine.cpus) - machine.physical_cores
    smt = f", {threads} of them hyper-threads" if threads else ""
    how_busy = "" if busy is None else f"; workers are busy for {busy:.0%} of the time"
    return "cores", f"cores bind: {machine.cores:g} may be used{smt}{how_busy}."


def _target(facts: Facts) -> Iterator[str]:
    target = facts.goal.target_steps_per_s
    if target is not None and not facts.meets_target:
        factor = target / facts.predicted.steps_per_s
        yield f"the target of {target:,.0f} env-steps/s is out of reach here by a factor of {factor:.1f}."


def _kind(facts: Facts) -> Iterator[str]:
    """Yield sentences that compare the chosen kind of setting with the others."""
    chosen, rate = facts.chosen, facts.predicted.steps_per_s
    is_quiet = facts.limits.measured.contention < _DISTURBED  # otherwise the load of the probe is not that of the runs
    if not chosen.num_workers:
        why = "one processor may be used" if chosen.num_envs > 1 else "there is one env"
        yield (
            f"SerialEnv, in the caller's process, is the right executor: {why}, so worker processes gain nothing. An "
            f"env that crashes takes the program with it; --workers 1 keeps it apart."
        )
    elif is_quiet and facts.serial is not None and facts.serial.steps_per_s >= GOOD_ENOUGH * rate:
        yield (
            f"SerialEnv, in the caller's process, makes as many: {facts.serial.steps_per_s:,.0f} env-steps/s by the "
            f"probe. Use it unless the envs may crash."
        )
    if chosen.reset_ahead:
        yield (
            f"resets ahead pay: use ExecutorOptions(reset_ahead=True), which takes "
            f"{counted(chosen.num_processes, 'worker')} of one env."
        )
    elif chosen.mode == "first-k":
        yield (
            "stepping first-K pays: use send() and recv(min_envs=num_envs // 2), so that quick envs do not wait for "
            "slow ones."
        )


def _scaled(facts: Facts) -> Iterator[str]:
    if facts.predicted.is_scaled and facts.chosen.num_workers:
        yield (
            f"nothing was run on that machine: the speed is scaled from the probe of one env here "
            f"({time_text(facts.limits.measured.whole_step_s)} a step), with cores like this machine's."
        )


def _about_env(facts: Facts) -> Iterator[str]:
    measured = facts.limits.measured
    if measured.reset_share > _WORTH_A_SENTENCE:
        yield f"resets take {measured.reset_share:.0%} of an env's time ({time_text(measured.reset_median_s)} each)."
    if measured.end_share == 0:
        yield (
            f"no episode ended in {measured.steps_measured:,} steps, so resets ({time_text(measured.reset_median_s)} "
            f"each) are not in these speeds; --episode-steps says how long episodes are."
        )
    if measured.hidden_cpu_share > _WORTH_A_SENTENCE:
        yield (
            f"the env computes in {counted(measured.num_threads, 'thread')} besides the worker's, "
            f"{measured.hidden_cpu_share:.0%} of its processor time: workers compete for cores earlier."
        )
    if (grown := measured.grown_per_1000_steps_bytes) > _GROWS:
        steps = max(0, facts.limits.room - facts.predicted.memory_bytes) / (grown * facts.chosen.num_envs) * 1000
        yield (
            f"the env grows by {grown / _MIB:,.1f} MiB per 1,000 steps: at this rate memory is full after about "
            f"{steps:,.0f} steps of each env."
        )
    if measured.contention > _DISTURBED:
        quota = "the CPU quota was used up, or " if facts.limits.machine.is_throttled else ""
        speeds = "" if facts.predicted.is_scaled else " Speeds are those of a busy machine."
        yield (
            f"{quota}other processes used the machine: the probe waited for a processor for "
            f"{measured.contention:.0%} of its time.{speeds}"
        )
    if measured.stopped_by:
        yield f"the probe was ended early: {measured.stopped_by}"
