"""Executors of the env that take turns in all modes: each turn compares what was done within a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from envherd.executor.batched import BatchedEnv
from envherd.executor.sizing.driving import Driver
from envherd.executor.sizing.model import Setting
from envherd.executor.sizing.modes import MODES, Mode
from envherd.executor.sizing.others import OthersShare
from envherd.executor.sizing.overhead import BusyTime, typical_log
from envherd.executor.sizing.verifying import pool_bytes

#: Seconds and batches of a spell at least, batches before it, and turns.
_SPELL_S, LEAST_BATCHES, WARM_UP = 0.15, 4, 2
#: The same where a quota stops all, mostly ten times a second: within one period anything may be measured.
_THROTTLED_SPELL_S = 0.5
LEAST_TURNS, _MOST_TURNS = 5, 16
#: Share of the machine that others may use in a turn that is believed.
_CALM = 0.1
#: Turns that are enough to compare.
ENOUGH = 3
#: Standard error of a ratio's logarithm that is small enough to stop.
_SURE = 0.05


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of each setting.

    Attributes:
        rates: env-steps per second.
        resets: envs that were reset meanwhile.
        crowding: how many times as long a step took while all workers computed as while one did; None if an env was
            reset meanwhile.
        others_share: of the machine, that others used.
    """

    rates: dict[Setting, float]
    resets: dict[Setting, int]
    crowding: float | None = None
    others_share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Spell:
    """What was done for a while: env-steps per second, resets, and seconds that a worker was busy for a step."""

    rate: float
    resets: int
    step_s: float


class Run:
    """An executor that takes turns.

    Args:
        env: running.
        is_throttled: whether a quota stops it now and then.
    """

    def __init__(self, env: BatchedEnv, *, is_throttled: bool = False) -> None:
        self._span_s = _THROTTLED_SPELL_S if is_throttled else _SPELL_S
        self.pids = [worker.pid for worker in env.statistics().workers]
        self._env = env
        self._driver = Driver(env, "sync")
        pool = env.engine.pool
        self._resets, self._busy = pool.slab.words["resets"], BusyTime(pool)
        self._first_worker = np.flatnonzero(pool.worker_of == 0)

    def spell(self, mode: Mode, until: float = 0.0) -> Spell:
        """Run in a mode; once more, while it is not later than `until`, if an env was reset here or there."""
        self._driver.switch(mode)
        return self._quiet(self._driver.run, until)

    def spell_of_one_worker(self, until: float) -> Spell:
        """Run the envs of one worker, while the others rest; after a spell of "sync"."""
        return self._quiet(partial(self._driver.run_some, self._first_worker), until)

    def memory_bytes(self) -> int:
        """Return what its workers and their helper take."""
        return pool_bytes(self.pids)

    def _quiet(self, run: Callable[..., tuple[int, float]], until: float) -> Spell:
        return quiet_spell(partial(self._measured, run), self._driver.restart, self._env.num_envs, until)

    def _measured(self, run: Callable[..., tuple[int, float]]) -> Spell:
        run(0.0, least=WARM_UP)
        before = int(self._resets.sum())
        self._busy.begin()
        steps, spent_s = run(self._span_s, least=LEAST_BATCHES)
        busy_s = float(self._busy.end().sum())
        return Spell(rate=steps / spent_s, resets=int(self._resets.sum()) - before, step_s=max(1e-9, busy_s / steps))


def quiet_spell(run: Callable[[], Spell], restart: Callable[[], None], num_envs: int, until: float) -> Spell:
    """Run; if here and there an env was reset, once more, as long as it is not later than `until` (monotonic).

    Before that all are reset: modes that exchange move the ends of episodes apart, and then there is always one.
    """
    spell = run()
    while 0 < spell.resets <= num_envs and time.monotonic() < until:
        restart()
        spell = run()
    return spell


def take_turns(
    runs: Mapping[Setting, Run],
    modes: Mapping[Setting, Sequence[Mode]],
    seconds: float,
    progress: Callable[[float], None],
) -> list[Turn]:
    """Run executors in turns.

    Args:
        runs: by how they were made.
        modes: in which each is run, "sync" the first; only that one where nothing is said.
        seconds: after which it is enough, if there were some turns. For these, spells with a reset here or there are
            run again until twice the time is over.
        progress: called with the share that is done.
    """
    turns: list[Turn] = []
    others = OthersShare([pid for run in runs.values() for pid in run.pids])
    end = time.monotonic() + seconds
    while len(turns) < LEAST_TURNS or (len(turns) < _MOST_TURNS and time.monotonic() < end and not _is_sure(turns)):
        progress(len(turns) / _MOST_TURNS)
        others.begin()
        turns.append(replace(_turn(runs, modes, end + seconds), others_share=others.end()))
    return turns


def _turn(runs: Mapping[Setting, Run], modes: Mapping[Setting, Sequence[Mode]], end: float) -> Turn:
    wide = next(iter(runs))
    crowded = runs[wide].spell("sync", end)
    alone = runs[wide].spell_of_one_worker(end) if wide.num_workers > 1 else crowded
    spells = {wide: crowded}
    for setting, run in runs.items():
        for mode in modes.get(setting, MODES[:1]):
            if (other := replace(setting, mode=mode)) not in spells:
                spells[other] = run.spell(mode, end)
    return Turn(
        rates={setting: spell.rate for setting, spell in spells.items()},
        resets={setting: spell.resets for setting, spell in spells.items()},
        crowding=None if crowded.resets or alone.resets else crowded.step_s / alone.step_s,
    )


def ratios(turns: Sequence[Turn], setting: Setting, other: Setting) -> list[float]:
    """Return how many times as fast as another a setting was."""
    return [turn.rates[setting] / turn.rates[other] for turn in turns]


def quiet(turns: Sequence[Turn], *settings: Setting) -> list[Turn]:
    """Return the turns in which none of the settings had a reset."""
    return [turn for turn in turns if not any(turn.resets[setting] for setting in settings)]


def calm(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns in which others used little of the machine; if there are few such, the calmest."""
    shares = sorted(turn.others_share for turn in turns)
    most = max([_CALM, *shares[ENOUGH - 1 : ENOUGH]])
    return [turn for turn in turns if turn.others_share <= most]


def _is_sure(turns: Sequence[Turn]) -> bool:
    believed = [turn for turn in turns if turn.others_share <= _CALM]
    if len(believed) < LEAST_TURNS:
        return False
    wide, *others = turns[0].rates
    return all(typical_log(ratios(believed, other, wide))[1] < _SURE for other in others)
