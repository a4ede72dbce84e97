"""The base of the vector envs of the facades of Gymnasium and Stable-Baselines3: what is under them, and their states.

The states of their calls are one table:

    what happens    default   begun     reset     step      call      closed
    open            -         -         -         -         -         default
    begin           begun     begun *   -         -         -         -
    reset_async     -         reset     -         -         -         closed
    step_async      -         step      -         -         -         closed
    call_async      -         call      -         -         -         closed
    reset_wait      -         -         begun     -         -         -
    step_wait       -         -         -         begun     -         -
    call_wait       -         -         -         -         begun     -
    land            -         default   -         -         -         closed
    close           closed    closed    closed    closed    closed    closed

`begun`: a call is being made. `reset`, `step`, `call`: one was begun and waits for its `..._wait`. `-`: refused.
`*`: the call before raised, or Ctrl-C has ended it: its commands are dropped, and their envs need a reset. Which envs
need a reset is a state of the executor, see `protocol.env_states`.
"""

from enum import Enum
from typing import ClassVar, NoReturn

from envherd.executor.batched import BatchedEnv
from envherd.executor.protocol.fast import compile_command
from envherd.executor.protocol.flight import Flight
from envherd.workers.protocol import Op

#: Those of the same names are Gymnasium's.
AsyncState = Enum(
    "AsyncState",
    {
        "DEFAULT": "default",
        "BEGUN": "begun",
        "WAITING_RESET": "reset",
        "WAITING_STEP": "step",
        "WAITING_CALL": "call",
        "CLOSED": "closed",
    },
)
#: What happens -> the state before it -> the state after it.
FOLLOWS: dict[str, dict[AsyncState, AsyncState]] = {
    "open": {AsyncState.CLOSED: AsyncState.DEFAULT},
    "begin": {AsyncState.DEFAULT: AsyncState.BEGUN, AsyncState.BEGUN: AsyncState.BEGUN},
    "reset_async": {
        AsyncState.BEGUN: AsyncState.WAITING_RESET,
        AsyncState.CLOSED: AsyncState.CLOSED,
    },
    "step_async": {
        AsyncState.BEGUN: AsyncState.WAITING_STEP,
        AsyncState.CLOSED: AsyncState.CLOSED,
    },
    "call_async": {
        AsyncState.BEGUN: AsyncState.WAITING_CALL,
        AsyncState.CLOSED: AsyncState.CLOSED,
    },
    "reset_wait": {AsyncState.WAITING_RESET: AsyncState.BEGUN},
    "step_wait": {AsyncState.WAITING_STEP: AsyncState.BEGUN},
    "call_wait": {AsyncState.WAITING_CALL: AsyncState.BEGUN},
    "land": {
        AsyncState.BEGUN: AsyncState.DEFAULT,
        AsyncState.CLOSED: AsyncState.CLOSED,
    },
    "close": dict.fromkeys(AsyncState, AsyncState.CLOSED),
}


class Hosted:
    """A vector env over an executor; it moves by the table.

    Attributes:
        executor: what runs the envs, e.g. for its `statistics()`.
    """

    # A constructor that fails leaves nothing to close.
    _state = AsyncState.CLOSED
    #: What users call to reset envs, for messages.
    _remedy: ClassVar[str]
    _flight: Flight  # that began last

    def _host(self, executor: BatchedEnv, op: Op) -> None:
        """Take over an executor whose steps are a command; close it if its envs do not fit together."""
        self.executor = executor
        self._engine = executor.engine
        self._guard = executor.engine.guard
        try:
            self._engine.states.remedy = self._remedy
            # In the host libraries the env decides whether it may be stepped before a reset.
            self._engine.allow_steps()
            self._command = compile_command(self._engine, op)
            self._take()
        except BaseException:
            executor.close()
            raise
        # Last: Gymnasium 1.1 closes deleted envs that are not closed.
        self.closed = False

    def _take(self) -> None:
        """Read the envs' specs and find their rows in the slab."""
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        """Whether no call can be made: before the envs were made, and after `close`."""
        return self._state is AsyncState.CLOSED

    @closed.setter
    def closed(self, is_closed: bool) -> None:
        self._move("close" if is_closed else "open")

    def _move(self, event: str, call: str = "") -> None:
        """Note that something has happened.

        Args:
            event: see the table.
            call: for messages, the call in which it happens if the event is named otherwise.

        Raises:
            Exception: it is refused; see `_refuse`.
        """
        following = FOLLOWS[event].get(self._state)
        if following is None:
            self._refuse(event, call or event)
        # The call before was broken off; see `*` in the table.
        if following is self._state is AsyncState.BEGUN:
            with self._engine.guard:
                self._engine.drop_parked()
        self._state = following

    def _refuse(self, event: str, call: str) -> NoReturn:
        """Raise the host's error for what the table refuses."""
        raise NotImplementedError
