"""Which setting: pure, from a measurement, the machine and what is wanted; and what keeps it from being faster."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from envherd.executor.machine.machine import Machine
from envherd.executor.sizing.limits import Goal, Limits
from envherd.executor.sizing.measurement import Measurement
from envherd.executor.sizing.model import MOST_PER_WORKER, Model, Prediction, Setting
from envherd.executor.sizing.modes import MODES, Mode
from envherd.executor.sizing.overhead import Overhead
from envherd.executor.sizing.reasons import Facts, reasons
from envherd.executor.sizing.resets import Ahead, resets_ahead
from envherd.workers.errors import EnvherdError

#: A smaller setting is taken if it is at least this fast, relative to the best.
_GOOD_ENOUGH = 0.95
#: So much less where all of a batch is the executor's own time: what processes cost each other then is least certain.
_DOUBT = 0.15
#: Another mode than "sync" is more to write: it must be so much faster.
MODE_GAIN = 1.2
#: Workers beyond the processors, which only envs that wait have use for.
_MOST_WAITING_WORKERS = 256


class DoesNotFit(EnvherdError, RuntimeError):
    """Not even one env fits the limits."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What was decided.

    Attributes:
        setting: see `Setting`.
        prediction: of that setting.
        binding: what keeps it from being faster, one word or two.
        why: sentences, the most important first.
        preload: modules that the helper should import beside those it imports anyway.
        ahead: what `ExecutorOptions(reset_ahead=True)` would do with as many envs; None where it does not pay, or
            does not fit.
        memory_room_bytes: that were there to take, before headroom.
        most_envs_in_memory: envs that would fit on so many workers; None for more than anybody has asked for.
        neighbours: settings around it and what they would do, for comparison.
        meets_target: whether the wanted steps per second are reached; None if none were wanted.
    """

    setting: Setting
    prediction: Prediction
    binding: str
    why: tuple[str, ...]
    preload: tuple[str, ...]
    ahead: Ahead | None
    memory_room_bytes: int
    most_envs_in_memory: int | None
    neighbours: tuple[tuple[Setting, Prediction], ...]
    meets_target: bool | None

    def to_plain(self) -> dict[str, Any]:
        """Return it as documented in docs/sizing.md."""
        return {
            "num_envs": self.setting.num_envs,
            "num_workers": self.setting.num_workers,
            "mode": self.setting.mode,
            "preload": list(self.preload),
            "reset_ahead": None if self.ahead is None else asdict(self.ahead),
            "binding": self.binding,
            "why": list(self.why),
            "meets_target": self.meets_target,
            "memory_room_bytes": self.memory_room_bytes,
            "most_envs_in_memory": self.most_envs_in_memory,
            "predicted": asdict(self.prediction),
            "neighbours": [{**asdict(one), **asdict(two)} for one, two in self.neighbours],
        }


def decide(measured: Measurement, overhead: Overhead, machine: Machine, goal: Goal, num_frames: int = 4) -> Advice:
    """Return the smallest setting that is within 5 % (20 where overhead is all there is) of the fastest that fits.

    Args:
        measured: of the env.
        overhead: of the executor.
        machine: what may be used.
        goal: what is wanted.
        num_frames: of the executor's ring.

    Raises:
        DoesNotFit: not even one env fits (or not the number of envs that was asked for), with the numbers.
    """
    model = Model(measured, overhead, machine, policy_s=goal.policy_s, num_frames=num_frames)
    limits = Limits(model, goal)
    candidates = [setting for setting in _settings(model, goal) if limits.allow(setting)]
    if not candidates:
        raise DoesNotFit(limits.complaint(), needed_bytes=limits.least_bytes, room_bytes=limits.room)
    predicted = {setting: model.predict(setting) for setting in candidates}
    chosen, meets = _choose(predicted, goal)
    unlimited = max((model.predict(one).steps_per_s for one in _settings(model, goal)), default=0.0)
    ahead = resets_ahead(model, chosen, predicted[chosen])
    if not limits.fits(Setting(num_envs=2 * chosen.num_envs, num_workers=2 * chosen.num_envs)):
        ahead = None
    facts = Facts(
        model=model,
        goal_envs=goal.num_envs,
        target=goal.target_steps_per_s,
        chosen=chosen,
        prediction=predicted[chosen],
        ahead=ahead,
        best_steps_per_s=max(one.steps_per_s for one in predicted.values()),
        unlimited_steps_per_s=unlimited,
        limited_by=limits.refused_by,
        room_bytes=limits.room,
        headroom=goal.headroom,
        meets_target=meets,
    )
    binding, why = reasons(facts)
    return Advice(
        setting=chosen,
        prediction=predicted[chosen],
        binding=binding,
        why=why,
        preload=_preload(measured),
        ahead=ahead,
        memory_room_bytes=limits.room,
        most_envs_in_memory=limits.most_envs(chosen.num_workers),
        neighbours=tuple(_neighbours(chosen, predicted)),
        meets_target=meets,
    )


def _settings(model: Model, goal: Goal) -> Iterator[Setting]:
    """Yield the settings that are compared, smaller ones first."""
    workers = [goal.num_workers] if goal.num_workers else _worker_counts(model, goal.num_envs)
    for count in workers:
        envs = {goal.num_envs} if goal.num_envs else {count * each for each in _ENVS_PER_WORKER}
        for num_envs in sorted(envs):
            if count <= num_envs:
                for mode in goal.modes if num_envs > 1 else goal.modes[:1]:
                    yield Setting(num_envs=num_envs, num_workers=count, mode=mode)


_ENVS_PER_WORKER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, MOST_PER_WORKER)


def _worker_counts(model: Model, num_envs: int | None) -> list[int]:
    cores = math.ceil(model.machine.cores)
    most = cores
    if model.measured.waits_share > 0.2:
        busy = max(0.02, 1 - model.measured.waits_share)
        most = min(_MOST_WAITING_WORKERS, int(cores / busy) + 1)
    most = min(most, num_envs or most)
    steps = {*range(1, min(most, 16) + 1), *(int(most * share / 8) for share in range(1, 9)), most, cores}
    return sorted(count for count in steps if 1 <= count <= most)


def _choose(predicted: dict[Setting, Prediction], goal: Goal) -> tuple[Setting, bool | None]:
    """Return the setting, and whether the target is met."""
    if goal.target_steps_per_s is not None:
        fast = [s for s, one in predicted.items() if one.steps_per_s >= goal.target_steps_per_s]
        for mode in MODES:  # sync first: it is the least to write
            if mine := [setting for setting in fast if setting.mode == mode]:
                return min(mine, key=lambda s: _size(s, predicted)), True
    best = {mode: max((p.steps_per_s for s, p in predicted.items() if s.mode == mode), default=0.0) for mode in MODES}
    taken: Mode = "sync"
    for other in MODES:
        if best[other] > best[taken] * MODE_GAIN:
            taken = other
    fastest = max((p for s, p in predicted.items() if s.mode == taken), key=lambda p: p.steps_per_s)
    least = (_GOOD_ENOUGH - _DOUBT * fastest.overhead_s / fastest.batch_s) * fastest.steps_per_s
    good = [s for s, p in predicted.items() if s.mode == taken and p.steps_per_s >= least]
    chosen = min(good, key=lambda s: _size(s, predicted))
    return chosen, None if goal.target_steps_per_s is None else False


def _size(setting: Setting, predicted: dict[Setting, Prediction]) -> tuple[float, int, int]:
    return (setting.num_envs, setting.num_workers, predicted[setting].memory_bytes)


def _neighbours(chosen: Setting, predicted: dict[Setting, Prediction]) -> Iterator[tuple[Setting, Prediction]]:
    """Yield the settings next to the chosen one, one thing changed, in the same mode; then the other modes."""
    same = [one for one in predicted if one.mode == chosen.mode]
    ladder_workers = sorted({one.num_workers for one in same if one.num_envs == chosen.num_envs})
    ladder_envs = sorted({one.num_envs for one in same if one.num_workers == chosen.num_workers})
    for value in _beside(ladder_workers, chosen.num_workers):
        setting = Setting(num_envs=chosen.num_envs, num_workers=value, mode=chosen.mode)
        yield setting, predicted[setting]
    for value in _beside(ladder_envs, chosen.num_envs):
        setting = Setting(num_envs=value, num_workers=chosen.num_workers, mode=chosen.mode)
        yield setting, predicted[setting]
    for mode in MODES:
        setting = Setting(num_envs=chosen.num_envs, num_workers=chosen.num_workers, mode=mode)
        if mode != chosen.mode and setting in predicted:
            yield setting, predicted[setting]


def _beside(ladder: list[int], value: int) -> list[int]:
    at = ladder.index(value)
    return ladder[max(0, at - 1) : at] + ladder[at + 1 : at + 2]


def _preload(measured: Measurement) -> tuple[str, ...]:
    """Return the packages whose import made the first build slower than later ones, if none starts threads."""
    if measured.num_threads or measured.build_s < 2 * measured.build_further_s + 0.2:
        return ()
    return measured.imported
