"""Why a setting was chosen, in sentences: what binds it first, then what a reader should know about the env."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from envherd.executor.sizing.measurement import Measurement
from envherd.executor.sizing.model import Model, Prediction, Setting
from envherd.executor.sizing.resets import Ahead, share_of_resets

_MIB = 2**20
#: From which share of a batch something is worth a sentence.
_WORTH_A_SENTENCE = 0.15
#: Growth of one env that is not noise: bytes in 1,000 steps, and in a reset.
_GROWS, _GROWS_PER_RESET = 2 * _MIB, 2 * _MIB
#: A tail is heavy if its index is below the one and its 99th percentile above so many medians.
_HEAVY_TAIL, _LONG = 2.0, 4.0
_DISTURBED = 0.2


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What reasons are drawn from; see `deciding`."""

    model: Model
    goal_envs: int | None
    target: float | None
    chosen: Setting
    prediction: Prediction
    ahead: Ahead | None
    best_steps_per_s: float
    unlimited_steps_per_s: float
    limited_by: dict[str, int]
    room_bytes: int
    headroom: float
    meets_target: bool | None


def reasons(facts: Facts) -> tuple[str, tuple[str, ...]]:
    """Return what binds, and the sentences."""
    binding = _binding(facts)
    said = (_target, _mode, _serial, _about_env, _ahead)
    lines = [_SENTENCES[binding](facts), *(line for say in said for line in say(facts))]
    return binding, tuple(lines)


def _binding(facts: Facts) -> str:
    one, model = facts.prediction, facts.model
    if facts.meets_target:
        return "target"
    if facts.limited_by and facts.unlimited_steps_per_s > 1.05 * facts.best_steps_per_s:
        return max(facts.limited_by, key=lambda name: facts.limited_by[name])
    parts = {"policy": one.policy_s, "overhead": one.overhead_s, "envs": one.slowest_s}
    largest = max(parts, key=lambda name: parts[name])
    if largest != "envs":
        return largest
    if one.compute_s < 0.6 * one.slowest_s and one.mean_s < 0.7 * one.slowest_s:
        return "step variance"
    if facts.goal_envs is not None and facts.chosen.num_workers == facts.goal_envs < len(model.machine.cpus):
        return "num_envs"
    quota = model.machine.cgroup.cpu_quota
    return "quota" if quota is not None and quota < len(model.machine.cpus) else "cores"


def _target_met(facts: Facts) -> str:
    return (
        f"{facts.target:,.0f} env-steps/s are wanted: this is the smallest setting that makes them "
        f"({facts.best_steps_per_s:,.0f} would be possible)."
    )


def _memory(facts: Facts) -> str:
    measured = facts.model.measured
    usable = facts.room_bytes * (1 - facts.headroom)
    return (
        f"memory binds: {facts.room_bytes / _MIB:,.0f} MiB are available, {usable / _MIB:,.0f} of them usable with "
        f"{facts.headroom:.0%} left alone; a worker with its first env takes "
        f"{(measured.worker_bytes + measured.first_env_bytes) / _MIB:,.1f} MiB, a further env "
        f"{measured.further_env_bytes / _MIB:,.1f}. Without that limit {facts.unlimited_steps_per_s:,.0f} env-steps/s."
    )


def _open_files(facts: Facts) -> str:
    return (
        f"open files bind: {facts.model.machine.files_left} descriptors are left (ulimit -n), a worker needs three. "
        f"Without that limit {facts.unlimited_steps_per_s:,.0f} env-steps/s."
    )


def _processes(facts: Facts) -> str:
    return (
        f"processes bind: {facts.model.machine.processes_left} more are allowed, and a worker of this env is "
        f"{1 + facts.model.measured.num_threads} (its threads count)."
    )


def _gpu(facts: Facts) -> str:
    used = facts.model.measured.gpu_bytes or 0
    return f"GPU memory binds: a worker of this env takes {used / _MIB:,.0f} MiB of it."


def _policy(facts: Facts) -> str:
    one = facts.prediction
    return (
        f"the policy binds: it takes {one.policy_s * 1e3:,.1f} of {one.batch_s * 1e3:,.1f} ms of a batch, however many "
        f"envs there are; more envs in a batch are the only way to more steps."
    )


def _overhead(facts: Facts) -> str:
    one = facts.prediction
    return (
        f"the executor itself binds: these envs are so quick that {one.overhead_s / one.batch_s:.0%} of a batch are "
        f"wake-ups and copies ({one.overhead_s * 1e6:,.0f} us), and the calling process needs a processor of its own."
    )


def _variance(facts: Facts) -> str:
    one = facts.prediction
    return (
        f"step variance binds: a batch waits {one.slowest_s * 1e3:,.2f} ms for the slowest of "
        f"{facts.chosen.num_workers} workers, an average one needs {one.mean_s * 1e3:,.2f}."
    )


def _num_envs(facts: Facts) -> str:
    number = facts.goal_envs
    kept = "one env can keep one worker busy" if number == 1 else f"{number} envs can keep {number} workers busy"
    return f"the number of envs binds: {kept}, and there are {facts.model.machine.cores:g} cores."


def _quota(facts: Facts) -> str:
    machine = facts.model.machine
    return (
        f"the CPU quota binds: the control group allows {machine.cores:g} cores' worth of time, whatever the "
        f"{len(machine.cpus)} processors that can be seen."
    )


