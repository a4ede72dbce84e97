"""Sentences that explain a choice: first the bottleneck, then notable facts about the env. Pure."""

from collections.abc import Sequence

from envherd.executor.sizing.rule import GROWS, WAITS, Limits, steps_are_uneven
from envherd.executor.sizing.settings import Run, counted, size_text, time_text

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
    setting = chosen.setting
    num_workers = setting.num_workers
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
        / max(1, grown * setting.num_envs)
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
            not setting.num_workers,
            (
                f"SerialEnv, in the caller's process, makes {chosen.steps_per_s:,.0f} env-steps/s{others}. An env that "
                f"crashes takes the program with it; --workers 1 keeps it apart."
            ),
        ),
        (
            setting.mode == "first-k",
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
                f"the probe waited for a processor for {measured.contention:.0%} of its time. The speeds are without "
                f"the time that processes waited for a processor. Another run may advise otherwise: measure when the "
                f"machine is idle."
            ),
        ),
    )
    # The last one always applies.
    name, sentence = next(
        (name, text) for applies, name, text in bottlenecks if applies
    )
    return name, [sentence, *(text for applies, text in facts if applies)]
