"""The search: settings run on real executors, in rounds, until it is clear which one to take.

Guarantees: whatever happens, an interrupt too, nothing is left running. The time budget is kept, late by two rounds and
one start of an executor at most; each setting that is not run has the reason.
Assumes: the env was probed, so that a single one is known to work.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from envherd.executor.batched import BatchedEnv
from envherd.executor.sizing.choosing import (
    choose,
    corrected,
    is_sure,
    relative,
    share_of_ends,
    survivors,
    typical_rates,
)
from envherd.executor.sizing.driving import Driver, Turn
from envherd.executor.sizing.limits import Limits, Refusal
from envherd.executor.sizing.settings import Goal, Setting, ladder, smaller, worker_counts
from envherd.workers.errors import EnvherdError

Open = Callable[[Setting], BatchedEnv]
#: Called with what is done now, and the share of the budget that is used up.
Progress = Callable[[str, float], None]

#: Seconds of a turn; and where a quota stops all processes, mostly ten times a second.
_SPAN_S, _THROTTLED_SPAN_S = 0.15, 0.5
#: Share of the time that is left which the start of one executor may take.
_START_SHARE = 0.4
#: Share of the time that is left for comparing numbers of workers, where the number of envs is to be chosen too.
_FIRST_SHARE = 0.6
#: Rounds however short the budget is.
_LEAST_ROUNDS = 2


@dataclass(frozen=True, kw_only=True)
class Run:
    """One setting, run or struck out.

    Attributes:
        setting: see `Setting`.
        steps_per_s: env-steps per second; the median of its turns. 0 if it was struck out.
        relative: to the best of all.
        busy_share: of its workers' time, spent on commands, 0..1.
        reset_share: of that time, spent on commands with a reset.
        resets: that happened while it ran.
        rounds: turns that it had.
        memory_bytes: of workers, helper and shared memory, from what the probe measured.
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
    """What a search has found.

    Attributes:
        runs: of all settings, those that were struck out too, in the order in which they were considered.
        chosen: the setting to take.
        quantiles: (median, 99th percentile) of step times in the chosen setting's workers, seconds; None if unknown.
        worker_bytes: memory that the chosen setting's workers have for themselves, as measured; None for `SerialEnv`.
    """

    runs: tuple[Run, ...]
    chosen: Setting
    quantiles: tuple[float, float] | None
    worker_bytes: int | None

    def run_of(self, setting: Setting) -> Run:
        """Return the run of a setting."""
        return next(one for one in self.runs if one.setting == setting)


