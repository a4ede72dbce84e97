"""Sentences that explain a choice: first the bottleneck, then notable facts about the env."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from envherd.executor.sizing.confirming import GOOD_ENOUGH
from envherd.executor.sizing.limits import Limits
from envherd.executor.sizing.rule import WAITS, steps_are_uneven
from envherd.executor.sizing.settings import Run, counted, time_text

_MIB = 2**20
#: Least share of a batch that is worth a sentence.
_WORTH_A_SENTENCE = 0.15
#: Least busy share of workers if the envs are the bottleneck.
_BUSY = 0.6
#: Resets bind from this share of an env's time on.
_MOSTLY_RESETS = 0.5
#: Least growth of one env in 1,000 steps that is not noise, in bytes.
_GROWS = 2 * _MIB
#: Share of the probe's time spent waiting for a processor, and of the processors' time that other programs took, above
#: which measurements are doubtful.
_DISTURBED = 0.2


def reasons(
    limits: Limits, chosen: Run, runs: Sequence[Run], serial: Run | None, others_share: float = 0.0
) -> tuple[str, tuple[str, ...]]:
    """Return the bottleneck, in one or two words, and the sentences.

    Args:
        limits: of the planned machine.
        chosen: the run of the chosen setting.
        runs: all settings that were considered.
        serial: what `SerialEnv` makes with as many envs; None if it is no choice.
        others_share: of the processors' time, that other programs took meanwhile.
    """
    binding, sentence = _binding(limits, chosen, runs)
    sentences = (sentence, *_kind(limits, chosen, serial), *_about_env(limits, chosen))
    return binding, (*sentences, *_about_load(limits, others_share))


def _binding(limits: Limits, chosen: Run, runs: Sequence[Run]) -> tuple[str, str]:
    """Return the bottleneck and its sentence."""
    goal = limits.goal
    if goal.is_met_by(chosen):
        return (
            "target",
            f"{goal.target_steps_per_s:,.0f} env-steps/s are wanted: this is the smallest one that makes them.",
        )
    if goal.policy_s > chosen.batch_s / 2:
        policy_ms, batch_ms = goal.policy_s * 1e3, chosen.batch_s * 1e3
        return "policy", f"the policy binds: it takes {policy_ms:,.2f} ms of a batch's {batch_ms:,.2f}."
    larger = [one for one in runs if one.setting.num_workers >= chosen.setting.num_workers]
    for one in larger:  # a limit of the machine has excluded it
        if one.refusal is not None and one.refusal.is_of_machine:
            return one.refusal.kind, f"{one.refusal.kind} binds: {one.setting} {one.refusal.text}."
    return _waiting_for_caller(limits, chosen) or _envs_bind(limits, chosen) or _processors_bind(limits, chosen)


def _waiting_for_caller(limits: Limits, chosen: Run) -> tuple[str, str] | None:
    """Return the reason why workers wait, if they are not busy."""
    busy, measured = chosen.busy_share, limits.measured
    if chosen.is_scaled or busy >= _BUSY:
        return None
    if steps_are_uneven(measured):
        return "step variance", (
            f"step variance binds: workers are busy for {busy:.0%} of the time and wait for the slowest; steps take "
            f"{measured.step_median_s * 1e3:,.2f} ms in the median, {measured.step_p99_s * 1e3:,.2f} ms at the 99th "
            f"percentile."
        )
    return "overhead", (
        f"the caller binds: workers are busy for {busy:.0%} of the time; handing rows over and waking each other "
        f"takes the rest of a batch of {chosen.batch_s * 1e3:,.2f} ms."
    )


def _envs_bind(limits: Limits, chosen: Run) -> tuple[str, str] | None:
    goal, measured = limits.goal, limits.measured
    if measured.reset_share > _MOSTLY_RESETS:
        return "resets", f"resets bind: they take {measured.reset_share:.0%} of an env's time."
    if chosen.setting.num_workers and measured.waits_share > WAITS:
        return "waiting", (
            f"waiting binds: the processor is free for {measured.waits_share:.0%} of a step, so more workers than "
            f"cores pay, until they compete for the processors."
        )
    cores = limits.machine.cores
    if goal.num_envs is not None and goal.num_envs <= chosen.setting.num_workers < cores:
        return "num_envs", f"the number of envs binds: {counted(goal.num_envs, 'env')} cannot use {cores:g} cores."
    return None


def _processors_bind(limits: Limits, chosen: Run) -> tuple[str, str]:
    machine = limits.machine
    if machine.is_throttled:
        return "quota", (
            f"the CPU quota binds: the control group allows {machine.cores:g} cores' worth of time, although "
            f"{counted(len(machine.cpus), 'processor')} can be seen."
        )
    if not chosen.setting.num_workers:
        return "env step", "the env's step binds: the envs step one after the other in this process."
    threads = len(machine.cpus) - machine.physical_cores
    smt = f", {threads} of them hyper-threads" if threads else ""
    how_busy = "" if chosen.is_scaled else f"; workers are busy for {chosen.busy_share:.0%} of the time"
    return "cores", f"cores bind: {machine.cores:g} may be used{smt}{how_busy}."


def _kind(limits: Limits, chosen: Run, serial: Run | None) -> Iterator[str]:
    """Yield sentences on the target, and that compare the chosen kind of setting with the others."""
    setting, measured = chosen.setting, limits.measured
    if limits.goal.is_met_by(chosen) is False:
        target = limits.goal.target_steps_per_s or 0.0
        factor = target / chosen.steps_per_s
        yield f"the target of {target:,.0f} env-steps/s is out of reach here by a factor of {factor:.1f}."
    is_quiet = measured.contention < _DISTURBED  # otherwise the load of the probe is not that of the runs
    if not setting.num_workers:
        why = "one processor may be used" if setting.num_envs > 1 else "there is one env"
        yield (
            f"SerialEnv, in the caller's process, is the right executor: {why}, so worker processes gain nothing. An "
            f"env that crashes takes the program with it; --workers 1 keeps it apart."
        )
    elif is_quiet and serial is not None and serial.steps_per_s >= GOOD_ENOUGH * chosen.steps_per_s:
        factor = serial.steps_per_s / chosen.steps_per_s
        many = "as many" if factor < 1 / GOOD_ENOUGH else f"{factor:.1f} times as many"
        yield (
            f"SerialEnv, in the caller's process, makes {many}: {serial.steps_per_s:,.0f} env-steps/s by the probe. "
            f"Use it unless the envs may crash."
        )
    if setting.mode == "first-k":
        yield (
            "stepping first-K pays: use send() and recv(min_envs=num_envs // 2), so that quick envs do not wait for "
            "slow ones."
        )
    if chosen.is_scaled and setting.num_workers:
        yield (
            f"nothing was run on that machine: the speed is scaled from the probe of one env here "
            f"({time_text(measured.whole_step_s)} a step), with cores like this machine's."
        )


def _about_env(limits: Limits, chosen: Run) -> Iterator[str]:
    measured = limits.measured
    if measured.is_alone:
        yield f"each env needs its own worker: {measured.why_alone}"
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
        steps = max(0, limits.room - chosen.memory_bytes) / (grown * chosen.setting.num_envs) * 1000
        yield (
            f"the env grows by {grown / _MIB:,.1f} MiB per 1,000 steps: at this rate memory is full after about "
            f"{steps:,.0f} steps of each env."
        )


def _about_load(limits: Limits, others_share: float) -> Iterator[str]:
    """Yield a sentence if the measurements are doubtful."""
    contention = limits.measured.contention
    if contention <= _DISTURBED and others_share <= _DISTURBED:
        return
    quota = "the CPU quota was used up, or " if limits.machine.is_throttled else ""
    yield (
        f"{quota}other programs used the machine: they took {others_share:.0%} of the processors' time, and the probe "
        f"waited for a processor for {contention:.0%} of its time. Another run may advise otherwise: measure when the "
        f"machine is idle."
    )
