"""The states of envs on the caller's side: a table of transitions, and one array that holds the states.

Guarantees: a state changes only by an entry of `FOLLOWS`. If the table has no entry for a command and the state of one
of its envs, the command is refused with the exception in `REFUSED_WITH`, and nothing changes.

State           Meaning
NEEDS_RESET     it was never reset, or a loss, an exception or an interrupt has taken its episode
RUNNING         in an episode
ENDED           its latest row ended its episode
CUT             its episode was ended from outside: the next step of all envs has a truncated row in its place
STEPPING        it has a STEP; its answer is not taken yet
STEP_RESETTING  it has a STEP_RESET; its answer is not taken yet
RESETTING       it has a RESET; its answer is not taken yet

`print(table())` prints the transitions.
"""

from enum import IntEnum
from typing import Any

import numpy as np

from envherd.executor.protocol.call_guard import call_name
from envherd.workers import protocol
from envherd.workers.errors import Busy, EnvherdError, ResetNeeded
from envherd.workers.protocol import Op


class State(IntEnum):
    """The state of each env, which moves only as the table of the module says."""

    NEEDS_RESET = 0
    RUNNING = 1
    ENDED = 2
    CUT = 3
    STEPPING = 4
    STEP_RESETTING = 5
    RESETTING = 6


class Event(IntEnum):
    """An event of an env.

    STEP, STEP_RESET, RESET: it is given this command.
    ANSWERED: its row was taken, and it is in an episode: the same one, or one that the command has begun.
    ENDS: its row was taken and is done: that of a STEP, or the root of a reset.
    FAILS: it raised.
    IS_LOST: its worker was lost.
    IS_BROKEN_OFF: an interrupt or a time limit ended the call that waited for it; its answer will be dropped.
    IS_WITHDRAWN: the call was ended before the command was given.
    IS_ALLOWED: the caller may step it without a reset (a facade whose host leaves that check to the env; a restored
        state).
    IS_OVER: its state was restored, and its episode had ended.
    IS_CUT: another instance takes its place, or the executor continues the batch of another one that was lost.
    """

    STEP = Op.STEP
    STEP_RESET = Op.STEP_RESET
    RESET = Op.RESET
    ANSWERED = 4
    ENDS = 5
    FAILS = 6
    IS_LOST = 7
    IS_BROKEN_OFF = 8
    IS_WITHDRAWN = 9
    IS_ALLOWED = 10
    IS_OVER = 11
    IS_CUT = 12


_UNDONE = {
    Event.FAILS: State.NEEDS_RESET,
    Event.IS_LOST: State.NEEDS_RESET,
    Event.IS_BROKEN_OFF: State.NEEDS_RESET,
}
_IDLE = {
    Event.RESET: State.RESETTING,
    Event.IS_ALLOWED: State.RUNNING,
    Event.IS_OVER: State.ENDED,
    **_UNDONE,
}

#: State -> event -> state.
FOLLOWS: dict[State, dict[Event, State]] = {
    State.NEEDS_RESET: {**_IDLE, Event.IS_CUT: State.NEEDS_RESET},
    State.RUNNING: {
        Event.STEP: State.STEPPING,
        Event.STEP_RESET: State.STEP_RESETTING,
        **_IDLE,
        Event.IS_CUT: State.CUT,
    },
    State.ENDED: {**_IDLE, Event.IS_CUT: State.ENDED},
    State.CUT: {**_IDLE, Event.IS_CUT: State.CUT},
    State.STEPPING: {
        Event.ANSWERED: State.RUNNING,
        Event.ENDS: State.ENDED,
        Event.IS_WITHDRAWN: State.RUNNING,
        **_UNDONE,
        Event.IS_CUT: State.STEPPING,
    },
    State.STEP_RESETTING: {
        Event.ANSWERED: State.RUNNING,
        Event.ENDS: State.ENDED,
        Event.IS_WITHDRAWN: State.RUNNING,
        **_UNDONE,
        Event.IS_CUT: State.STEP_RESETTING,
    },
    State.RESETTING: {
        Event.ANSWERED: State.RUNNING,
        Event.ENDS: State.ENDED,
        Event.IS_WITHDRAWN: State.NEEDS_RESET,
        **_UNDONE,
        Event.IS_CUT: State.RESETTING,
    },
}

#: The exception that refuses a command in states for which `FOLLOWS` lacks it. Other missing pairs cannot occur.
REFUSED_WITH: dict[State, type[EnvherdError]] = {
    State.NEEDS_RESET: ResetNeeded,
    State.ENDED: ResetNeeded,
    State.CUT: ResetNeeded,
    State.STEPPING: Busy,
    State.STEP_RESETTING: Busy,
    State.RESETTING: Busy,
}
COMMANDS = (Event.STEP, Event.STEP_RESET, Event.RESET)

