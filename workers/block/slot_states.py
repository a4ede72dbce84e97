"""The states of an env in its worker: a table of transitions, which `step.c` reads too.

Guarantees: the state of a `Slot` changes only by an entry of `FOLLOWS`. If the table has no entry for a STEP, an
`InternalError` refuses it and the env is not stepped: the caller's table (`protocol.env_states`) lets none be sent.

State         Meaning
NEEDS_RESET   it was never reset, or its episode was broken off: its next reset is of all its rows
RUNNING       in an episode
ENDED         its latest row ended its episode; for an env that is a batch, the episodes of some of its rows
FREE_NEW, FREE_RUNNING, FREE_ENDED
              the same of an env that may be stepped in any of them: the env itself decides, or a user's code drives it
IN_FORK       this process is one that the env has forked; only the worker may answer, so nothing may follow

`print(table())` prints the transitions.
"""

from enum import IntEnum

from envherd.workers import state_tables
from envherd.workers.errors import EnvherdError, InternalError


class SlotState(IntEnum):
    """The state of an env, which moves only as the table of the module says."""

    NEEDS_RESET = 0
    RUNNING = 1
    ENDED = 2
    FREE_NEW = 3
    FREE_RUNNING = 4
    FREE_ENDED = 5
    IN_FORK = 6


class SlotEvent(IntEnum):
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


_GUARDED = {
    SlotEvent.RUNS: SlotState.RUNNING,
    SlotEvent.IS_BROKEN_OFF: SlotState.NEEDS_RESET,
}
_FREE = {
    SlotEvent.RUNS: SlotState.FREE_RUNNING,
    SlotEvent.ENDS: SlotState.FREE_ENDED,
    SlotEvent.IS_BROKEN_OFF: SlotState.FREE_NEW,
}

#: State -> event -> state.
FOLLOWS: dict[SlotState, dict[SlotEvent, SlotState]] = {
    SlotState.NEEDS_RESET: {
        **_GUARDED,
        SlotEvent.IS_ALLOWED: SlotState.FREE_NEW,
    },
    SlotState.RUNNING: {
        SlotEvent.STEP: SlotState.RUNNING,
        SlotEvent.ENDS: SlotState.ENDED,
        **_GUARDED,
        SlotEvent.IS_ALLOWED: SlotState.FREE_RUNNING,
    },
    SlotState.ENDED: {
        SlotEvent.ENDS: SlotState.ENDED,
        **_GUARDED,
        SlotEvent.IS_ALLOWED: SlotState.FREE_ENDED,
    },
    SlotState.FREE_NEW: {
        SlotEvent.STEP: SlotState.FREE_NEW,
        **_FREE,
        SlotEvent.IS_ALLOWED: SlotState.FREE_NEW,
    },
    SlotState.FREE_RUNNING: {
        SlotEvent.STEP: SlotState.FREE_RUNNING,
        **_FREE,
        SlotEvent.IS_ALLOWED: SlotState.FREE_RUNNING,
    },
    SlotState.FREE_ENDED: {
        SlotEvent.STEP: SlotState.FREE_ENDED,
        **_FREE,
        SlotEvent.IS_ALLOWED: SlotState.FREE_ENDED,
    },
    SlotState.IN_FORK: {},
}
#: The exception that refuses a STEP in states for which `FOLLOWS` lacks it. Other missing pairs cannot occur.
REFUSED_WITH: dict[SlotState, type[EnvherdError]] = {
    SlotState.NEEDS_RESET: InternalError,
    SlotState.ENDED: InternalError,
    SlotState.IN_FORK: InternalError,
}
COMMANDS = (SlotEvent.STEP,)

#: `FOLLOWS` as bytes: int8 `[event, state]`, the state that follows; -1 where nothing can.
NEXT = state_tables.as_bytes(FOLLOWS)
#: Its rows as plain lists, which Python reads faster.
AFTER: list[list[int]] = NEXT.tolist()
#: As ints, which Python compares faster: states of an env that was never reset since it was built, or since its episode
#: was broken off; and those after the end of an episode.
NEW = (
    int(SlotState.NEEDS_RESET),
    int(SlotState.FREE_NEW),
)
OVER = (
    int(SlotState.ENDED),
    int(SlotState.FREE_ENDED),
)


def table() -> str:
    """Return the table as text: a line per state and event."""
    return state_tables.as_text(FOLLOWS, SlotEvent, COMMANDS, REFUSED_WITH)
