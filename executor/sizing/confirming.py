"""The confirming round: run a few settings on real executors, in turns, and take the smallest of the fastest.

Guarantees: nothing is left running, also after an interrupt. A setting that fails, dies or hangs is excluded. Each
setting that was not run has a reason. The time budget is exceeded by at most the quick starts, one other start of an
executor, and one round.
Assumes: the env was probed, so a single env is known to work.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from envherd.executor.sizing.driving import Driver, HostDriver, Subject, Turn
from envherd.executor.sizing.rule import Limits, resets_are_costly, steps_are_uneven
from envherd.executor.sizing.settings import Refusal, Run, Setting
from envherd.workers.errors import EnvherdError, WorkerTimeout

#: A smaller setting is chosen if it reaches this share of the best one's speed.
GOOD_ENOUGH = 0.95
#: Rounds; in each, every setting has one turn, so other load affects all alike. And rounds if other programs use the
#: machine.
NUM_ROUNDS, _NUM_BUSY_ROUNDS = 5, 15
#: Seconds of a turn; and of a turn under a CPU quota, which usually stops all processes ten times a second.
_SPAN_S, _THROTTLED_SPAN_S = 0.1, 0.5
#: Seconds in which the worker of a `SerialEnv` imports torch; on a busy machine.
_IMPORT_S = 10.0
#: Largest share of the remaining time for the start of a further executor; and the share of the whole budget below
#: which a start is quick: it is made even if no time remains.
_START_SHARE, _QUICK_SHARE = 0.5, 0.1
#: A call that takes this many times as long as expected, plus this many seconds, counts as hanging.
_PATIENCE_FACTOR, _PATIENCE_S = 10.0, 20.0


class Confirmation:
    """Runs settings of an env in rounds. Both modes of the same envs have one executor, and fail together.

    Args:
        subject: the env.
        limits: of this machine; all executors together stay within its usable memory.
        budget: its end (monotonic seconds), and all of its seconds.
        show: called with the current activity.
        is_busy: returns whether other programs use the machine.
    """

    def __init__(
        self,
        subject: Subject,
        limits: Limits,
        budget: tuple[float, float],
        show: Callable[[str], None],
        is_busy: Callable[[], bool],
    ) -> None:
        self._subject, self._limits = subject, limits
        self._end, self._budget_s = budget
        self._show, self._is_busy = show, is_busy
        self._refusals: dict[Setting, Refusal | None] = {}
        self._drivers: dict[tuple[int, int], Driver] = {}
        self._error: Exception | None = None

    def run(self, settings: Mapping[Setting, Refusal | None]) -> list[Run]:
        """Run settings in rounds.

        Args:
            settings: the most promising first; with reasons not to run some.

        Returns:
            One entry for each setting; at least one was run.

        Raises:
            EnvherdError, OSError: every setting failed; the error of the last.
        """
        rounds: list[dict[Setting, Turn]] = []
        # Closes all executors, even if one raises.
        with contextlib.ExitStack() as stack:
            for setting, refusal in settings.items():
                self._refusals[setting] = refusal or self._refusal_now(setting)
                if (
                    self._refusals[setting] is None
                    and _executor(setting) not in self._drivers
                ):
                    self._try(setting, functools.partial(self._start, setting, stack))
            while self._alive:
                rounds.append({})
                self._show(f"round {len(rounds)}")
                for setting in self._alive:
                    self._try(
                        setting,
                        functools.partial(self._turn, setting, rounds[-1]),
                    )
                most = _NUM_BUSY_ROUNDS if self._is_busy() else NUM_ROUNDS
                if len(rounds) >= most or time.monotonic() > self._end:
                    break
        if not self._alive:
            assert self._error is not None
            raise self._error
        return self._runs(rounds)

    @property
    def _alive(self) -> list[Setting]:
        return [
            setting for setting, refusal in self._refusals.items() if refusal is None
        ]

    def _refusal_now(self, setting: Setting) -> Refusal | None:
        """Return why a fitting setting cannot be started next to the others."""
        others = {_executor(one): self._limits.memory_bytes(one) for one in self._alive}
        if not others or _executor(setting) in others:
            return None
        if (
            sum(others.values()) + self._limits.memory_bytes(setting)
            > self._limits.usable
        ):
            return Refusal("budget", "does not fit the memory next to the others")
        start_s = self._limits.start_s(setting)
        left_s = self._end - time.monotonic()
        if start_s > max(_START_SHARE * left_s, _QUICK_SHARE * self._budget_s):
            return Refusal(
                "budget",
                f"takes {start_s:,.1f} s to start; a longer --budget allows for it",
            )
        return None

    def _patience_s(self, setting: Setting) -> float:
        """Return the seconds after which a call counts as hanging."""
        batch_s = setting.most_per_worker * self._limits.measured.whole_step_s
        import_s = 0.0 if setting.num_workers else _IMPORT_S
        return _PATIENCE_S + _PATIENCE_FACTOR * (
            self._limits.start_s(setting) + batch_s + import_s
        )

    def _try(self, setting: Setting, action: Callable[[], None]) -> None:
        """Do something with a setting; if it fails, exclude all settings of its executor."""
        try:
            action()
        except Exception as error:  # any failure excludes only these settings
            if isinstance(error, TimeoutError) and not isinstance(error, EnvherdError):
                raise  # of the program's signal handler, which ends the search
            self._error = error
            text = f"failed: {str(error).split(chr(10), 1)[0] or type(error).__name__}"
            if isinstance(error, WorkerTimeout):
                text = (
                    f"hung: a call took longer than {self._patience_s(setting):,.0f} s"
                )
            alike = [one for one in self._alive if _executor(one) == _executor(setting)]
            self._refusals |= dict.fromkeys(alike, Refusal("failure", text))

    def _start(self, setting: Setting, stack: contextlib.ExitStack) -> None:
        start_s, goal, patience_s = (
            self._limits.start_s(setting),
            self._limits.goal,
            self._patience_s(setting),
        )
        self._show(f"starting {setting}, about {start_s:,.0f} s")
        span_s = _THROTTLED_SPAN_S if self._limits.machine.is_throttled else _SPAN_S
        subject, size, kind = self._subject, _executor(setting), Driver
        if not setting.num_workers:
            subject, size, kind = (
                subject.hosted(setting.num_envs, span_s, goal.policy_s),
                (1, 1),
                HostDriver,
            )
        env = stack.enter_context(subject.start(*size, patience_s))
        self._drivers[_executor(setting)] = kind(env, span_s, goal.policy_s)

    def _turn(self, setting: Setting, turns: dict[Setting, Turn]) -> None:
        # It has not failed in this round, in the other mode.
        if self._refusals[setting] is None:
            turns[setting] = self._drivers[_executor(setting)].turn(setting.mode)

    def _runs(self, rounds: Sequence[Mapping[Setting, Turn]]) -> list[Run]:
        measured, alive, is_busy = self._limits.measured, self._alive, self._is_busy()
        is_even = not (steps_are_uneven(measured) or resets_are_costly(measured))

        def rate(turn: Turn) -> float:
            seconds = turn.undisturbed_s(is_even=is_even) if is_busy else turn.seconds
            return measured.whole_steps(turn.steps, turn.resets) / seconds

        rate_of = speeds(
            [{setting: rate(turns[setting]) for setting in alive} for turns in rounds]
        )
        runs = []
        for setting, refusal in self._refusals.items():
            turns = [one[setting] for one in rounds] if setting in rate_of else []
            run = Run(
                setting=setting,
                steps_per_s=rate_of.get(setting, 0.0),
                busy_share=sum(turn.busy_share for turn in turns) / max(1, len(turns)),
                rounds=len(turns),
                memory_bytes=self._limits.memory_bytes(setting),
                start_s=self._limits.start_s(setting),
                refusal=refusal,
            )
            runs.append(run)
        return runs


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
        setting: rate
        * math.exp(
            float(np.median([math.log(one[setting] / one[anchor]) for one in rounds]))
        )
        for setting in rounds[0]
    }


def choose(runs: Sequence[Run], target: float | None = None) -> Run:
    """Return the smallest setting within 5 % of the fastest, or the smallest one that reaches a target.

    Args:
        runs: those without a refusal; at least one.
        target: env-steps per second. If no setting reaches it, the fastest counts.
    """
    most = max(one.steps_per_s for one in runs)
    enough = target if target is not None and most >= target else GOOD_ENOUGH * most
    return min(
        (one for one in runs if one.steps_per_s >= enough),
        key=lambda one: one.setting.rank,
    )


def _executor(setting: Setting) -> tuple[int, int]:
    """Return what settings with one executor have in common; it runs both modes."""
    return setting.num_envs, setting.num_workers
