"""The confirming round: run a few settings on real executors, in turns, and take the smallest of the fastest.

Guarantees: nothing is left running, also after an interrupt. A setting that fails, dies or hangs is excluded. Each
setting that was not run has a reason. The time budget is exceeded by at most one start of an executor and one round.
Assumes: the env was probed, so a single env is known to work.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from envherd.executor.sizing.driving import Driver, Subject, Turn
from envherd.executor.sizing.limits import Limits
from envherd.executor.sizing.probe import Progress
from envherd.executor.sizing.settings import Refusal, Run, Setting
from envherd.workers.errors import EnvherdError, WorkerTimeout

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


class Confirmation:
    """Runs settings of an env in rounds. Both modes of the same envs have one executor, and fail together.

    Args:
        subject: the env.
        limits: of this machine; all executors together stay within its usable memory.
        budget: begin and end (monotonic seconds).
        progress: called with the current activity and the used share of the budget.
    """

    def __init__(self, subject: Subject, limits: Limits, budget: tuple[float, float], progress: Progress) -> None:
        self._subject, self._limits = subject, limits
        self._began, self._end = budget
        self._progress = progress
        self._span_s = _THROTTLED_SPAN_S if limits.machine.is_throttled else _SPAN_S
        self._refusals: dict[Setting, Refusal | None] = {}
        self._turns: dict[Setting, list[Turn]] = {}
        self._drivers: dict[tuple[int, int], Driver] = {}  # those that have not failed
        self._error: Exception | None = None

    def run(self, settings: Mapping[Setting, Refusal | None]) -> tuple[Run, ...]:
        """Run settings in rounds.

        Args:
            settings: with worker processes, the most promising first; with reasons not to run some.

        Returns:
            One entry for each setting; at least one was run.

        Raises:
            EnvherdError, OSError: every setting failed; the error of the last.
        """
        with contextlib.ExitStack() as stack:  # closes all executors, even if one raises
            for setting, refusal in settings.items():
                self._refusals[setting], self._turns[setting] = refusal, []
                if refusal is None and _executor(setting) not in self._drivers:
                    self._start(setting, stack)
            for number in range(1, NUM_ROUNDS + 1):
                self._show(f"round {number}")
                for setting in self._alive:
                    self._run_turn(setting)
                if time.monotonic() > self._end:
                    break
            if not self._alive:
                assert self._error is not None
                raise self._error
            return self._runs()

    @property
    def _alive(self) -> list[Setting]:
        return [setting for setting, refusal in self._refusals.items() if refusal is None]

    def _show(self, text: str) -> None:
        spent_s = time.monotonic() - self._began
        self._progress(text, min(1.0, spent_s / max(self._end - self._began, 1e-9)))

    def _start(self, setting: Setting, stack: contextlib.ExitStack) -> None:
        self._refusals[setting] = self._refusal_now(setting)
        if self._refusals[setting] is not None:
            return
        start_s = self._limits.start_s(setting)
        self._show(f"starting {setting}" + (f", about {start_s:,.0f} s" if start_s > _LONG_START_S else ""))
        begin = functools.partial(self._subject.start, setting, self._patience_s(setting))
        try:
            driver = Driver(begin, self._span_s, self._limits.goal.policy_s)
        except Exception as error:  # any failure excludes only this setting
            self._refusals[setting] = self._failure(setting, error)
        else:
            self._drivers[_executor(setting)] = driver
            stack.callback(driver.close)

    def _refusal_now(self, setting: Setting) -> Refusal | None:
        """Return why a fitting setting cannot be started next to the others."""
        others = {_executor(one): self._limits.memory_bytes(one) for one in self._alive if one != setting}
        if not others:
            return None
        if sum(others.values()) + self._limits.memory_bytes(setting) > self._limits.usable:
            return Refusal("budget", "does not fit the memory next to the others")
        start_s = self._limits.start_s(setting)
        if start_s > _START_SHARE * (self._end - time.monotonic()):
            return Refusal("budget", f"takes {start_s:,.1f} s to start; a longer --budget allows for it")
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
        driver = self._drivers.get(_executor(setting))
        if driver is None:
            return  # it has failed in this round, in the other mode
        try:
            self._turns[setting].append(driver.turn(setting.mode))
        except Exception as error:  # as in a start
            refusal = self._failure(setting, error)
            del self._drivers[_executor(setting)]
            driver.close()
            self._refusals |= {one: refusal for one in self._alive if _executor(one) == _executor(setting)}

    def _runs(self) -> tuple[Run, ...]:
        measured, alive = self._limits.measured, self._alive
        rounds = [
            {
                setting: measured.whole_steps(turn.steps, turn.resets) / turn.seconds
                for setting, turn in zip(alive, turns, strict=True)
            }
            for turns in zip(*(self._turns[setting] for setting in alive), strict=True)
        ]
        rates = speeds(rounds)
        return tuple(self._run_of(setting, refusal, rates) for setting, refusal in self._refusals.items())

    def _run_of(self, setting: Setting, refusal: Refusal | None, rates: Mapping[Setting, float]) -> Run:
        memory_bytes, turns = self._limits.memory_bytes(setting), self._turns[setting]
        if refusal is not None:
            return Run(setting=setting, memory_bytes=memory_bytes, refusal=refusal)
        worked_s = sum(turn.seconds for turn in turns) * setting.num_workers
        return Run(
            setting=setting,
            steps_per_s=rates[setting],
            busy_share=min(1.0, sum(turn.busy_s for turn in turns) / worked_s),
            rounds=len(turns),
            memory_bytes=memory_bytes,
            start_s=self._drivers[_executor(setting)].start_s,
        )


def speeds(rounds: Sequence[Mapping[Setting, float]]) -> dict[Setting, float]:
    """Return the speed of each setting, env-steps per second.

    In a round every setting has one turn, so a disturbance of some seconds affects all of them. A speed is the first
    setting's median, times the median over rounds of the ratio to the first one.

    Args:
        rounds: env-steps per second of each setting in each round.
    """
    anchor, *_ = rounds[0]
    rate = float(np.median([one[anchor] for one in rounds]))
    return {
        setting: rate * math.exp(float(np.median([math.log(one[setting] / one[anchor]) for one in rounds])))
        for setting in rounds[0]
    }


def choose(runs: Iterable[Run], target: float | None = None) -> Run:
    """Return the smallest setting within 5 % of the fastest, or the smallest one that reaches a target.

    Args:
        runs: those without a refusal; at least one.
        target: env-steps per second. If no setting reaches it, the fastest counts.
    """
    runs = list(runs)
    most = max(one.steps_per_s for one in runs)
    enough = target if target is not None and most >= target else GOOD_ENOUGH * most
    return min((one for one in runs if one.steps_per_s >= enough), key=lambda one: one.setting.rank)


def _executor(setting: Setting) -> tuple[int, int]:
    """Return what settings with one executor have in common; it runs both modes."""
    return setting.num_envs, setting.num_workers
