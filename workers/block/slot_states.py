"""The states of an env in its worker: a table of transitions, which `step.c` reads too.

Guarantees: the state of a `Slot` changes only by an entry of `FOLLOWS`. If the table has no entry for a STEP, an
`InternalError` refuses it and the env is not stepped: the caller's table (`protocol.env_states`) lets none be sent.

State         Meaning
NEEDS_RESET   it was never reset, or its episode was broken off: its next reset is of all its rows
RUNNING       in an episode
ENDED         its latest row ended its episode; for an env that is a batch, the episodes of some of its rows
FREE_NEW, FREE_RUNNING, FREE_ENDED
              the same of an env that may be stepped in any of them: the env itself decides, or a user's code drives it

`print(table())` prints the transitions.
"""

from __future__ import annotations

from enum import IntEnum

from envherd.workers import state_tables
from envherd.workers.errors import EnvherdError, InternalError


class State(IntEnum):
    """The state of an env, which moves only as the table of the module says."""

    NEEDS_RESET = 0
    RUNNING = 1
    ENDED = 2
    FREE_NEW = 3
    FREE_RUNNING = 4
    FREE_ENDED = 5


class Event(IntEnum):
    """An event of an env.

    STEP: it is to be stepped.
    RUNS: its step or its reset has ended, or its state was restored, and it is in an episode.
    ENDS: its step has ended its episode; or after a reset of some of its rows, others must be reset still.
    IS_BROKEN_OFF: it raised, an interrupt came, or it was reset for an episode that may not be used.
    IS_ALLOWED: from now on it may be stepped in any state.
    """

    STEP = 0
    RUNS = 1
    ENDS = 2
    IS_BROKEN_OFF = 3
    IS_ALLOWED = 4


_GUARDED = {Event.RUNS: State.RUNNING, Event.IS_BROKEN_OFF: State.NEEDS_RESET}
_FREE = {Event.RUNS: State.FREE_RUNNING, Event.ENDS: State.FREE_ENDED, Event.IS_BROKEN_OFF: State.FREE_NEW}

#: State -> event -> state.
FOLLOWS: dict[State, dict[Event, State]] = {
    State.NEEDS_RESET: {**_GUARDED, Event.IS_ALLOWED: State.FREE_NEW},
    State.RUNNING: {
        Event.STEP: State.RUNNING,
        Event.ENDS: State.ENDED,
        **_GUARDED,
        Event.IS_ALLOWED: State.FREE_RUNNING,
    },
    State.ENDED: {Event.ENDS: State.ENDED, **_GUARDED, Event.IS_ALLOWED: State.FREE_ENDED},
    State.FREE_NEW: {Event.STEP: State.FREE_NEW, **_FREE, Event.IS_ALLOWED: State.FREE_NEW},
    State.FREE_RUNNING: {Event.STEP: State.FREE_RUNNING, **_FREE, Event.IS_ALLOWED: State.FREE_RUNNING},
    State.FREE_ENDED: {Event.STEP: State.FREE_ENDED, **_FREE, Event.IS_ALLOWED: State.FREE_ENDED},
}
#: The exception that refuses a STEP in states for which `FOLLOWS` lacks it. Other missing pairs cannot occur.
REFUSED_WITH: dict[State, type[EnvherdError]] = {State.NEEDS_RESET: InternalError, State.ENDED: InternalError}
COMMANDS = (Event.STEP,)

#: `FOLLOWS` as bytes: int8 `[event, state]`, the state that follows; -1 where nothing can.
NEXT = state_tables.as_bytes(FOLLOWS)
#: Its rows as plain lists, which Python reads faster.
AFTER: list[list[int]] = NEXT.tolist()
#: As ints, which Python compares faster: states of an env that was never reset since it was built, or since its episode
#: was broken off; and those after the end of an episode.
NEW = (int(State.NEEDS_RESET), int(State.FREE_NEW))
OVER = (int(State.ENDED), int(State.FREE_ENDED))


def table() -> str:
    """Return the table as text: a line per state and event."""
    return state_tables.as_text(FOLLOWS, Event, COMMANDS, REFUSED_WITH)