def _cores(facts: Facts) -> str:
    machine, one = facts.model.machine, facts.prediction
    busy = min(1.0, one.compute_s / one.batch_s)
    threads = len(machine.cpus) - machine.physical_cores
    smt = f", {threads} of them hyper-threads (counted for 0.3 of a core)" if threads else ""
    return f"cores bind: {machine.cores:g} may be used{smt}; the envs' own work fills {busy:.0%} of their time."


_SENTENCES = {
    "target": _target_met,
    "memory": _memory,
    "open files": _open_files,
    "processes": _processes,
    "GPU memory": _gpu,
    "policy": _policy,
    "overhead": _overhead,
    "step variance": _variance,
    "num_envs": _num_envs,
    "quota": _quota,
    "cores": _cores,
}


def _target(facts: Facts) -> Iterator[str]:
    if facts.meets_target is False:
        assert facts.target is not None
        factor = facts.target / facts.best_steps_per_s
        cores = f": about {factor * facts.model.machine.cores:,.0f} such cores would be needed"
        yield (
            f"the target of {facts.target:,.0f} env-steps/s is out of reach here by a factor of {factor:.1f}"
            f"{cores if _binding(facts) in ('cores', 'quota') else ''}."
        )


def _mode(facts: Facts) -> Iterator[str]:
    if facts.chosen.mode == "first-k":
        yield (
            "stepping first-K pays: use send() and recv(min_envs=num_envs // 2), so that quick envs do not wait for "
            "slow ones."
        )
    elif facts.chosen.mode == "two-groups":
        yield "two groups pay: send() one half of the envs while the policy acts on the other."
    if facts.model.overhead.modes_note:
        yield f"first-K and two groups are only modelled: {facts.model.overhead.modes_note}."


def _serial(facts: Facts) -> Iterator[str]:
    alone = Setting(num_envs=facts.chosen.num_envs, num_workers=0)
    serial = facts.model.predict(alone).steps_per_s
    if serial > 1.1 * facts.prediction.steps_per_s:
        yield (
            f"SerialEnv, without processes, would be faster for so many envs: {serial:,.0f} env-steps/s "
            f"(an env that crashes takes the program with it)."
        )


def _ahead(facts: Facts) -> Iterator[str]:
    if (ahead := facts.ahead) is not None:
        workers = 2 * facts.chosen.num_envs
        yield (
            f"the processors are idle for {ahead.idle_share:.0%} of the time: ExecutorOptions(reset_ahead=True) uses "
            f"it for the resets, with {workers} workers of one env ({ahead.memory_bytes / _MIB:,.0f} MiB), and makes "
            f"about {ahead.steps_per_s:,.0f} env-steps/s."
        )


def _about_env(facts: Facts) -> Iterator[str]:
    measured, overhead = facts.model.measured, facts.model.overhead
    resets = share_of_resets(facts.model)
    if resets > _WORTH_A_SENTENCE:
        yield f"resets take {resets:.0%} of the envs' time ({measured.reset_s * 1e3:,.1f} ms each)."
    if measured.end_share == 0:
        yield (
            f"no episode ended in {measured.steps_measured:,} steps, so resets ({measured.reset_s * 1e3:,.1f} ms each) "
            f"are not in the prediction; --episode-steps says how long episodes are."
        )
    if _has_heavy_tail(measured):
        yield f"step times are heavy-tailed (index {measured.tail_index:.1f}): expect the odd batch to be far slower."
    if measured.waits_share > _WORTH_A_SENTENCE:
        yield f"the env waits for {measured.waits_share:.0%} of a step, so more workers than cores pay."
    if measured.hidden_cpu_share > _WORTH_A_SENTENCE:
        yield (
            f"the env computes in threads of its own ({measured.num_threads}), {measured.hidden_cpu_share:.0%} of its "
            f"processor time: workers compete for cores sooner than their number says."
        )
    yield from _growth(facts)
    if measured.contention > _DISTURBED:
        reason = "other processes used the machine"
        if facts.model.machine.cgroup.cpu_quota is not None:
            reason = "the CPU quota was used up, or other processes used the machine"
        yield (
            f"{reason}: the probe waited for a processor for {measured.contention:.0%} of its time. Times are "
            f"corrected for that, and less certain."
        )
    if overhead.others_share > _DISTURBED:
        yield (
            f"others (processes, or the host of a virtual machine) took {overhead.others_share:.0%} of the processors "
            f"while modes were compared: the comparison is believed less."
        )
    if measured.stopped_by:
        yield f"the probe was ended early: {measured.stopped_by}"


def _has_heavy_tail(measured: Measurement) -> bool:
    if measured.tail_index is None or measured.contention > _DISTURBED:  # others' work makes every tail heavy
        return False
    longest, typical = np.quantile(measured.step_samples, (0.99, 0.5))
    return measured.tail_index < _HEAVY_TAIL and bool(longest > _LONG * typical)


def _growth(facts: Facts) -> Iterator[str]:
    measured = facts.model.measured
    grown = measured.grown_per_1000_steps_bytes
    if grown > _GROWS:
        rest = facts.room_bytes - facts.prediction.memory_bytes
        steps = max(0, rest) / (grown * facts.chosen.num_envs) * 1000
        yield (
            f"the env grows by {grown / _MIB:,.1f} MiB per 1,000 steps: if it goes on so, memory is full after about "
            f"{steps:,.0f} steps of each env."
        )
    if measured.grown_per_reset_bytes > _GROWS_PER_RESET:
        yield f"the env grew by {measured.grown_per_reset_bytes / _MIB:,.1f} MiB per reset; watch it in `envherd top`."
