"""A step of all envs, compiled for one executor, for the plain case: all envs are running and answer only with rows.

Guarantees: `Engine.step_all` is the specification and handles all other cases. If a step is not plain before the
command is given, nothing has changed and the caller calls `step_all`. If the answer is not plain, the command becomes a
`Flight` that `Flights` lands. After an exception at any line, `Flights.recover` sees a flight of all envs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envherd.executor.protocol.env_states import Event, after
from envherd.executor.protocol.flight import Flight
from envherd.workers.protocol import RING, STEP_RESET, Op, pack

if TYPE_CHECKING:
    from envherd.executor.batches.step_data import StepBatches
    from envherd.executor.protocol.engine import Engine

#: `td -> (next, root)`, or None if the step was not made.
FastStep = Callable[[TensorDictBase], tuple[TensorDictBase, TensorDictBase | None] | None]
#: See `_compile_give`.
Give = Callable[[int, Any, int], tuple[Any, Flight | None, np.ndarray | None]]


def never(_: Any) -> None:
    """Do nothing: the caller must use `Engine.step_all`, or `Engine.write_inputs`."""


def compile_step(
    engine: Engine, op: Op, steps: StepBatches | None = None, device: torch.device | None = None
) -> FastStep:
    """Return a step of all envs, which holds the call guard, and sets `next` of its batch.

    Args:
        engine: of the executor.
        op: STEP or STEP_RESET.
        steps: makes the batches; None for the engine's own.
        device: which the steps' batches, and those that are passed, name; None for the engine's.
    """
    if engine.plain.step:
        return never
    positions, steps = engine.positions, steps or engine.batches.steps
    batch_size, device = engine.batch_size, device or engine.device
    plain, write_inputs, land = engine.plain_intake, engine.write_inputs, engine.land_step
    find, take_all = (never, never) if plain is None else (plain.find, plain.take_all)
    next_column, draft, finish = positions.next_column, steps.draft[op], steps.finish
    can_give, give = _compile_give(engine, op)
    words = [pack(int(op), RING, column) for column in range(positions.num_frames)]

    def step(td: Any) -> Any:
        if (
            td.__class__ is not TensorDict
            or td._batch_size != batch_size  # noqa: SLF001  # as `fast_tensordict.IS_AS_EXPECTED` says
            or (td._device is not device and td._device != device)  # noqa: SLF001
            or td._td_dim_names is not None  # noqa: SLF001
            or td._is_locked  # noqa: SLF001
            or "next" in (source := td._tensordict)  # noqa: SLF001
            or not can_give()
        ):
            return None
        if not take_all(find(source)):
            write_inputs(td)
        column = next_column()
        drafted, flight, ended = give(words[column], draft, column)
        pair = finish(drafted, column, ended) if flight is None else land(flight, drafted, steps)
        source["next"] = pair[0]
        return td, pair[1]

    return engine.guard.held(step)


def compile_command(engine: Engine, op: Op) -> Callable[[int], Flight]:
    """Return a function that gives all envs a command, after inputs were written, at a column of the present target.

    Returns:
        A function: column -> flight, which may have landed already.
    """
    flights = engine.flights
    begin = flights.begin
    if engine.plain.step:
        return lambda at: begin(op, at=at)
    can_give, give = _compile_give(engine, op)
    first, each = pack(int(op), engine.positions.where.target, 0), pack(0, 0, 1)
    landed = Flight(flights, op, None, None)
    landed.has_landed = True

    def command(at: int) -> Flight:
        if not can_give():
            return begin(op, at=at)
        _, flight, ended = give(first + at * each, None, at)
        if flight is not None:
            return flight
        landed.was_reset = ended if op == STEP_RESET else None
        return landed

    return command


def _compile_give(engine: Engine, op: Op) -> tuple[Callable[[], bool], Give]:
    """Return the two functions that begin and land a command of all envs.

    Returns:
        A function that returns whether it can be given: all envs are RUNNING, and all workers serve. And one that gives
        it and waits: `(word, draft, column) -> (result of draft(column), flight, ended)`. The flight has not landed, or
        is None. Then `ended` are the envs whose episodes have ended, int64 `[k]`, or None for none.
    """
    absent, step_all = engine.pool.compile()
    flights, states = engine.flights, engine.flights.states
    values, memory, running = states.values.tobytes, states.memory, states.running
    stepping = after(running, op)
    answered = after(stepping, Event.ANSWERED)
    stepped_all, own_op = partial(engine.positions.stepped_all, resets_ended=op == STEP_RESET), int(op)
    under_way = Flight(flights, op, None, None)

    def can_give() -> bool:
        return not absent and values() == running

    def give(word: int, draft: Any, column: int) -> tuple[Any, Flight | None, np.ndarray | None]:
        flights.current = under_way
        memory[:] = stepping
        drafted, has_all = step_all(word, draft, column)
        if not has_all:
            return drafted, flights.adopt(op, column), None
        if (ended := stepped_all(column)) is None:
            memory[:] = answered
        else:
            flights.land_states(own_op, column, ended)
        flights.current = None
        return drafted, None, ended

    return can_give, give
