"""The states of an env in its worker: the table is complete, and steps in C and in Python move by it."""

import itertools

import pytest

from envherd.workers import native
from envherd.workers.block.slot import (
    COMMANDS,
    FOLLOWS,
    NEXT,
    REFUSED_WITH,
    SlotEvent,
    SlotState,
    table,
)
from envherd.workers.messages import Ask
from envherd.workers.protocol import RESET, STEP, STEP_RESET
from tests.oracles.native_sides import Side, run
from tests.workers.test_native import adapters

_FREE = {
    SlotState.NEEDS_RESET: SlotState.FREE_NEW,
    SlotState.RUNNING: SlotState.FREE_RUNNING,
    SlotState.ENDED: SlotState.FREE_ENDED,
}


def test_the_table_is_complete():
    assert (
        set(FOLLOWS)
        == set(SlotState)
        == {*REFUSED_WITH, SlotState.RUNNING, *_FREE.values()}
    )
    lines = table().splitlines()
    assert len(lines) == sum(
        event in FOLLOWS[state] or event in COMMANDS
        for state in SlotState
        for event in SlotEvent
    )
    assert "ENDED           STEP            refused: InternalError" in lines


def test_free_envs_move_as_guarded_ones():
    for state, free in _FREE.items():
        assert FOLLOWS[free][SlotEvent.STEP] is free
        for event in (SlotEvent.RUNS, SlotEvent.ENDS, SlotEvent.IS_BROKEN_OFF):
            assert (
                event not in FOLLOWS[state]
                or FOLLOWS[free][event] is _FREE[FOLLOWS[state][event]]
            )


def states_of(side: Side) -> list[SlotState]:
    return [SlotState(slot.state[0]) for slot in side.block.slots.values()]


def allow(side: Side) -> None:
    side.block.ask(Ask(what="allow_steps", env_ids=(1, 2)))


#: The first of two envs raises in its third step.
RAISES = (("reward 1", "reward 1", "raises"), ())
ALL = [1, 2]


@pytest.mark.skipif(
    native.load() is None, reason="the C extension was not built, or is switched off"
)
@pytest.mark.parametrize("is_free", [False, True])
def test_only_free_slots_step_without_a_reset(is_free):
    program = [
        (RESET, ALL),
        (STEP, ALL),
        *([allow] if is_free else []),
        *[(STEP, ALL)] * 3,
    ]
    side, executed = run(adapters(scripts=((), ()), length=2), program)
    # By Python: the first time, and refusals.
    assert executed == [ALL, ALL, [], *([[], []] if is_free else [ALL, ALL])]
    assert (
        states_of(side)
        == [SlotState.FREE_ENDED if is_free else SlotState.NEEDS_RESET] * 2
    )
    assert [env.num_steps for env in side.envs] == [4 if is_free else 2] * 2
    assert len(side.reports) == (0 if is_free else 4)


@pytest.mark.skipif(
    native.load() is None, reason="the C extension was not built, or is switched off"
)
@pytest.mark.parametrize(
    "deeds", [*itertools.product([STEP, STEP_RESET, RESET], repeat=3)]
)
@pytest.mark.parametrize("is_free", [False, True])
def test_c_and_python_move_alike(deeds, is_free):
    """`run` compares the states after every command."""
    program = [
        (RESET, ALL),
        (STEP, ALL),
        *([allow] if is_free else []),
        *((op, ALL) for op in (*deeds, *deeds)),
    ]
    side, _ = run(adapters(scripts=RAISES, length=2), program)
    assert all((state in _FREE.values()) == is_free for state in states_of(side))


def test_the_bytes_are_those_of_the_table():
    assert {
        (s, e): SlotState(NEXT[e, s])
        for s in SlotState
        for e in SlotEvent
        if NEXT[e, s] >= 0
    } == {
        (s, e): following for s, row in FOLLOWS.items() for e, following in row.items()
    }
