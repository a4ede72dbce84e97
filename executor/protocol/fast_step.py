"""A step of all envs, compiled for one executor, for the plain case: all envs are running and answer only with rows.

Guarantees: `Engine.step_all` is the specification and handles all other cases. If a step is not plain before the
command is given, nothing has changed and the caller calls `step_all`. If the answer is not plain, the command becomes a
`Flight` that `Flights` lands. After an exception at any line, `Flights.recover` sees a flight of all envs.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envherd.executor.batches.step_data import StepBatches, WithRoot
from envherd.executor.protocol.flight import Flight
from envherd.workers.protocol import Op

if TYPE_CHECKING:
    from envherd.executor.protocol.engine import Engine

#: Returns the batch with its `next`, and the root; or None if the step was not made.
FastStep = Callable[[TensorDictBase], WithRoot | None]
#: Result of the second function of `_compile_give`: that of `draft`, the flight, and the envs that have ended.
Given = tuple[Any, Flight | None, np.ndarray | None]


def never(_: Any) -> None:
    """Do nothing: the caller must use `Engine.step_all`, or `Engine.write_inputs`."""


def compile_step(
    engine: "Engine",
    op: Op,
    steps: StepBatches | None = None,
    device: torch.device | None = None,
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
    # Names of the closure, because attributes take longer.
    steps = steps or engine.batches.steps
    batch_size = engine.batch_size
    device = device or engine.device
    write_inputs = engine.write_inputs
    land = engine.land_step
    find: Callable[[Any], Any] = never
    take_all: Callable[[Any], Any] = never
    if (plain := engine.plain_intake) is not None:
        find = plain.find
        take_all = plain.take_all
    next_column = engine.positions.next_column
    draft = steps.draft[op]
    finish = steps.finish
    can_give, give = _compile_give(engine, op)

    def step(td: Any) -> Any:
        if (
            td.__class__ is not TensorDict
            or td._batch_size != batch_size  # noqa: SLF001  # as `fast_tensordict.IS_AS_EXPECTED` says
            or (td._device is not device and td._device != device)  # noqa: SLF001
            or td._td_dim_names is not None  # noqa: SLF001
            or td._is_locked  # noqa: SLF001
            or "next" in (source := td._tensordict)  # noqa: SLF001
            or not can_give(None)
        ):
            return None
        # Raises for illegal actions: before the command, so that nothing has changed.
        if not take_all(find(source)):
            write_inputs(td)
        column = next_column()
        drafted, flight, ended = give(None, column, draft)
        if flight is None:
            next_td, root = finish(drafted, column, ended)
        else:
            next_td, root = land(flight, drafted, steps)
        source["next"] = next_td
        return td, root

    return engine.guard.held(step)


def compile_command(engine: "Engine", op: Op) -> Callable[..., Flight]:
    """Return a function that gives all envs a command.

    Returns:
        A function with these arguments of `Flights.begin`, which returns the flight. Unless that is parked, it may have
        landed already; then it is valid until the next call of the function.
    """
    flights = engine.flights
    next_column = engine.positions.next_column
    begin = flights.begin
    if engine.plain.step:
        return lambda at=None, **parts: begin(op, at=at, **parts)
    can_give, give = _compile_give(engine, op)
    # One for all calls: only its outcome differs.
    landed = Flight(
        flights,
        op,
        None,
        None,
    )
    landed.has_landed = True

    def command(
        at: int | None = None,
        *,
        write_inputs: Callable[[], None] | None = None,
        resets: np.ndarray | None = None,
        is_parked: bool = False,
    ) -> Flight:
        if is_parked or not can_give(resets):
            return begin(
                op,
                at=at,
                write_inputs=write_inputs,
                resets=resets,
                is_parked=is_parked,
            )
        if write_inputs is not None:
            write_inputs()
        if at is None:
            at = next_column()
        landed.at = at
        _, flight, landed.ended = give(resets, landed.at, None)
        if flight is not None:
            return flight
        landed.note_resets(resets)
        return landed

    return command


def _compile_give(
    engine: "Engine",
    op: Op,
) -> tuple[Callable[[np.ndarray | None], bool], Callable[..., Given]]:
    """Return the two functions that begin and land a command of all envs.

    Returns:
        A function of `Flight.resets` that returns whether the command can be given: no env refuses it, and all workers
        serve. And one that gives it and waits: `(resets, column, draft) -> (result of draft(column), flight, ended)`.
        The flight has not landed, or is None. Then `ended` are the envs whose episodes have ended, int64 `[k]`, or None
        for none.
    """
    flights = engine.flights
    positions = engine.positions
    own_op = int(op)
    absent = engine.pool.absent
    serve = engine.pool.serve
    target = positions.where.in_c
    may_step = flights.native.may_step
    step = flights.native.step
    room = flights.ended
    take_infos = None
    if engine.side.infos.has_rows:
        take_infos = engine.side.infos.take_all
    # What `recover` sees at an interrupt: all envs. It needs no column.
    under_way = Flight(
        flights,
        op,
        None,
        None,
    )

    def can_give(resets: np.ndarray | None) -> bool:
        return not absent and may_step(own_op, resets)

    def give(
        resets: np.ndarray | None,
        column: int,
        draft: Any,
    ) -> Given:
        # Before C moves a state, as `flight` 1 says.
        flights.current = under_way
        drafted, num_ended = step(
            own_op,
            resets,
            target,
            column,
            serve,
            draft,
        )
        if num_ended < 0:
            return drafted, flights.adopt(op, column, resets), None
        positions.is_mixed = False
        if positions.has_interrupted:
            # Of an earlier step; in this one nothing was lost.
            positions.interrupted.fill(0)
        if take_infos is not None:
            take_infos()
        flights.current = None
        return drafted, None, room[:num_ended].copy() if num_ended else None

    return can_give, give
