"""Every life of an env that the table of states allows is legal; changes of the table are detected."""

import copy

import numpy as np
import pytest

from envherd.executor.protocol.env_states import (
    COMMANDS,
    FOLLOWS,
    REFUSED_WITH,
    EnvStates,
    Event,
    State,
    table,
)
from envherd.workers.errors import Busy, ResetNeeded
from tests.oracles.env_model import Model


def test_every_life_is_legal():
    assert Model().explore() > 100


def changed(state: State, event: Event, following: State | None) -> Model:
    """Return a model of the table with one entry changed, or without it."""
    follows = copy.deepcopy({state: dict(row) for state, row in FOLLOWS.items()})
    if following is None:
        del follows[state][event]
    else:
        follows[state][event] = following
    return Model(follows)


@pytest.mark.parametrize(
    ("state", "event", "following"),
    [
        (State.NEEDS_RESET, Event.STEP, State.STEPPING),
        (State.ENDED, Event.STEP_RESET, State.STEP_RESETTING),
        (State.RUNNING, Event.IS_LOST, State.RUNNING),
        (State.STEPPING, Event.ENDS, State.RUNNING),
        (State.STEPPING, Event.FAILS, State.RUNNING),
        (State.STEPPING, Event.IS_LOST, State.RUNNING),
        (State.STEPPING, Event.IS_BROKEN_OFF, State.RUNNING),
        (State.STEP_RESETTING, Event.IS_BROKEN_OFF, State.RUNNING),
        (State.STEP_RESETTING, Event.ENDS, State.RUNNING),
        (State.RESETTING, Event.FAILS, State.RUNNING),
        (State.RESETTING, Event.IS_WITHDRAWN, State.RUNNING),
        (State.RESETTING, Event.IS_LOST, State.RUNNING),
        (State.STEPPING, Event.STEP, State.STEPPING),
        (State.STEP_RESETTING, Event.ANSWERED, None),
        (State.RESETTING, Event.ANSWERED, None),
        (State.NEEDS_RESET, Event.RESET, None),
    ],
)
def test_a_change_of_the_table_is_noticed(state, event, following):
    with pytest.raises(AssertionError):
        changed(state, event, following).explore()


def test_the_table_is_complete():
    assert set(FOLLOWS) == set(State) == {*REFUSED_WITH, State.RUNNING}
    lines = table().splitlines()
    assert len(lines) == sum(
        event in FOLLOWS[state] or event in COMMANDS
        for state in State
        for event in Event
    )
    assert "RUNNING         STEP            STEPPING" in lines


class TestEnvStates:
    def test_refused_calls_change_nothing(self):
        states = EnvStates(3)
        states.move(np.array([0, 1]), Event.RESET)
        states.move(np.array([0]), Event.ANSWERED)
        before = states.values.copy()
        with pytest.raises(ResetNeeded) as never_reset:
            states.move(np.array([0, 2]), Event.STEP)
        with pytest.raises(Busy) as under_way:
            states.move(np.arange(3), Event.STEP_RESET)
        assert (
            never_reset.value.context["env_ids"],
            under_way.value.context["env_ids"],
        ) == ((2,), (1,))
        assert (states.values == before).all()
        assert states.needs_reset.tolist() == [False, False, True]
        assert states.under_way.tolist() == [False, True, False]

    def test_an_impossible_event_is_a_bug(self):
        with pytest.raises(AssertionError, match="ANSWERED cannot happen"):
            EnvStates(1).move(np.arange(1), Event.ANSWERED)
