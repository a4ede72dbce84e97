"""Run pools in turns, round by round, until there are enough rounds or the time is up."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.gate import Probe, Reading, reasons_to_discard, tries_for
from benchmarks.pools import Contender, Job
from benchmarks.runner import PoolError, Runner, Slot

#: Seconds for the build of a pool, by which a slot may end late, and by which each of its least calls may.
BUILD_S, SLOT_GRACE_S, CALL_GRACE_S = 300.0, 60.0, 0.5


class Plan(NamedTuple):
    """The size of a measurement.

    Attributes:
        num_rounds: number of valid slots of each pool.
        slot_s: seconds of one.
        num_tries: of a slot during which other processes used the machine.
        limit_s: seconds for everything, including the build of pools; checked at the end of each round.
    """

    num_rounds: int
    slot_s: float
    num_tries: int
    limit_s: float


class Turn(NamedTuple):
    """One valid slot.

    Attributes:
        slot: its figures.
        is_open: whether it is valid; otherwise it is the quietest of its tries.
        delay: run-delay over run time of the probe around it.
    """

    slot: Slot
    is_open: bool
    delay: float


@dataclass
class Entry:
    """One contender in a run.

    Attributes:
        contender: of the run.
        job: of the contender.
        turns: one per round.
        discarded: reason -> number of slots discarded for it.
        failure: why it could not run or continue, or an empty string.
        build_s: seconds until its pool was ready.
    """

    contender: Contender
    job: Job
    turns: list[Turn] = field(default_factory=list)
    discarded: dict[str, int] = field(default_factory=dict)
    failure: str = ""
    build_s: float = 0.0


def measure(
    pairs: Sequence[tuple[Contender, Job]], plan: Plan, say: Callable[[str], None]
) -> tuple[list[Entry], bool]:
    """Start every pool, run them in turns in random order, and end them.

    Args:
        pairs: contenders with different names, and their jobs.
        plan: of the measurement.
        say: called with a text on the current activity.

    Returns:
        An entry for each contender, and whether all rounds were made.
    """
    began = time.monotonic()
    entries = [Entry(contender, job) for contender, job in pairs]
    running: dict[str, Runner] = {}
    probe = Probe()
    try:
        for entry in entries:
            say(f"starting {entry.contender.name}")
            _start(entry, running, min(BUILD_S, plan.limit_s))
        order, opened = random.Random(0), list[bool]()
        for number in range(plan.num_rounds):
            if number and time.monotonic() - began > plan.limit_s:
                return entries, False
            say(f"round {number + 1} of {plan.num_rounds}")
            alive = [entry for entry in entries if entry.contender.name in running]
            for entry in order.sample(alive, len(alive)):
                _take_turn(entry, running, plan, probe, opened)
        return entries, True
    finally:
        probe.close()
        for runner in running.values():
            runner.stop()


def _start(entry: Entry, running: dict[str, Runner], limit_s: float) -> None:
    began = time.monotonic()
    if not entry.contender.is_installed:
        entry.failure = "not installed"
        return
    runner = Runner(entry.contender, entry.job)
    try:
        runner.start(limit_s)
        running[entry.contender.name] = runner
    except PoolError as error:
        entry.failure = f"failed in {error}"
        runner.stop()
    except BaseException:
        runner.stop()
        raise
    entry.build_s = time.monotonic() - began


def _take_turn(
    entry: Entry,
    running: dict[str, Runner],
    plan: Plan,
    probe: Probe,
    opened: list[bool],
) -> None:
    """Run a slot, repeated while other processes use the machine and tries are left; keep the quietest one."""
    tries: list[Turn] = []
    limit_s = plan.slot_s * (1 + 0.2) + SLOT_GRACE_S + CALL_GRACE_S * entry.job.episode
    for _ in range(tries_for(plan.num_tries, opened)):
        before = probe.read()
        try:
            slot = running[entry.contender.name].run(plan.slot_s, limit_s)
        except PoolError as error:
            entry.failure = f"failed in {error}"
            running.pop(entry.contender.name).stop()
            return
        delay = max(before, probe.read())
        reasons = reasons_to_discard(Reading(delay, slot.others))
        tries.append(Turn(slot, not reasons, delay))
        if not reasons:
            break
        for reason in reasons:
            entry.discarded[reason] = entry.discarded.get(reason, 0) + 1
    best = min(
        tries, key=lambda turn: (not turn.is_open, turn.delay + turn.slot.others)
    )
    opened.append(best.is_open)
    entry.turns.append(best)
