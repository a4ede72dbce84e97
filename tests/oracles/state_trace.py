"""A record of what happens to the states of envs, in Python and in C."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from envherd.executor.pools import base
from envherd.executor.protocol.env_states import FOLLOWS, EnvStates, Event, State
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
        # Id of an array of states -> its content after the latest event.
        self._latest: dict[int, np.ndarray] = {}
        self._arrays: list[np.ndarray] = []  # so that no other gets their ids
        self._is_watching = False
        move, trace = EnvStates.move, self

        def moved(states: EnvStates, env_ids: np.ndarray, event: Any) -> None:
            trace._watch(
                states.values,
                lambda: move(states, env_ids, event),
                lambda: dict.fromkeys(env_ids.tolist(), event),
            )

        monkeypatch.setattr(EnvStates, "move", moved)
        compiled = base.Pool.compile
        monkeypatch.setattr(
            base.Pool,
            "compile",
            lambda pool, facts: trace._watched(compiled(pool, facts), facts),
        )

    def _watched(self, exchange: Any, facts: Mapping[str, Any]) -> Any:
        values, everyone = facts["states"], range(len(facts["states"]))

        def watched(
            name: str, events_of: Callable[..., Mapping[int, Any]]
        ) -> Callable[..., Any]:
            call = getattr(exchange, name)
            return lambda *given: self._watch(
                values, lambda: call(*given), lambda: events_of(*given), self.in_c
            )

        def given(op: int, resets: Any, *_: Any) -> dict[int, int]:
            return dict.fromkeys(everyone, op) | dict.fromkeys(
                [] if resets is None else resets.tolist(), Op.RESET
            )

        def step(
            op: int, resets: Any, target: Any, column: int, serve: Any, draft: Any
        ) -> Any:
            """Note the command when it is given, before the draft, and the answers afterwards."""

            def drafted(at: int) -> Any:
                self._watch(
                    before,
                    lambda: before.__setitem__(..., values),
                    lambda: given(op, resets),
                    self.in_c,
                )
                return None if draft is None else draft(at)

            before = values.copy()
            self._arrays.append(before)
            self._latest[id(before)] = before.copy()
            try:
                pair: tuple[Any, int] = exchange.step(
                    op, resets, target, column, serve, drafted
                )
            except BaseException:
                self._latest[id(values)] = values.copy()
                raise
            self._latest[id(values)] = before
            answers = (
                {}
                if pair[1] < 0
                else {i: _answer_of(facts, i, target) for i in everyone}
            )
            after = values.copy()
            values[:] = before
            self._watch(
                values,
                lambda: values.__setitem__(..., after),
                lambda: answers,
                self.in_c,
            )
            return pair

        def land(target: Any) -> int:
            found: list[int] = []
            self._watch(
                values,
                lambda: found.append(exchange.land(target)),
                lambda: {i: _answer_of(facts, i, target) for i in everyone},
                self.in_c,
            )
            return found[0]

        others = {
            name: getattr(exchange, name) for name in ("may_step", "wait", "roots")
        }
        return SimpleNamespace(
            **others,
            step=step,
            land=land,
            give=watched("give", given),
            send=watched("send", lambda op, ids, _: dict.fromkeys(ids.tolist(), op)),
            take=watched(
                "take",
                lambda *given: {i: _answer_of(facts, i) for i in given[-1].tolist()},
            ),
        )

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
        assert (before == latest).all(), (
            f"states were changed from {latest.tolist()} to {before.tolist()}"
        )
        result: Any = None
        events: Mapping[int, Any] = {}
        self._is_watching = True
        try:
            result = call()
        finally:
            self._is_watching = False
            then = self._latest[id(values)] = values.copy()
        # Of C: False or -1 if it has done nothing.
        if result is None or (result is not False and result >= 0):
            events = events_of()
        for env_id, (one, other) in enumerate(
            zip(map(State, before.tolist()), map(State, then.tolist()), strict=True)
        ):
            if env_id not in events:
                assert one is other, (
                    f"env {env_id} went from {one.name} to {other.name} without an event"
                )
                continue
            event = Event(int(events[env_id]))
            assert FOLLOWS[one].get(event) is other, (
                f"{one.name} became {other.name} by {event.name}"
            )
            for steps in (self.steps, also):
                if steps is not None:
                    steps.add((one, event, other))
        return result


def _answer_of(facts: Mapping[str, Any], env_id: int, target: Any = None) -> Event:
    """Return what the rows of an env that C has taken say."""
    column, op = facts["at"][env_id], facts["ops"][env_id]
    next_done, root_done = (
        facts["next"][facts["done"]],
        facts["root"][facts["root_done"]],
    )
    if target is not None:
        _, next_done, root_done, _ = target
    is_over = next_done[column, env_id].any()
    if op == Op.RESET or (is_over and op == Op.STEP_RESET):
        is_over = root_done[
            column + (target is not None), env_id
        ].any()  # in the ring, where resets are, both columns are one
    return Event.ENDS if is_over else Event.ANSWERED
