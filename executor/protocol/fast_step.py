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
from envherd.executor.protocol.flight import Flight, Flights
from envherd.workers.protocol import RING, STEP_RESET, Op, pack

if TYPE_CHECKING:
    from envherd.executor.batches.step_data import StepBatches
    from envherd.executor.protocol.engine import Engine

#: `td -> (next, root)`, or None if the step was not made.
FastStep = Callable[[TensorDictBase], tuple[TensorDictBase, TensorDictBase | None] | None]


def never(_: Any) -> None:
    """Return None: the caller must use `Engine.step_all`."""


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
    absent, step_all = engine.pool.compile()
    flights, positions = engine.flights, engine.positions
    steps = steps or engine.batches.steps
    batch_size, device = engine.batch_size, device or engine.device
    take, write_inputs, land = compile_take(engine), engine.write_inputs, engine.land_step
    next_column, draft, finish = positions.next_column, steps.draft[op], steps.finish
    note, states = compile_note(flights, op), flights.states
    values, memory, running, stepping = states.values.tobytes, states.memory, states.running, after(states.running, op)
    words = [pack(int(op), RING, column) for column in range(positions.num_frames)]
    under_way = Flight(flights, op, None, None)

    def step(td: Any) -> Any:
        if (
            td.__class__ is not TensorDict
            or td._batch_size != batch_size  # noqa: SLF001  # as `fast_tensordict.IS_AS_EXPECTED` says
            or (td._device is not device and td._device != device)  # noqa: SLF001
            or td._td_dim_names is not None  # noqa: SLF001
            or td._is_locked  # noqa: SLF001
            or "next" in (source := td._tensordict)  # noqa: SLF001
            or absent
            or values() != running
        ):
            return None
        if not take(source):
            write_inputs(td)
        column = next_column()
        flights.current = under_way
        memory[:] = stepping
        drafted, has_all = step_all(words[column], draft, column)
        if has_all:
            ended = note(column)
            flights.current = None
            pair = finish(drafted, column, ended)
        else:
            pair = land(flights.adopt(op, column), drafted, steps)
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
    absent, step_all = engine.pool.compile()
    note, states = compile_note(flights, op), flights.states
    values, memory, running, stepping = states.values.tobytes, states.memory, states.running, after(states.running, op)
    first, each = pack(int(op), engine.positions.where.target, 0), pack(0, 0, 1)
    under_way = Flight(flights, op, None, None)

    def command(at: int) -> Flight:
        if absent or values() != running:
            return begin(op, at=at)
        under_way.has_landed = False
        flights.current = under_way
        memory[:] = stepping
        _, has_all = step_all(first + at * each, None, at)
        if not has_all:
            return flights.adopt(op, at)
        ended = note(at)
        under_way.was_reset = ended if op == STEP_RESET else None
        under_way.has_landed = True
        flights.current = None
        return under_way

    return command


def compile_note(flights: Flights, op: Op) -> Callable[[int], np.ndarray | None]:
    """Return `Flights.note_all` for a command that all envs, which were RUNNING, have answered."""
    states, stepped_all = flights.states, partial(flights.positions.stepped_all, resets_ended=op == STEP_RESET)
    memory, running, own_op = states.memory, after(after(states.running, op), Event.ANSWERED), int(op)

    def note(column: int) -> np.ndarray | None:
        if (ended := stepped_all(column)) is None:
            memory[:] = running
        else:
            flights.land_states(own_op, column, ended)
        return ended

    return note


def compile_take(engine: Engine) -> Callable[[dict[str, Any]], bool | None]:
    """Return a function that writes plain actions from the entries of a batch, and returns whether it has."""
    plain = engine.plain_intake
    if plain is None:
        return never
    find, take_all = plain.find, plain.take_all
    return lambda source: take_all(find(source))
