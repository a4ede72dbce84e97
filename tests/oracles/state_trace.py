"""A record of what happens to the states of envs, in Python and in C."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from envherd.executor.pools import worker_pool
from envherd.executor.pools.fast_commands import NativeExchange, exchange_natively
from envherd.executor.protocol.env_states import FOLLOWS, EnvStates, Event, State, after
from envherd.workers.protocol import Op

Step = tuple[State, Event, State]


class StateTrace:
    """Records every change of a state in executors that are made after it; raises if the table lacks one.

    Attributes:
        steps: (state before, event, state after) of each env to which something happened.
        in_c: those of them that C has stored.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: set[Step] = set()
        self.in_c: set[Step] = set()
        self._latest: dict[int, np.ndarray] = {}  # id of an array of states -> its content after the latest event
        self._arrays: list[np.ndarray] = []  # so that no other gets their ids
        self._is_watching = False
        make, move, move_all, land_all = EnvStates.__init__, EnvStates.move, EnvStates.move_all, EnvStates.land_all
        trace = self

        def moved(states: EnvStates, env_ids: np.ndarray, event: Any) -> None:
            trace._watch(
                states.values, lambda: move(states, env_ids, event), lambda: dict.fromkeys(env_ids.tolist(), event)
            )

        def moved_all(states: EnvStates, event: Any) -> None:
            everyone = range(len(states.values))
            trace._watch(states.values, lambda: move_all(states, event), lambda: dict.fromkeys(everyone, event))

        def landed_all(states: EnvStates, ended: np.ndarray | None) -> None:
            if ended is None:
                land_all(states, None)  # which moves all
                return
            events = dict.fromkeys(range(len(states.values)), Event.ANSWERED) | dict.fromkeys(
                ended.tolist(), Event.ENDS
            )
            trace._watch(states.values, lambda: land_all(states, ended), lambda: events)

        def made(states: EnvStates, num_envs: int) -> None:
            make(states, num_envs)
            states.memory = _Memory(trace, states)  # type: ignore[assignment]

        monkeypatch.setattr(EnvStates, "__init__", made)
        monkeypatch.setattr(EnvStates, "move", moved)
        monkeypatch.setattr(EnvStates, "move_all", moved_all)
        monkeypatch.setattr(EnvStates, "land_all", landed_all)
        monkeypatch.setattr(worker_pool, "exchange_natively", self._exchange_natively)

    def _exchange_natively(self, *args: Any) -> NativeExchange:
        commands, facts = exchange_natively(*args), args[-1]
        values = facts["states"]

        def send(op: int, ids: np.ndarray, actions: Any) -> Any:
            return self._watch(
                values, lambda: commands.send(op, ids, actions), lambda: dict.fromkeys(ids.tolist(), op), self.in_c
            )

        def take(count: int, memory: Any, before: Any, ids: np.ndarray) -> Any:
            return self._watch(
                values,
                lambda: commands.take(count, memory, before, ids),
                lambda: {i: _answer_of(facts, i) for i in ids.tolist()},
                self.in_c,
            )

        return commands._replace(send=send, take=take)

    def stored(self, states: EnvStates, values: bytes, store: Callable[[], None]) -> None:
        """Note what a fast step stores: the command of all envs, or their answers."""
        if self._is_watching:  # a function that stores is watched as a whole
            store()
            return
        before = states.values.tobytes()
        events = [event for event in (Event.STEP, Event.STEP_RESET, Event.ANSWERED) if after(before, event) == values]
        assert events, f"no event of a step leads from {[*before]} to {[*values]}"
        self._watch(states.values, store, lambda: dict.fromkeys(range(len(before)), events[0]))

    def _watch(
        self,
        values: np.ndarray,
        call: Callable[[], Any],
        events_of: Callable[[], Mapping[int, Any]],
        also: set[Step] | None = None,
    ) -> Any:
        """Make a call that changes states, if it has done anything; check the changes."""
        before = values.copy()
        if id(values) not in self._latest:
            self._arrays.append(values)
        latest = self._latest.setdefault(id(values), before)
        assert (before == latest).all(), f"states were changed from {latest.tolist()} to {before.tolist()}"
        result: Any = None
        events: Mapping[int, Any] = {}
        self._is_watching = True
        try:
            result = call()
        finally:
            self._is_watching = False
            then = self._latest[id(values)] = values.copy()
        if result is None or (result is not False and result >= 0):  # of C: False or -1 if it has done nothing
            events = events_of()
        for env_id, (one, other) in enumerate(zip(map(State, before.tolist()), map(State, then.tolist()), strict=True)):
            if env_id not in events:
                assert one is other, f"env {env_id} went from {one.name} to {other.name} without an event"
                continue
            event = Event(int(events[env_id]))
            assert FOLLOWS[one].get(event) is other, f"{one.name} became {other.name} by {event.name}"
            for steps in (self.steps, also):
                if steps is not None:
                    steps.add((one, event, other))
        return result


class _Memory:
    """`EnvStates.memory`, of which a trace notes every store."""

    def __init__(self, trace: StateTrace, states: EnvStates) -> None:
        self._trace, self._states, self._memory = trace, states, states.memory

    def __setitem__(self, place: slice, values: bytes) -> None:
        self._trace.stored(self._states, values, lambda: self._memory.__setitem__(place, values))


def _answer_of(facts: Mapping[str, Any], env_id: int) -> Event:
    """Return what the rows of an env that C has taken say."""
    column, op = facts["at"][env_id], facts["ops"][env_id]
    is_over = facts["next"][facts["done"]][column, env_id].any()
    if is_over and op == Op.STEP_RESET:
        is_over = facts["root"][facts["root_done"]][column, env_id].any()
    return Event.ENDS if is_over else Event.ANSWERED