# Searching bytes takes a tenth of the time of an array, and for an int of bytes.
_IMPOSSIBLE_BYTE = 255
#: `FOLLOWS` as bytes: int8 `[event, state]`, the state that follows; -1 where nothing can.
NEXT = protocol.table_as_bytes(FOLLOWS)
_NEXT = [bytes(row).ljust(256, bytes([_IMPOSSIBLE_BYTE])) for row in NEXT]
_NEEDS_RESET = int(State.NEEDS_RESET)
_RUNNING = int(State.RUNNING)
_FIRST_UNDER_WAY = np.int8(State.STEPPING)  # comparing it takes half the time of an int


def table() -> str:
    """Return the table as text: a line per state and event."""
    return protocol.table_as_text(
        FOLLOWS,
        Event,
        COMMANDS,
        REFUSED_WITH,
    )


class EnvStates:
    """The states of all envs of one executor, and the latest command of each; see the module.

    Attributes:
        values: int8 `[N]`, a `State` each.
        ops: int64 `[N]`, the `Op` of the command of each env that has one.
        columns: int64 `[N]`, the column that this command names.
        running: the bytes of `values` where all envs are RUNNING.
        remedy: what the message of a refused step advises; facades name their host's calls.
    """

    remedy = "Reset them with a '_reset' mask, or use step_and_maybe_reset."

    def __init__(self, num_envs: int) -> None:
        self.values = np.full(num_envs, _NEEDS_RESET, np.int8)
        self.ops = np.zeros(num_envs, np.int64)
        self.columns = np.zeros(num_envs, np.int64)
        self.running = bytes([_RUNNING]) * num_envs

    def are_running(self) -> bool:
        """Return whether all envs are RUNNING."""
        return self.values.tobytes() == self.running

    @property
    def needs_reset(self) -> np.ndarray:
        """Envs that must be reset before a step of theirs: NEEDS_RESET, ENDED or CUT; bool `[N]`, fresh."""
        return (self.values != _RUNNING) & (self.values < _FIRST_UNDER_WAY)

    @property
    def under_way(self) -> np.ndarray:
        """Envs with a command whose answer was not taken yet, bool `[N]`, fresh."""
        return self.values >= _FIRST_UNDER_WAY

    def check(self, event: Event | Op, env_ids: np.ndarray) -> None:
        """Raise if a command is illegal for some envs; change nothing.

        Raises:
            Busy: an env has a command already.
            ResetNeeded: a step of an env that must be reset.
        """
        following = self.values[env_ids].tobytes().translate(_NEXT[event])
        if _IMPOSSIBLE_BYTE not in following:
            return
        refused = env_ids[np.frombuffer(following, np.int8) == protocol.IMPOSSIBLE]
        assert event in COMMANDS, (
            f"{Event(event).name} cannot happen to envs in {self.values[refused].tolist()}"
        )
        busy = tuple(refused[self.values[refused] >= _FIRST_UNDER_WAY].tolist())
        if busy:
            raise Busy(
                f"{call_name()} failed: envs {[*busy]} still owe an answer. recv() them first.",
                env_ids=busy,
            )
        ended = tuple(refused.tolist())
        raise ResetNeeded(
            f"{call_name()} failed: expected running envs, got envs {[*ended]} that have ended, have lost their "
            f"episode or were never reset. {self.remedy} No env was stepped.",
            env_ids=ended,
        )

    def move(self, env_ids: np.ndarray, event: Event | Op) -> None:
        """Note that something has happened to some envs.

        Raises:
            Busy, ResetNeeded: the event is a command that `check` refuses. No env has moved.
        """
        following = self.values[env_ids].tobytes().translate(_NEXT[event])
        if _IMPOSSIBLE_BYTE in following:
            self.check(event, env_ids)
        self.values[env_ids] = np.frombuffer(following, np.int8)

    def start(self, env_ids: np.ndarray, op: Op, columns: Any) -> None:
        """Note that some envs are given a command.

        Args:
            env_ids: int64 `[k]`.
            op: the command.
            columns: int, or int64 `[k]`.
        """
        self.move(env_ids, op)
        self.ops[env_ids] = int(op)
        self.columns[env_ids] = columns

    def restore(self, env_ids: np.ndarray, has_ended: np.ndarray) -> None:
        """Set the states of some envs that were changed other than by a command; `has_ended` is bool `[k]`."""
        self.move(env_ids[has_ended], Event.IS_OVER)
        self.move(env_ids[~has_ended], Event.IS_ALLOWED)
