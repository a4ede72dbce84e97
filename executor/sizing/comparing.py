"""How fast the env itself is on some workers, in all modes, and how much memory several take.

The model is made of one env's probe, and of envs that only look like it. Where workers compete for processors and
caches with each other and with the caller it may be off by a fifth, and of first-K and two groups, which send and
receive while workers compute, by a third (Melting Pot on two processors). So the env itself is run in all modes, in
turns, on as many workers as processors (eight at most) and on one; on that in all modes only if it is nearly as fast.
How much longer a step takes while all workers compute than while one does is then taken from it, and the model's
speeds are multiplied to agree with what was made: the more, the surer it is; of "sync" not wholly, since the machine's
speed may have changed since the probe. Turns in which others used the machine are left out if there are enough: a
virtual machine's host that takes processors away makes synchronous batches slower than others, if only for seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from envherd.executor.batched import BatchedEnv
from envherd.executor.sizing.limits import Goal, Limits
from envherd.executor.sizing.measurement import Measurement
from envherd.executor.sizing.model import Model, Setting
from envherd.executor.sizing.modes import MODES, Mode
from envherd.executor.sizing.overhead import Overhead, typical_log
from envherd.executor.sizing.probing import ProbeLimits
from envherd.executor.sizing.turns import (
    ENOUGH,
    LEAST_BATCHES,
    LEAST_TURNS,
    WARM_UP,
    Run,
    Turn,
    calm,
    quiet,
    ratios,
    take_turns,
)
from envherd.workers.errors import EnvherdError

#: Workers and envs of a worker at most.
_MOST_WORKERS, _MOST_ENVS = 8, (4, 2)
#: Resets of each setting that are enough to compare them too.
_MANY_RESETS = 20
#: Share of the budget to start in (longer: fewer envs, or none), and to run for.
_START_SHARE, _RUN_SHARE = 0.75, 0.6
#: The same of a single worker, which is run for comparison.
_ONE_SHARE = 0.5
#: A single worker that makes so much of what all make may be advised: it is run in all modes too.
_RIVAL = 0.75
#: How far the model is off by itself: what is measured counts as much more as it is the surer of the two.
_DOUBT = 0.3
#: How far the crowding of envs that only look like it is off.
_LIKENESS = 0.1
#: How much faster or slower than when the env was probed the machine may be by now: a virtual one's speed changes.
_DRIFT = 0.15


def compare_modes(
    open_env: Callable[[int, int], BatchedEnv], model: Model, limits: ProbeLimits, progress: Callable[[float], None]
) -> tuple[Measurement, Overhead]:
    """Run the env in all modes; return what the model is made of, with what was learned.

    That is the overhead's factors, or why there are none; and the memory of further envs.

    Args:
        open_env: starts an executor of so many envs on so many workers.
        model: of the env on this machine.
        limits: of the probe; a part of its seconds, and its bytes, may be taken here too.
        progress: called with the share that is done.
    """
    measured, overhead = model.measured, model.overhead
    wide, note = _affordable(model, limits)
    if wide is None:
        return measured, replace(overhead, modes_note=note)
    one = Setting(num_envs=wide.most_per_worker, num_workers=1)
    both_bytes = sum(model.memory_bytes(each.num_envs, each.num_workers) for each in (wide, one))
    has_one = (
        wide.num_workers > 1
        and model.start_s(one) <= _ONE_SHARE * limits.budget_s
        and both_bytes <= (limits.memory_bytes or both_bytes)
    )
    try:
        with contextlib.ExitStack() as stack:

            def start(setting: Setting) -> Run:
                env = stack.enter_context(open_env(setting.num_envs, setting.num_workers))
                return Run(env, is_throttled=model.machine.is_throttled)

            runs = {wide: start(wide)}
            rate = runs[wide].spell("sync").rate
            taken = runs[wide].memory_bytes()  # before there is another: pages that both share would be divided
            if has_one:
                runs[one] = start(one)
            modes = {wide: MODES}
            if has_one and _rate_of_all(runs[one].spell("sync").rate, one, wide, model) > _RIVAL * rate:
                modes[one] = MODES
            turns = take_turns(runs, modes, _RUN_SHARE * limits.budget_s, progress)
    except (EnvherdError, OSError) as error:
        reason = str(error).split("\n", 1)[0]
        said = f"{wide.num_envs} envs on {wide.num_workers} workers failed: {reason}"
        return measured, replace(overhead, modes_note=said)
    measured = replace(measured, further_env_bytes=further_env_bytes(taken, wide, model))
    return measured, with_factors(turns, wide, one if has_one else None, model)


def _rate_of_all(rate: float, one: Setting, wide: Setting, model: Model) -> float:
    """Return how many env-steps per second one worker would make with the envs of `wide`, by what it does."""
    modelled = [model.predict(setting).steps_per_s for setting in (one, replace(wide, num_workers=1))]
    return rate * modelled[1] / modelled[0]


def further_env_bytes(taken: int, setting: Setting, model: Model) -> int:
    """Return the memory of a further env: the mean of what the probe saw, and of what a setting has taken.

    The probe sees one or two, over several episodes; this sees several, in one. An env's memory may differ by a third
    from one episode to the next, and envs of one process use what others have given back.
    """
    others = setting.num_envs - setting.num_workers
    off = taken - model.memory_bytes(setting.num_envs, setting.num_workers)
    return max(0, model.measured.further_env_bytes + off // (2 * others))


def _affordable(model: Model, limits: ProbeLimits) -> tuple[Setting | None, str]:
    """Return the setting to run; else None, and why there is none (nothing if that needs no word)."""
    if model.measured.spec.batch_shape:  # an env of many rows is all that a worker has
        return None, ""
    workers = min(_MOST_WORKERS, max(1, int(model.machine.cores)))
    note = ""
    for per_worker in _MOST_ENVS:
        setting = Setting(num_envs=per_worker * workers, num_workers=workers)
        taken, start_s = model.memory_bytes(setting.num_envs, workers), model.start_s(setting)
        turn_s = len(MODES) * (WARM_UP + LEAST_BATCHES) * model.predict(setting).batch_s
        if taken > (limits.memory_bytes or taken) or not Limits(model, Goal()).allow(setting):
            note = f"{setting.num_envs} envs on {workers} workers do not fit the limits"
        elif start_s > _START_SHARE * limits.budget_s:
            note = f"starting {setting.num_envs} envs takes {start_s:,.1f} s (a longer --budget allows for it)"
        elif turn_s * LEAST_TURNS > limits.budget_s:
            note = f"a batch takes {model.predict(setting).batch_s:,.1f} s (a longer --budget allows for it)"
        else:
            return setting, ""
    return None, note


def with_factors(turns: list[Turn], wide: Setting, one: Setting | None, model: Model) -> Overhead:
    """Return the model's overhead with how many times as fast as modelled the env was.

    Args:
        turns: of the settings.
        wide: that was run in all modes.
        one: of a single worker, if there was one.
        model: of the env.
    """
    settings = [*turns[0].rates]
    overhead = with_crowding(turns, wide, model.overhead)
    model = Model(model.measured, overhead, model.machine)
    # A reset here or there decides a turn: turns without are compared, or many resets.
    are_of_steps = all(len(quiet(turns, wide, other)) >= ENOUGH for other in settings)
    if are_of_steps:
        model = Model(replace(model.measured, end_share=0.0, episode_steps=0), overhead, model.machine)
    elif min(sum(turn.resets[setting] for turn in turns) for setting in settings) < _MANY_RESETS:
        return replace(overhead, modes_note="resets took most of the time when they were run")

    def among(*compared: Setting) -> list[Turn]:
        return calm(quiet(turns, *compared) if are_of_steps else turns)

    others = float(np.median([turn.others_share for turn in among()]))

    def alone(setting: Setting) -> float:
        rates = [turn.rates[setting] for turn in among(setting)]
        return _factor(rates, model.predict(setting).steps_per_s, _DRIFT)

    def beside_sync(other: Setting) -> float:
        sync = replace(other, mode="sync")
        modelled = model.predict(other).steps_per_s / model.predict(sync).steps_per_s
        return _factor(ratios(among(other, sync), other, sync), modelled, others)

    def of_modes(setting: Setting) -> dict[Mode, float]:
        in_modes = [replace(setting, mode=mode) for mode in MODES[1:]]
        return {other.mode: beside_sync(other) for other in in_modes if other in settings}

    return replace(
        overhead,
        one_factor=1.0 if one is None else alone(one),
        sync_factor=alone(wide),
        mode_factors=of_modes(wide),
        one_mode_factors={} if one is None else of_modes(one),
        are_of_steps=are_of_steps,
        others_share=others,
    )


def with_crowding(turns: list[Turn], wide: Setting, overhead: Overhead) -> Overhead:
    """Return an overhead with how the env itself crowds beside how its likeness does, each as far as it is sure."""
    seen = [turn.crowding for turn in calm(turns) if turn.crowding is not None]
    if not seen or wide.num_workers != overhead.crowd:
        return overhead
    middle, error = typical_log(seen)
    own, other = 1 / error**2, 1 / (overhead.crowding_error**2 + _LIKENESS**2)
    log = (own * middle + other * np.log(overhead.crowding)) / (own + other)
    return replace(overhead, crowding=max(1.0, float(np.exp(log))), crowding_error=(own + other) ** -0.5)


def _factor(values: list[float], modelled: float, doubt: float) -> float:
    """Return what to multiply a modelled value with: the more, the surer it is that measured ones are others.

    Args:
        values: measured.
        modelled: the same, modelled.
        doubt: how far values may be off beside their own error, a share.
    """
    middle, error = typical_log(values)
    belief = _DOUBT**2 / (_DOUBT**2 + doubt**2 + error**2)
    return float(np.exp(belief * (middle - np.log(modelled))))
