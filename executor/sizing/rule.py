"""The rule: the settings worth running, from a probe's measurements. Pure; docs/reports/sizing.md has it in words."""

from __future__ import annotations

import math
from dataclasses import replace

from envherd.executor.sizing.measurement import Measurement
from envherd.executor.sizing.settings import Goal, Setting

#: Settings that are run, the rule's choice included.
MOST_SETTINGS = 3
#: An env waits if the processor is free for more than this share of its steps.
WAITS = 0.2
#: Most workers per core, only for envs that wait; and most workers in all.
_MOST_PER_CORE, _MOST_WAITING_WORKERS = 16, 128
#: Seconds of the steps of all envs below which a second worker costs more than it gains (CartPole, 2 processors: 8
#: envs, 0.12 ms: equal; 32 envs, 0.4 ms: two workers make 1.3 times the steps; 2026-11-27).
_SHORT_BATCH_S = 0.25e-3
#: Steps are uneven if their 99th percentile is more than this many medians and this many seconds.
_UNEVEN, _UNEVEN_S = 4.0, 1e-3
#: Resets are costly from this share of an env's time and this duration of one reset on.
_COSTLY_SHARE, _COSTLY_S = 0.1, 2e-3
#: Seconds of a worker's work in a batch that hide the batch's cost; least and most envs per worker.
_HIDES_S, _LEAST_ENVS, _MOST_ENVS = 1e-3, 4, 64


def settings_for(measured: Measurement, cores: float, goal: Goal) -> list[Setting]:
    """Return the settings to run: the rule's choice, then the alternatives that may be better; at most three.

    Args:
        measured: of the env.
        cores: processors that may be used.
        goal: fixed and wanted numbers.
    """
    waits = measured.waits_share > WAITS
    each = _envs_per_worker(measured)
    may_be_serial = goal.num_workers is None and not goal.workers_only and (goal.num_envs == 1 or not measured.is_alone)
    most = _most_workers(measured, cores, goal)
    is_short = (goal.num_envs or each * most) * measured.whole_step_s < _SHORT_BATCH_S
    # One env, or one processor: nothing can be done at the same time, or nothing that is worth a second worker.
    if may_be_serial and (goal.num_envs == 1 or (cores <= 1 and (is_short or not waits))):
        return [Setting(num_envs=goal.num_envs or each, num_workers=0)]
    count = most
    if goal.num_workers is None and not measured.is_alone:
        if is_short:  # waking a second worker takes longer than the steps
            count = 1
        # A target: as many workers as make it, by the probe.
        elif goal.target_steps_per_s is not None:
            count = min(most, max(1, math.ceil(goal.target_steps_per_s * measured.whole_step_s)))
    sync = Setting(num_envs=goal.num_envs or count * each, num_workers=count)
    wanted = [sync]
    # Uneven steps, or costly resets at different times: first-K, so that quick envs do not wait for slow ones.
    resets_differ = resets_are_costly(measured) and not measured.episode_steps  # else all envs are reset together
    if (steps_are_uneven(measured) or resets_differ) and sync.num_envs > 1 and not goal.workers_only:
        wanted = [replace(sync, mode="first-k"), sync]
    # Another number of workers: half of them may be as fast, or all of them faster than one.
    if goal.num_workers is None and not measured.is_alone and most > 1:
        other = most if count < most else math.ceil(count / 2)
        num_envs = goal.num_envs or other * each
        wanted.append(replace(wanted[0], num_envs=num_envs, num_workers=other))
    return wanted[:MOST_SETTINGS]


def _most_workers(measured: Measurement, cores: float, goal: Goal) -> int:
    """Return the fixed number of workers; or one per core, or more if envs wait, but at most one per env."""
    most = goal.num_envs or _MOST_WAITING_WORKERS * math.ceil(cores)
    if goal.num_workers is not None:
        return min(goal.num_workers, most)
    if goal.num_envs and measured.is_alone:
        return goal.num_envs
    count = math.ceil(cores)
    if measured.waits_share > WAITS:  # as many as keep the processors busy
        busy_share = max(1 / _MOST_PER_CORE, 1 - measured.waits_share)
        count = max(count, min(_MOST_WAITING_WORKERS, round(cores / busy_share)))
    return min(count, most)


def _envs_per_worker(measured: Measurement) -> int:
    """Return as many envs as hide a batch's cost, if their number is free; 1 if envs must be alone."""
    if measured.is_alone or measured.spec.batch_shape:
        return 1
    needed = math.ceil(_HIDES_S / max(measured.step_mean_s, 1e-9))
    return min(_MOST_ENVS, max(_LEAST_ENVS, 2 ** math.ceil(math.log2(needed))))


def steps_are_uneven(measured: Measurement) -> bool:
    """Return whether some steps take so long that other envs should not wait for them."""
    return measured.step_p99_s > max(_UNEVEN_S, _UNEVEN * measured.step_median_s)


def resets_are_costly(measured: Measurement) -> bool:
    """Return whether resets are long and frequent enough to matter."""
    return measured.reset_share >= _COSTLY_SHARE and measured.reset_median_s >= _COSTLY_S
