"""The confirming round: run a few settings on real executors, in turns, and take the smallest of the fastest.

Guarantees: nothing is left running, also after an interrupt. A setting that fails, dies or hangs is excluded. Each
setting that was not run has a reason. The time budget is exceeded by at most one start of an executor and one round.
Assumes: the env was probed, so a single env is known to work.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envherd.executor.batched import BatchedEnv
from envherd.executor.sizing.driving import Driver, Turn
from envherd.executor.sizing.limits import Limits, Refusal
from envherd.executor.sizing.settings import Goal, Setting
from envherd.workers.errors import EnvherdError, WorkerTimeout

#: Called with the current activity and the used share of the budget.
Progress = Callable[[str, float], None]

#: A smaller setting is chosen if it reaches this share of the best one's speed.
GOOD_ENOUGH = 0.95
#: Rounds; in each, every setting has one turn, so other load affects all alike.
NUM_ROUNDS = 5
#: Seconds of a turn; and of a turn under a CPU quota, which usually stops all processes ten times a second.
_SPAN_S, _THROTTLED_SPAN_S = 0.1, 0.5
#: A start that takes longer is announced with its seconds.
_LONG_START_S = 5.0
#: Largest share of the remaining time for the start of a further executor.
_START_SHARE = 0.5
#: A call that takes this many times as long as expected, plus this many seconds, counts as hanging.
_PATIENCE_FACTOR, _PATIENCE_S = 10.0, 20.0

#: The speeds of one round, env-steps per second.
Round = Mapping[Setting, float]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One setting, run or excluded; or `SerialEnv`, which is not run.

    Attributes:
        setting: see `Setting`.
        steps_per_s: env-steps per second, with the usual number of resets; from the probe if `rounds` is 0.
        relative: speed relative to the fastest setting.
        busy_share: of its workers' time, spent on commands, 0..1.
        rounds: number of its turns; 0 for `SerialEnv`.
        memory_bytes: of workers, helper and shared memory, from the probe's measurement.
        start_s: until it was ready and its envs reset, as measured.
        refusal: why it was not run; None if it was.
    """

    setting: Setting
    steps_per_s: float = 0.0
    relative: float = 0.0
    busy_share: float = 0.0
    rounds: int = 0
    memory_bytes: int = 0
    start_s: float = 0.0
    refusal: Refusal | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return it as documented in docs/sizing.md."""
        plain = {**vars(self.setting), **vars(self)}
        del plain["setting"]
        return {**plain, "refusal": None if self.refusal is None else self.refusal.text}


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        runs: of all settings, including excluded ones, in the order in which they were considered.
        chosen: the chosen setting.
    """

    runs: tuple[Run, ...]
    chosen: Setting


