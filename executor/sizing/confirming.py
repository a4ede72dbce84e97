"""The confirming round: run a few settings on real executors, in turns, and take the smallest of the fastest.

Guarantees: nothing is left running, also after an interrupt. A setting that fails, dies or hangs is excluded. Each
setting that was not run has a reason. The time budget is exceeded by at most the quick starts, one other start of an
executor, and one round.
Assumes: the env was probed, so a single env is known to work.
"""

import contextlib
import errno
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from envherd.executor.sizing.probe import PATIENCE_S, Subject, Turn
from envherd.executor.sizing.rule import (
    Limits,
    Measurement,
    Mode,
    Run,
    Setting,
)
from envherd.workers.errors import EnvherdError

#: In each round every setting has one turn, so other load affects all alike.
_NUM_ROUNDS = 5
#: Rounds if other programs use the machine.
_NUM_BUSY_ROUNDS = 15
_SPAN_S = 0.1  # of a turn
#: Seconds of a turn under a CPU quota, which usually stops all processes ten times a second.
_THROTTLED_SPAN_S = 0.5
#: Seconds in which the worker of a `SerialEnv` imports torch; on a busy machine.
_IMPORT_S = 10.0
#: Largest share of the remaining time for the start of a further executor.
_START_SHARE = 0.5
#: Share of the whole budget below which a start is quick: it is made even if no time remains.
_QUICK_SHARE = 0.1
#: Expected times that a call may take, in addition to `PATIENCE_S`, before it counts as hanging.
_PATIENCE_FACTOR = 10.0


def confirm(  # noqa: PLR0913  # what is run, and for how long
    subject: Subject,
    limits: Limits,
    runs: Sequence[Run],
    *,
    end: float,
    budget_s: float,
    show: Callable[[str], None],
    is_busy: Callable[[], bool],
) -> None:
    """Run settings in rounds, and write into each what it makes, or why it was not run.

    Both modes of the same envs have one executor, and fail together.

    Args:
        subject: the env.
        limits: of this machine; all executors together stay within its usable memory.
        runs: the most promising first; some may have reasons not to run them.
        end: when the rounds end, monotonic seconds.
        budget_s: all seconds of measurement, those of the probe included.
        show: called with the current activity.
        is_busy: returns whether other programs use the machine.

    Raises:
        EnvherdError, OSError: every setting failed; the error of the last.
    """
    turns: dict[Setting, Callable[[Mode], Turn]] = {}
    errors: list[Exception] = []
    rounds: list[dict[Run, Turn]] = []
    room_bytes = limits.usable
    # Closes all executors, even if one raises.
    with contextlib.ExitStack() as stack:
        for run in runs:
            executor = _executor(run)
            if turns and executor not in turns:
                left_s = end - time.monotonic()
                most_s = max(_START_SHARE * left_s, _QUICK_SHARE * budget_s)
                run.refusal = run.refusal or _refusal_now(run, room_bytes, most_s)
            if run.refusal is None and executor not in turns:
                show(f"starting {run.setting}, about {run.start_s:,.0f} s")
                with _excluding(executor, runs, errors):
                    turns[executor] = stack.enter_context(_turns(subject, run, limits))
                    room_bytes -= run.memory_bytes
        while any(run.refusal is None for run in runs):
            rounds.append({})
            show(f"round {len(rounds)}")
            for run in runs:
                if run.refusal is None:
                    executor = _executor(run)
                    with _excluding(executor, runs, errors):
                        rounds[-1][run] = turns[executor](run.setting.mode)
            most = _NUM_BUSY_ROUNDS if is_busy() else _NUM_ROUNDS
            if len(rounds) >= most or time.monotonic() > end:
                break
    alive = [run for run in runs if run.refusal is None]
    if not alive:
        raise errors[-1]
    _write(alive, rounds, limits.measured)


def _executor(run: Run) -> Setting:
    """Return what settings with one executor have in common; it runs both modes."""
    return replace(run.setting, mode="sync")


def _refusal_now(run: Run, room_bytes: int, most_s: float) -> str | None:
    """Return why a fitting setting cannot be started next to the others.

    Args:
        run: of the setting.
        room_bytes: usable memory that the others leave.
        most_s: seconds that its start may take.
    """
    if run.memory_bytes > room_bytes:
        return "does not fit the memory next to the others"
    if run.start_s > most_s:
        return f"takes {run.start_s:,.1f} s to start; a longer --budget allows for it"
    return None


@contextlib.contextmanager
def _excluding(
    executor: Setting,
    runs: Sequence[Run],
    errors: list[Exception],
) -> Iterator[None]:
    """Exclude all settings of an executor if the block fails, and note its error."""
    try:
        yield
    except Exception as error:  # any failure excludes only these settings
        if isinstance(error, TimeoutError) and not isinstance(error, EnvherdError):
            raise  # of the program's signal handler, which ends the search
        errors.append(error)
        text = str(error).split(chr(10), 1)[0] or type(error).__name__
        for run in runs:
            if run.refusal is None and _executor(run) == executor:
                run.refusal = f"failed: {text}"
                # Next to the other executors, the setting has too little of what it would have alone.
                if getattr(error, "errno", None) == errno.EMFILE:
                    run.too_little = "open files"


def _turns(
    subject: Subject,
    run: Run,
    limits: Limits,
) -> contextlib.AbstractContextManager[Callable[[Mode], Turn]]:
    """Return the context in which a setting's executor runs; its value runs turns."""
    batch_s = run.setting.most_per_worker * limits.measured.whole_step_s
    import_s = 0.0 if run.setting.num_workers else _IMPORT_S
    patience_s = PATIENCE_S + _PATIENCE_FACTOR * (run.start_s + batch_s + import_s)
    return subject.turns(
        run.setting,
        _THROTTLED_SPAN_S if limits.machine.is_throttled else _SPAN_S,
        limits.goal.policy_s,
        patience_s,
    )


def _write(
    runs: Sequence[Run],
    rounds: Sequence[Mapping[Run, Turn]],
    measured: Measurement,
) -> None:
    """Write what was measured into the runs."""
    rate_of = speeds(
        [
            {
                run: measured.whole_steps(turn.steps, turn.resets) / turn.seconds
                for run, turn in turns.items()
                if run in runs
            }
            for turns in rounds
        ]
    )
    for run, steps_per_s in rate_of.items():
        run.steps_per_s = steps_per_s
        run.busy_share = sum(turns[run].busy_share for turns in rounds) / len(rounds)
        run.rounds = len(rounds)


def speeds(rounds: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    """Return the speed of each setting, env-steps per second.

    In a round every setting has one turn, so a disturbance of some seconds affects all of them. A speed is the first
    setting's median, times the median over rounds of the ratio to the first one.

    Args:
        rounds: env-steps per second of each setting in each round.
    """
    anchor, *_ = rounds[0]
    rate = float(np.median([one[anchor] for one in rounds]))
    return {
        setting: rate * float(np.median([one[setting] / one[anchor] for one in rounds]))
        for setting in rounds[0]
    }
