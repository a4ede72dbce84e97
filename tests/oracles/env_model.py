"""A model of one env: its state on the caller's side, and its true state in a worker that may die.

The caller's side is `protocol.env_states.FOLLOWS`, or a change of it. At every point the worker may die, the env may
raise or end its episode, and an interrupt may end the call: before the command is given, while the call waits, or while
it lands. All interleavings are taken.

Checked in every reachable state:
- no step is carried out by an instance that is not in an episode (which was reset, and has not ended since);
- if the caller's side has RUNNING between two calls, and the worker lives, the instance is in an episode;
- no event occurs that the table lacks;
- from every state the env can be RUNNING again, in a worker that lives.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from envherd.executor.protocol.env_states import FOLLOWS, Event, State
from tests.oracles.exploring import explore

Table = Mapping[State, Mapping[Event, State]]
STEPS = (Event.STEP, Event.STEP_RESET)


class Life(NamedTuple):
    """The whole state of the model.

    Attributes:
        state: as the caller's side has it.
        call: what the caller does: "" (nothing), "begun" (the state has moved, the command is not given), "waits".
        is_parked: whether the flight may stay under way between two calls.
        command: that the worker has not carried out yet; None for none.
        answer: of the worker: an `Event` for the landing; None for none.
        instance: "new" (never reset, or it has raised), "episode", "over".
        is_alive: of the worker.
        deaths_left, interrupts_left: numbers that may still happen.
    """

    state: State = State.NEEDS_RESET
    call: str = ""
    is_parked: bool = False
    command: Event | None = None
    answer: Event | None = None
    instance: str = "new"
    is_alive: bool = True
    deaths_left: int = 2
    interrupts_left: int = 2


@dataclass(frozen=True)
class Model:
    """The lives that a table allows.

    Attributes:
        follows: the table.
    """

    follows: Table = field(default_factory=lambda: FOLLOWS)

    def moved(self, life: Life, event: Event) -> State:
        """Return the state that follows."""
        try:
            return self.follows[life.state][event]
        except KeyError:
            raise AssertionError(f"{life} has no entry for {event.name}") from None

    def after(self, life: Life) -> Iterator[Life]:
        """Yield the lives after one step of any side."""
        yield from self._caller(life)
        if life.command is not None and life.is_alive:
            yield from self._worker(life)
        if life.is_alive and life.deaths_left:
            yield life._replace(
                is_alive=False, command=None, deaths_left=life.deaths_left - 1
            )

    # ---- the caller's side -------------------------------------------------------------------

    def _caller(self, life: Life) -> Iterator[Life]:
        if life.call == "":
            yield from self._next_call(life)
            return
        if life.interrupts_left:
            yield self._interrupted(life)
        if life.call == "begun":
            given = life._replace(
                command=_command_of(life.state) if life.is_alive else None
            )
            yield given._replace(call="" if life.is_parked else "waits")
        elif life.answer is not None:
            yield life._replace(
                state=self.moved(life, life.answer), call="", answer=None
            )
        elif not life.is_alive:
            yield from self._landed_lost(life)

    def _next_call(self, life: Life) -> Iterator[Life]:
        for event in (*STEPS, Event.RESET):
            if event in self.follows[life.state]:
                for is_parked in (False, True):
                    yield life._replace(
                        state=self.moved(life, event), call="begun", is_parked=is_parked
                    )
        if life.state >= State.STEPPING:  # a sent env: a later call receives it
            yield life._replace(call="waits", is_parked=False)
        elif not life.is_alive:  # a call about something else notices it
            yield self._replaced(life._replace(state=self.moved(life, Event.IS_LOST)))

    def _landed_lost(self, life: Life) -> Iterator[Life]:
        """Land a command that was lost with its worker; the call may end there, or reset the env in the successor."""
        is_due = life.state in (State.STEP_RESETTING, State.RESETTING)
        lost = self._replaced(
            life._replace(state=self.moved(life, Event.IS_LOST), call="")
        )
        yield lost
        if is_due:
            yield lost._replace(
                state=self.moved(lost, Event.RESET), call="begun", is_parked=False
            )

    def _replaced(self, life: Life) -> Life:
        return life._replace(is_alive=True, command=None, answer=None, instance="new")

    def _interrupted(self, life: Life) -> Life:
        """End the call, and begin the next one, which waits for the pending command and drops its answer."""
        life = life._replace(interrupts_left=life.interrupts_left - 1)
        if life.call == "begun" and life.is_parked:  # the command was not given
            return life._replace(state=self.moved(life, Event.IS_WITHDRAWN), call="")
        broken_off = life._replace(
            state=self.moved(life, Event.IS_BROKEN_OFF), call="", answer=None
        )
        if broken_off.command is None:
            return broken_off
        (done, *_) = self._worker(broken_off)
        return done._replace(answer=None)

    # ---- the worker --------------------------------------------------------------------------

    def _worker(self, life: Life) -> Iterator[Life]:
        """Yield the possible outcomes of the worker's command."""
        command, life = life.command, life._replace(command=None)
        assert command not in STEPS or life.instance == "episode", (
            f"{life} steps an instance that was not reset"
        )
        # The same one or, after a reset, a new one.
        yield life._replace(answer=Event.ANSWERED, instance="episode")
        yield life._replace(answer=Event.FAILS, instance="new")
        # Of a STEP_RESET: the reset's root says done.
        yield life._replace(answer=Event.ENDS, instance="over")

    # ---- exploring ---------------------------------------------------------------------------

    def explore(self) -> int:
        """Visit every life; return how many there are.

        Raises:
            AssertionError: with the forbidden life.
        """
        return explore(
            Life(),
            self._checked,
            lambda life: (
                life.state is State.RUNNING and life.is_alive and life.call == ""
            ),
        )

    def _checked(self, life: Life) -> Iterator[Life]:
        is_still = life.call == "" and life.command is None and life.answer is None
        assert (
            not is_still
            or life.state is not State.RUNNING
            or not life.is_alive
            or life.instance == "episode"
        ), f"{life} counts as running"
        return self.after(life)


def _command_of(state: State) -> Event:
    return {
        State.STEPPING: Event.STEP,
        State.STEP_RESETTING: Event.STEP_RESET,
        State.RESETTING: Event.RESET,
    }[state]