class Search:
    """Runs settings in rounds.

    Args:
        start: starts the executor of a setting; a call of it that takes longer than the given seconds fails.
        limits: of this machine.
        goal: with the target, and the policy's time.
        most_bytes: largest memory of all executors together.
        budget: begin and end of the search (monotonic seconds).
        progress: see `Progress`.
    """

    def __init__(
        self,
        start: Callable[[Setting, float], BatchedEnv],
        limits: Limits,
        goal: Goal,
        most_bytes: int,
        budget: tuple[float, float],
        progress: Progress,
    ) -> None:
        self._start, self._limits, self._goal = start, limits, goal
        self._most_bytes = most_bytes
        self._began, self._end = budget
        self._progress = progress
        self._span_s = _THROTTLED_SPAN_S if limits.machine.is_throttled else _SPAN_S
        self._drivers: dict[_Key, Driver] = {}
        self._considered: dict[Setting, Refusal | None] = {}
        self._turns: list[dict[Setting, Turn]] = []
        self._error: Exception | None = None

    def run(self, wanted: Iterable[Setting]) -> Found:
        """Run the settings that fit; where one does not, the largest one that fits in its place.

        Args:
            wanted: at least one with worker processes; the most promising first.

        Raises:
            DoesNotFit: one env, or the wanted number of envs, does not fit.
            EnvherdError, OSError: every setting failed; the error of the last.
        """
        try:
            for setting in wanted:
                self._consider(setting)
            if not self._drivers and self._error is None:
                refusal = next(one for one in self._considered.values() if one is not None)
                raise self._limits.does_not_fit(refusal)
            for number in range(1, NUM_ROUNDS + 1):
                self._show(f"round {number}")
                self._turns.append({})
                for setting in self._alive:
                    self._run_turn(setting)
                if time.monotonic() > self._end:
                    break
            if not self._alive:
                assert self._error is not None
                raise self._error
            return self._found()
        finally:
            with contextlib.ExitStack() as stack:  # closes all of them, even if one raises
                for driver in self._drivers.values():
                    stack.callback(driver.close)

    @property
    def _alive(self) -> list[Setting]:
        return [setting for setting, refusal in self._considered.items() if refusal is None]

    def _show(self, text: str) -> None:
        spent_s = time.monotonic() - self._began
        self._progress(text, min(1.0, spent_s / max(self._end - self._began, 1e-9)))

    def _consider(self, setting: Setting) -> None:
        fitting = self._limits.fitted(setting)
        if fitting != setting:
            self._considered[setting] = self._limits.refusal(setting)
        if fitting is not None and fitting not in self._considered:
            self._considered[fitting] = self._refusal_now(fitting) or self._open(fitting)

    def _refusal_now(self, setting: Setting) -> Refusal | None:
        """Return why a fitting setting cannot be started next to the others."""
        if _key(setting) in self._drivers or not self._alive:
            return None
        taken_bytes = sum(self._limits.memory_bytes(one) for one in {_key(one): one for one in self._alive}.values())
        if taken_bytes + self._limits.memory_bytes(setting) > self._most_bytes:
            return Refusal("budget", "does not fit the memory next to the others")
        start_s = self._limits.start_s(setting)
        if start_s > _START_SHARE * (self._end - time.monotonic()):
            return Refusal("budget", f"takes {start_s:,.1f} s to start; a longer --budget allows for it")
        return None

    def _open(self, setting: Setting) -> Refusal | None:
        if _key(setting) in self._drivers:
            return None
        start_s = self._limits.start_s(setting)
        self._show(f"starting {setting}" + (f", about {start_s:,.0f} s" if start_s > _LONG_START_S else ""))
        try:
            self._drivers[_key(setting)] = Driver(
                lambda: self._start(setting, self._patience_s(setting)), self._span_s, self._goal.policy_s
            )
        except Exception as error:  # any failure excludes only this setting
            return self._failure(setting, error)
        return None

    def _patience_s(self, setting: Setting) -> float:
        """Return the seconds after which a call counts as hanging."""
        return _PATIENCE_S + _PATIENCE_FACTOR * self._limits.start_s(setting)

    def _failure(self, setting: Setting, error: Exception) -> Refusal:
        if isinstance(error, TimeoutError) and not isinstance(error, EnvherdError):
            raise error  # of the program's signal handler, which ends the search
        self._error = error
        if isinstance(error, WorkerTimeout):
            return Refusal("failure", f"hung: a call took longer than {self._patience_s(setting):,.0f} s")
        return Refusal("failure", f"failed: {str(error).split(chr(10), 1)[0] or type(error).__name__}")

    def _run_turn(self, setting: Setting) -> None:
        """Run one setting; if it fails, exclude all settings of its executor."""
        if self._considered[setting] is not None:
            return  # its executor has failed in this round, in the other mode
        try:
            self._turns[-1][setting] = self._drivers[_key(setting)].turn(setting.mode)
        except Exception as error:  # as in a start
            refusal = self._failure(setting, error)
            self._drivers[_key(setting)].close()
            for one in self._alive:
                if _key(one) == _key(setting):
                    self._considered[one] = refusal

    def _found(self) -> Found:
        measured, alive = self._limits.measured, self._alive
        rounds = [
            {one: measured.whole_steps(turns[one].steps, turns[one].resets) / turns[one].seconds for one in alive}
            for turns in self._turns
        ]
        rates = speeds(rounds)
        runs = tuple(self._run_of(setting, rates) for setting in self._considered)
        return Found(runs, choose(rates, self._goal.target_steps_per_s))

    def _run_of(self, setting: Setting, rates: Mapping[Setting, float]) -> Run:
        refusal, memory_bytes = self._considered[setting], self._limits.memory_bytes(setting)
        if refusal is not None:
            return Run(setting=setting, memory_bytes=memory_bytes, refusal=refusal)
        turns = [one[setting] for one in self._turns]
        worked_s = sum(turn.seconds for turn in turns) * setting.num_workers
        return Run(
            setting=setting,
            steps_per_s=rates[setting],
            relative=rates[setting] / max(rates.values()),
            busy_share=min(1.0, sum(turn.busy_s for turn in turns) / worked_s),
            rounds=len(turns),
            memory_bytes=memory_bytes,
            start_s=self._drivers[_key(setting)].start_s,
        )


def speeds(rounds: Sequence[Round]) -> dict[Setting, float]:
    """Return the speed of each setting, env-steps per second.

    In a round every setting has one turn, so a disturbance of some seconds affects all of them. A speed is the first
    setting's median, times the median over rounds of the ratio to the first one.
    """
    anchor, *_ = rounds[0]
    rate = float(np.median([one[anchor] for one in rounds]))
    return {
        setting: rate * math.exp(float(np.median([math.log(one[setting] / one[anchor]) for one in rounds])))
        for setting in rounds[0]
    }


def choose(rates: Mapping[Setting, float], target: float | None = None) -> Setting:
    """Return the smallest setting within 5 % of the fastest, or the smallest one that reaches a target.

    Args:
        rates: env-steps per second of each setting.
        target: env-steps per second. If no setting reaches it, the fastest counts.
    """
    enough = GOOD_ENOUGH * max(rates.values())
    if target is not None and max(rates.values()) >= target:
        enough = target
    return min((one for one in rates if rates[one] >= enough), key=lambda one: one.rank)


_Key = tuple[int, int, bool]


def _key(setting: Setting) -> _Key:
    """Return the key of a setting's executor, which runs both modes."""
    return setting.num_envs, setting.num_workers, setting.reset_ahead