class Search:
    """One search.

    Args:
        open_env: starts the executor of a setting.
        limits: what fits this machine.
        goal: what is fixed and wanted.
        most_bytes: that all executors together may take.
        budget: when the search began and must end (monotonic seconds).
        progress: see `Progress`.
    """

    def __init__(
        self,
        open_env: Open,
        limits: Limits,
        goal: Goal,
        most_bytes: int | None,
        budget: tuple[float, float],
        progress: Progress,
    ) -> None:
        self._open, self._limits, self._goal = open_env, limits, goal
        self._most_bytes = limits.usable if most_bytes is None else most_bytes
        self._began, self._end = budget
        self._progress = progress
        self._span_s = _THROTTLED_SPAN_S if limits.machine.is_throttled else _SPAN_S
        self._drivers: dict[tuple[int, int, bool], Driver] = {}
        self._envs: dict[tuple[int, int, bool], BatchedEnv] = {}
        self._starts: dict[tuple[int, int, bool], float] = {}
        self._taken_bytes = 0
        self._considered: dict[Setting, Refusal | None] = {}
        self._turns: list[dict[Setting, Turn]] = []
        self._error: Exception | None = None

    def run(self) -> Found:
        """Search.

        Raises:
            DoesNotFit: not even one env fits, or not as many as are wanted.
            EnvherdError, OSError: every setting failed; the error of the last.
        """
        with contextlib.ExitStack() as stack:
            alive = self._start_all(stack)
            share = 1.0 if self._goal.num_envs is not None else _FIRST_SHARE
            alive = self._rounds(alive, time.monotonic() + share * self._left)
            if self._goal.num_envs is None:
                self._try_fewer_envs(stack, alive)
            return self._found()

    @property
    def _left(self) -> float:
        return self._end - time.monotonic()

    def _show(self, text: str) -> None:
        budget_s = self._end - self._began
        self._progress(text, min(1.0, (budget_s - self._left) / max(budget_s, 1e-9)))

    # ---- starting ----------------------------------------------------------------------------

    def _start_all(self, stack: contextlib.ExitStack) -> list[Setting]:
        """Start what fits, and return it; a worker for each core first, since time or memory may suffice for one."""
        limits, goal = self._limits, self._goal
        alive: list[Setting] = []
        top = min(math.ceil(limits.machine.cores), worker_counts(limits.measured, limits.machine.cores, goal)[-1])
        wanted = ladder(limits.measured, limits.machine.cores, goal)
        for setting in sorted(wanted, key=lambda one: (one.reset_ahead, one.num_workers != top, -one.num_workers)):
            refusal = limits.refusal(setting)
            fitting = limits.fitted(setting)
            if fitting != setting:
                self._considered[setting] = refusal
            if fitting is not None and fitting not in self._considered:
                self._consider(fitting, stack, alive)
        if not alive:
            if self._error is not None:
                raise self._error
            refusals = [one for one in self._considered.values() if one is not None]
            raise limits.does_not_fit(refusals[-1])
        return alive

    def _consider(self, setting: Setting, stack: contextlib.ExitStack, alive: list[Setting]) -> None:
        """Start a setting, or strike it out; with fewer envs where it takes too long and their number is free."""
        fewer = smaller(setting) if self._goal.num_envs is None else ()
        candidates = [setting, *(one for one in fewer if one not in self._considered)]
        for one in candidates:
            must_start = not alive and one is candidates[-1]
            refusal = self._refusal_now(one, must_start=must_start) or self._start(one, stack)
            self._considered[one] = refusal
            if refusal is None:
                alive.append(one)
            if refusal is None or refusal.kind != "start":
                return

    def _refusal_now(self, setting: Setting, *, must_start: bool) -> Refusal | None:
        """Return why a setting that fits the machine cannot be started next to the others."""
        if (refusal := self._limits.refusal(setting)) is not None or _key(setting) in self._drivers:
            return refusal
        start_s, most_s = self._limits.start_s(setting), _START_SHARE * self._left
        if self._taken_bytes + self._limits.memory_bytes(setting) > self._most_bytes and not must_start:
            return Refusal("start", "does not fit the memory next to the others")
        if start_s > most_s and not must_start:
            return Refusal("start", f"takes {start_s:,.1f} s to start; a longer --budget allows for it")
        return None

    def _start(self, setting: Setting, stack: contextlib.ExitStack) -> Refusal | None:
        key = _key(setting)
        if key in self._drivers:
            return None
        self._show(f"starting {setting}")
        began = time.monotonic()
        try:
            with contextlib.ExitStack() as own:
                env = own.enter_context(self._open(setting))
                self._drivers[key] = Driver(env, self._span_s, self._goal.policy_s)
                self._envs[key] = env
                stack.enter_context(own.pop_all())
        except (EnvherdError, OSError, ValueError) as error:
            return self._failure(error)
        self._starts[key] = time.monotonic() - began
        self._taken_bytes += self._limits.memory_bytes(setting)
        return None

    def _failure(self, error: Exception) -> Refusal:
        self._error = error
        return Refusal("failure", f"failed: {str(error).split(chr(10), 1)[0]}")

    # ---- running -----------------------------------------------------------------------------

    def _rounds(self, alive: Iterable[Setting], end: float) -> list[Setting]:
        """Run settings in rounds until it is clear which is the best, or the time is up; return those left."""
        alive, done, target = list(alive), 0, self._goal.target_steps_per_s
        while alive and (done < _LEAST_ROUNDS or time.monotonic() < end):
            self._turns.append({})
            for setting in tuple(alive):
                self._show(f"round {len(self._turns)}: {setting}{self._leader()}")
                try:
                    self._turns[-1][setting] = self._drivers[_key(setting)].turn(setting.mode)
                except EnvherdError as error:
                    self._considered[setting] = self._failure(error)
                    alive.remove(setting)
                    for one in self._turns:
                        one.pop(setting, None)
            done += 1
            self._turns = [one for one in self._turns if one]
            if not alive:
                break
            rounds = self._speeds()
            may_be_chosen = survivors(rounds, target)
            alive = [one for one in alive if one in may_be_chosen]
            if is_sure(rounds[-done:]) and (target is None or len(alive) == 1 or done >= 2 * _LEAST_ROUNDS):
                break
        if not self._turns and self._error is not None:
            raise self._error
        return alive

    def _leader(self) -> str:
        if len(self._turns) < 2:
            return ""
        rates = typical_rates(self._speeds()[:-1])
        best = max(rates, key=rates.__getitem__)
        return f" (best so far: {best}, {rates[best]:,.0f}/s)"

    def _try_fewer_envs(self, stack: contextlib.ExitStack, alive: list[Setting]) -> None:
        """Compare the best with the same on fewer envs."""
        best = choose(self._speeds(), self._goal.target_steps_per_s)
        fewer = [one for one in smaller(best) if one not in self._considered]
        started = [best]
        for setting in fewer:
            self._consider(setting, stack, started)
        if len(started) > 1:
            others = [one for one in alive if one != best]
            self._rounds([*started, *others], self._end)

    def _speeds(self) -> list[Mapping[Setting, float]]:
        """Return the table of speeds, resets at their usual number."""
        measured = self._limits.measured
        end_share = share_of_ends([turn for one in self._turns for turn in one.values()], measured)
        return [
            {setting: corrected(turn, setting, measured, end_share) for setting, turn in one.items()}
            for one in self._turns
        ]

    # ---- what came of it ---------------------------------------------------------------------

    def _found(self) -> Found:
        rounds = self._speeds()
        chosen = choose(rounds, self._goal.target_steps_per_s)
        rates, shares = typical_rates(rounds), relative(rounds)
        best = max((one for one in shares if one in rounds[-1]), key=shares.__getitem__)
        shares = {one: share / shares[best] for one, share in shares.items()} | relative(rounds, best)
        runs = []
        for setting, refusal in self._considered.items():
            turns = [one[setting] for one in self._turns if setting in one]
            if not turns or refusal is not None:
                runs.append(
                    Run(setting=setting, memory_bytes=self._limits.memory_bytes(setting), refusal=refusal or _NO_TIME)
                )
                continue
            worked_s = sum(turn.seconds for turn in turns) * max(1, setting.num_workers)
            runs.append(
                Run(
                    setting=setting,
                    steps_per_s=rates[setting],
                    relative=shares[setting],
                    busy_share=min(1.0, sum(turn.busy_s for turn in turns) / worked_s),
                    reset_share=min(1.0, sum(turn.reset_s for turn in turns) / worked_s),
                    resets=sum(turn.resets for turn in turns),
                    rounds=len(turns),
                    memory_bytes=self._limits.memory_bytes(setting),
                    start_s=self._starts[_key(setting)],
                )
            )
        return Found(tuple(runs), chosen, *self._statistics_of(chosen))

    def _statistics_of(self, setting: Setting) -> tuple[tuple[float, float] | None, int | None]:
        """Return what `statistics()` says of the workers: quantiles of steps, and memory."""
        workers = self._envs[_key(setting)].statistics().workers
        known = [(one.step_p50_s, one.step_p99_s) for one in workers if one.step_p50_s and one.step_p99_s]
        middle = (max(p50 for p50, _ in known), max(p99 for _, p99 in known)) if known else None
        return middle, sum(one.uss_bytes for one in workers) if setting.num_workers else None


_NO_TIME = Refusal("budget", "no time was left to run it")


def _key(setting: Setting) -> tuple[int, int, bool]:
    """Return which executor runs a setting: one runs both modes."""
    return setting.num_envs, setting.num_workers, setting.reset_ahead
