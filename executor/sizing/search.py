"""The search: run settings on real executors, in rounds, until the choice is clear.

Guarantees: nothing is left running, also after an interrupt. The search exceeds its time budget by at most one start of
an executor, one round and three seconds. A setting that fails, dies or hangs is excluded. Each setting that was not run
has a reason.
Assumes: the env was probed, so a single env is known to work.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from envherd.executor.sizing.choosing import choose, corrected, is_sure, share_of_ends, speeds, survivors
from envherd.executor.sizing.driving import Figures, Runner, Turn
from envherd.executor.sizing.limits import Limits, Refusal
from envherd.executor.sizing.settings import (
    WAITS,
    Goal,
    Setting,
    ladder,
    most_envs_per_worker,
    smaller,
    tries_reset_ahead,
    worker_counts,
)
from envherd.workers.errors import EnvherdError, WorkerTimeout

#: Called with the current activity and the used share of the budget.
Progress = Callable[[str, float], None]

#: A start that takes longer is announced with its seconds.
_LONG_START_S = 5.0
#: Largest share of the remaining time for the start of one executor; and for all starts, if the number of envs is free,
#: so that fewer envs can shorten them.
_START_SHARE, _ALL_STARTS_SHARE = 0.4, 0.5
#: Share of the remaining time for comparing numbers of workers, if the number of envs must also be chosen.
_FIRST_SHARE = 0.6
#: Least number of rounds even if the time is up, and the seconds by which they may exceed it; one round is always run.
_LEAST_ROUNDS, _LATE_S = 2, 3.0
#: A call that takes this many times as long as expected, plus this many seconds, counts as hanging.
_PATIENCE_FACTOR, _PATIENCE_S = 10.0, 20.0
#: Share of an env's time spent in resets above which settings are run for whole episodes.
_LONG_RESETS = 0.2
#: Memory of the process of `SerialEnv` in addition to the envs, most of it torch.
_SERIAL_BYTES = 400 * 2**20


class Open(Protocol):
    """Starts executors; see `opening.Opener`."""

    def open(self, setting: Setting, patience_s: float) -> Runner:
        """Start the executor of a setting; a call of it that takes longer fails."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One setting, run or excluded.

    Attributes:
        setting: see `Setting`.
        steps_per_s: env-steps per second; see `choosing.speeds`. 0 if it was excluded.
        relative: speed relative to the fastest setting that was run to the end.
        busy_share: of its workers' time, spent on commands, 0..1.
        reset_share: of that time, spent on commands with a reset.
        resets: while it ran.
        rounds: number of its turns.
        memory_bytes: of workers, helper and shared memory, from the probe's measurement.
        start_s: until it was ready and its envs reset, as measured.
        refusal: why it was not run; None if it was.
    """

    setting: Setting
    steps_per_s: float = 0.0
    relative: float = 0.0
    busy_share: float = 0.0
    reset_share: float = 0.0
    resets: int = 0
    rounds: int = 0
    memory_bytes: int = 0
    start_s: float = 0.0
    refusal: Refusal | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return it as documented in docs/sizing.md."""
        setting, plain = vars(self.setting), {**vars(self)}
        del plain["setting"]
        return {**setting, **plain, "refusal": None if self.refusal is None else self.refusal.text}


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        runs: of all settings, including excluded ones, in the order in which they were considered.
        chosen: the chosen setting.
        figures: of the chosen setting's executor.
    """

    runs: tuple[Run, ...]
    chosen: Setting
    figures: Figures


class Search:
    """One search.

    Args:
        opener: starts executors.
        limits: of this machine.
        goal: fixed and wanted numbers.
        most_bytes: largest memory of all executors together.
        budget: begin and end of the search (monotonic seconds).
        progress: see `Progress`.
    """

    def __init__(
        self,
        opener: Open,
        limits: Limits,
        goal: Goal,
        most_bytes: int,
        budget: tuple[float, float],
        progress: Progress,
    ) -> None:
        self._opener, self._limits, self._goal = opener, limits, goal
        self._most_bytes = most_bytes
        self._began, self._end = budget
        self._progress = progress
        self._runners: dict[_Key, Runner] = {}
        self._taken_bytes: dict[_Key, int] = {}
        self._considered: dict[Setting, Refusal | None] = {}
        self._turns: list[dict[Setting, Turn]] = []
        self._whole: dict[Setting, float] = {}  # env-steps per second over whole episodes
        self._error: Exception | None = None

    def run(self) -> Found:
        """Search.

        Raises:
            DoesNotFit: one env, or the wanted number of envs, does not fit.
            EnvherdError, OSError: every setting failed; the error of the last.
        """
        try:
            alive = self._start_all()
            is_free, is_waiting = self._goal.num_envs is None, self._limits.measured.waits_share > WAITS
            if not (is_free or is_waiting):  # otherwise the fastest settings of their kinds are not known yet
                self._run_whole_episodes(alive)
                alive = [one for one in alive if self._considered[one] is None]
            if not alive or any(one not in self._whole for one in alive):
                share = _FIRST_SHARE if is_free else 1.0
                alive = self._rounds(alive, time.monotonic() + share * self._left)
            if is_free:
                self._vary_envs(alive)
            if is_free or is_waiting:
                rates = speeds(self._speeds())
                ran = [one for one in rates if self._considered[one] is None]
                self._run_whole_episodes(sorted(ran, key=rates.__getitem__, reverse=True))
            return self._found()
        finally:
            with contextlib.ExitStack() as stack:  # closes all of them, even if one raises
                for runner in self._runners.values():
                    stack.callback(runner.close)

    @property
    def _left(self) -> float:
        return self._end - time.monotonic()

    def _show(self, text: str) -> None:
        budget_s = self._end - self._began
        self._progress(text, min(1.0, (budget_s - self._left) / max(budget_s, 1e-9)))

    # ---- starting ----------------------------------------------------------------------------

    def _start_all(self) -> list[Setting]:
        """Start and return the settings that fit, the most promising first in case time or memory runs out."""
        limits, goal = self._limits, self._goal
        alive: list[Setting] = []
        cores = limits.machine.cores
        likely = min(math.ceil(cores), worker_counts(limits.measured, cores, goal)[-1])
        if cores <= 1 and limits.measured.waits_share <= WAITS:
            likely = 0  # `SerialEnv`

        def order(one: Setting) -> tuple[int, int]:
            return (1 if one.reset_ahead else 0 if one.num_workers == likely else 2), -one.num_workers

        for setting in sorted(self._wanted(), key=order):
            fitting = limits.fitted(setting)
            if fitting != setting:
                self._considered[setting] = limits.refusal(setting)
            if fitting is not None and fitting not in self._considered:
                self._consider(fitting, alive)
        if not alive:
            if self._error is not None:
                raise self._error
            refusals = [one for one in self._considered.values() if one is not None]
            raise limits.does_not_fit(refusals[-1])
        return alive

    def _wanted(self) -> list[Setting]:
        """Return the ladder, with few enough envs per worker to start all settings."""
        limits, goal = self._limits, self._goal
        each, most_s = most_envs_per_worker(limits.measured), _ALL_STARTS_SHARE * self._left
        while True:
            wanted = list(ladder(limits.measured, limits.machine.cores, goal, each))
            start_s = sum(limits.start_s(one) for one in {_key(one): one for one in wanted}.values())
            if start_s <= most_s or each == 1 or goal.num_envs is not None:
                return wanted
            largest = max(wanted, key=lambda one: one.num_envs)
            self._considered[largest] = Refusal(
                "start", f"takes {start_s:,.1f} s to start, with all others; a longer --budget allows for it"
            )
            each //= 2

    def _consider(self, setting: Setting, alive: list[Setting]) -> None:
        """Start or exclude a setting; use fewer envs if it takes too long and their number is free."""
        fewer = smaller(setting) if self._goal.num_envs is None else ()
        candidates = [setting, *(one for one in fewer if one not in self._considered)]
        for one in candidates:
            must_start = not alive and one is candidates[-1]
            _, kept_s = self._whole_episodes(alive)
            refusal = self._refusal_now(one, kept_s, must_start=must_start) or self._start(one)
            self._considered[one] = refusal
            if refusal is None:
                alive.append(one)
            if refusal is None or refusal.kind != "start":
                return

    def _refusal_now(self, setting: Setting, kept_s: float, *, must_start: bool) -> Refusal | None:
        """Return why a fitting setting cannot be started next to the others, keeping `kept_s` seconds free."""
        if (refusal := self._limits.refusal(setting)) is not None or _key(setting) in self._runners:
            return refusal
        start_s, most_s = self._limits.start_s(setting), _START_SHARE * (self._left - kept_s)
        taken_bytes = sum(self._taken_bytes.values()) + self._needed_bytes(setting)
        if taken_bytes > self._most_bytes and not must_start:
            return Refusal("start", "does not fit the memory next to the others")
        if start_s > most_s and not must_start:
            why = f"takes {start_s:,.1f} s to start" if most_s > 0 else "no time was left to start it"
            return Refusal("start", f"{why}; a longer --budget allows for it")
        return None

    def _needed_bytes(self, setting: Setting) -> int:
        return self._limits.memory_bytes(setting) + (0 if setting.num_workers else _SERIAL_BYTES)

    def _start(self, setting: Setting) -> Refusal | None:
        key = _key(setting)
        if key in self._runners:
            return None
        start_s = self._limits.start_s(setting)
        self._show(f"starting {setting}" + (f", about {start_s:,.0f} s" if start_s > _LONG_START_S else ""))
        try:
            self._runners[key] = self._opener.open(setting, self._patience_s(setting))
        except Exception as error:  # any failure excludes only this setting
            return self._failure(setting, error)
        self._taken_bytes[key] = self._needed_bytes(setting)
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

    # ---- running -----------------------------------------------------------------------------

    def _rounds(self, alive: Iterable[Setting], end: float) -> list[Setting]:
        """Run settings in rounds until the best is clear or the time is up; return the remaining ones."""
        alive, done, target = list(alive), 0, self._goal.target_steps_per_s
        while done == 0 or time.monotonic() < (end if done >= _LEAST_ROUNDS else end + _LATE_S):
            is_whole = self._round(alive, math.inf if done == 0 else end + _LATE_S)
            done += 1
            if not alive or not is_whole:
                break
            rounds = self._speeds()
            may_be_chosen = survivors(rounds, target)
            alive = [one for one in alive if one in may_be_chosen]
            if is_sure(rounds[-done:]) and (target is None or len(alive) == 1 or done >= 2 * _LEAST_ROUNDS):
                break
        if not self._turns:
            assert self._error is not None
            raise self._error
        return alive

    def _round(self, alive: list[Setting], end: float) -> bool:
        """Run each setting once; drop the round and return False if there was no time for all."""
        self._turns.append({})
        is_whole = True
        for setting in tuple(alive):
            if time.monotonic() > end:
                self._turns[-1].clear()
                is_whole = False
                break
            if setting in alive:  # may be gone already: two modes share an executor
                self._run_turn(setting, alive)
        self._turns = [one for one in self._turns if one]
        return is_whole

    def _run_turn(self, setting: Setting, alive: list[Setting], least_steps: int = 0) -> None:
        """Run one setting; if it fails, exclude all settings of its executor."""
        key = _key(setting)
        self._show(f"round {len(self._turns)}{self._leader()}")
        try:
            self._turns[-1][setting] = self._runners[key].turn(setting.mode, least_steps)
        except Exception as error:  # as in a start
            refusal = self._failure(setting, error)
            self._runners[key].close()
            self._taken_bytes[key] = 0
            for one in [one for one, reason in self._considered.items() if _key(one) == key and reason is None]:
                self._considered[one] = refusal
                if one in alive:
                    alive.remove(one)
                for turns in self._turns:
                    turns.pop(one, None)

    def _leader(self) -> str:
        if not any(self._turns[:-1]):
            return ""
        rates = speeds([one for one in self._speeds()[:-1] if one])
        best = max(rates, key=rates.__getitem__)
        return f", best so far: {best} ({rates[best]:,.0f}/s)"

    def _vary_envs(self, alive: list[Setting]) -> None:
        """Compare the best setting with the same on fewer envs, and with resets ahead."""
        best = choose(self._speeds(), self._goal.target_steps_per_s)
        others = [*smaller(best)]
        if best.num_workers and tries_reset_ahead(self._limits.measured, self._goal):
            others.append(Setting(num_envs=best.num_workers, num_workers=best.num_workers, reset_ahead=True))
        started = [best]
        for setting in others:
            if setting not in self._considered:
                self._consider(setting, started)
        if len(started) > 1:
            others = [one for one in alive if one != best]
            self._rounds([*started, *others], self._end)

    def _whole_episodes(self, settings: Iterable[Setting]) -> tuple[list[Setting], float]:
        """Return the settings to run for whole episodes, the first of each kind, and the seconds needed.

        Resets ahead slow steps down only while they run, and envs whose episodes have one length are reset together: if
        resets are long, normal turns are too short to show that.
        """
        one = self._limits.measured
        kinds: dict[tuple[str, bool], Setting] = {}
        for setting in settings:
            kinds.setdefault((setting.mode, setting.reset_ahead), setting)
        if one.reset_share < _LONG_RESETS or len(kinds) == 1:
            return [], 0.0

        def seconds(setting: Setting) -> float:
            """Return the seconds of a reset of each env, an episode, and its end."""
            busy = max(1.0, min(setting.num_workers, self._limits.machine.cores))
            return setting.num_envs * (2 * one.reset_median_s + one.step_mean_s / one.end_share) / busy

        needed_s = sum(map(seconds, kinds.values()))
        if needed_s > self._left:
            return [], 0.0
        # resets ahead continue after their turn, so it comes last
        return sorted(kinds.values(), key=lambda one: one.reset_ahead), needed_s

    def _run_whole_episodes(self, settings: Sequence[Setting]) -> None:
        """Run the first setting of each kind for an episode of each env, if resets are long and there is time."""
        chosen, _ = self._whole_episodes(settings)
        if not chosen:
            return
        alive = [*chosen]
        self._turns.append({})
        for setting in chosen:
            if setting in alive:
                self._run_turn(setting, alive, math.ceil(setting.num_envs / self._limits.measured.end_share))
        self._whole = {
            one: self._limits.measured.whole_steps(turn.steps, turn.resets) / turn.seconds
            for one, turn in self._turns[-1].items()
        }
        self._turns = [one for one in self._turns if one]

    def _speeds(self) -> list[Mapping[Setting, float]]:
        """Return the table of speeds, corrected to the usual number of resets."""
        measured, cores = self._limits.measured, self._limits.machine.cores
        turns: dict[Setting, list[Turn]] = {}
        for setting, turn in (item for one in self._turns for item in one.items()):
            turns.setdefault(setting, []).append(turn)
        end_share = share_of_ends([turn for own in turns.values() for turn in own], measured)

        def speed(setting: Setting, turn: Turn) -> float:
            whole = self._whole.get(setting)
            return whole or corrected(turn, setting, measured, end_share, turns[setting], cores)

        return [{setting: speed(setting, turn) for setting, turn in one.items()} for one in self._turns]

    # ---- what came of it ---------------------------------------------------------------------

    def _found(self) -> Found:
        rounds = self._speeds()
        chosen = choose(rounds, self._goal.target_steps_per_s)
        rates = speeds(rounds)
        best = max(rates[one] for one in rounds[-1])
        runs = tuple(self._run_of(setting, rates, best) for setting in self._considered)
        return Found(runs, chosen, self._runners[_key(chosen)].figures())

    def _run_of(self, setting: Setting, rates: Mapping[Setting, float], best: float) -> Run:
        refusal, memory_bytes = self._considered[setting], self._limits.memory_bytes(setting)
        turns = [one[setting] for one in self._turns if setting in one]
        if not turns or refusal is not None:
            return Run(setting=setting, memory_bytes=memory_bytes, refusal=refusal or _NO_TIME)
        worked_s = sum(turn.seconds for turn in turns) * max(1, setting.num_workers)
        return Run(
            setting=setting,
            steps_per_s=rates[setting],
            relative=rates[setting] / best,
            busy_share=min(1.0, sum(turn.busy_s for turn in turns) / worked_s),
            reset_share=min(1.0, sum(turn.reset_s for turn in turns) / worked_s),
            resets=sum(turn.resets for turn in turns),
            rounds=len(turns),
            memory_bytes=memory_bytes,
            start_s=self._runners[_key(setting)].start_s,
        )


_NO_TIME = Refusal("budget", "no time was left to run it; a longer --budget allows for it")
_Key = tuple[int, int, bool]


def _key(setting: Setting) -> _Key:
    """Return the key of a setting's executor, which runs both modes."""
    return setting.num_envs, setting.num_workers, setting.reset_ahead
