"""The calls of the plain case in C, compiled for one executor: a step of all envs, and sends and receives."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envherd.executor.batches.fast_tensordict import num_writes
from envherd.executor.batches.hand_out import StepBatches, WithRoot
from envherd.executor.batches.memory import Leaves, memory_by_count
from envherd.executor.protocol.engine import Engine, Received
from envherd.executor.protocol.exchange import ENV_IDS
from envherd.executor.protocol.flight import Flight
from envherd.shm.slab import (
    Field,
    fields_of,
    input_leaves,
    next_leaves,
    root_leaves,
)
from envherd.workers.protocol import Op

# ---- fast step ---------------------------------------------------------------------------------
# A step of all envs, compiled for one executor, for the plain case: all envs are running and answer only with rows.
#
# Guarantees: `Engine.step_all` is the specification and handles all other cases. If a step is not plain before the
# command is given, nothing has changed and the caller calls `step_all`. If the answer is not plain, the command becomes
# a `Flight` that `Flights` lands. After an exception at any line, `Flights.recover` sees a flight of all envs.


#: Returns the batch with its `next`, and the root; or None if the step was not made.
FastStep = Callable[[TensorDictBase], WithRoot | None]
#: Result of the second function of `_compile_give`: that of `draft`, the flight, and the envs that have ended.
Given = tuple[Any, Flight | None, np.ndarray | None]


def never(_: Any) -> None:
    """Do nothing: the caller must use `Engine.step_all`, or `Engine.write_inputs`."""


def compile_step(
    engine: Engine,
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


def compile_command(engine: Engine, op: Op) -> Callable[..., Flight]:
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
    engine: Engine,
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


# ---- fast exchange -----------------------------------------------------------------------------
# Sends and receives in C, compiled for one executor, for the plain case: only rows, and no loss.
#
# Guarantees: `Exchange` and `Flights` are the specification. Calls that are not plain are left to them before anything
# is changed. C sends or receives all envs of a call, or none. So at an interrupt every env is either sent or not, and
# either received or not; no flight is open. Limits: needs the C extension, and envs of one kind on worker processes of
# this machine.


class FastExchange:
    """Sends and receives in C, only if `Plain.recv` has no reason against them. Its callers hold the call guard."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._native = engine.flights.native
        # Bound once: they are read in every call.
        self._guard = engine.guard
        self._absent = engine.pool.absent
        self._has_reports = engine.flights.has_reports
        self._batch = engine.batches.groups[0]
        spec = self._batch.spec
        self._next_memory = memory_by_count(
            lambda count: [
                *fields_of("next", next_leaves(spec), (count,)),
                Field((ENV_IDS,), (count,), "int64"),
            ],
            engine.num_envs,
        )
        self._before_memory = memory_by_count(
            lambda count: [
                *fields_of("root", root_leaves(spec), (count,)),
                *fields_of("input", input_leaves(spec), (count,)),
            ],
            engine.num_envs,
        )
        self._intake = None
        if not engine.plain.send:
            self._intake = engine.plain_intake

    def _is_plain(self) -> bool:
        # Closed by another thread, or in a signal's handler, during the wait.
        return not (self._guard.is_closed or self._absent or self._has_reports())

    def _as_ids(self, env_ids: Any) -> np.ndarray | None:
        """Return ids as int64 `[k]`, without a check of their values; None for other objects."""
        received = self._engine.received
        # The usual case: the ids are compared, not copied.
        if received is not None and received.is_of(env_ids):
            return received.env_ids
        if (
            env_ids.__class__ is torch.Tensor
            and env_ids.dtype is torch.int64
            and env_ids.is_cpu
        ):
            env_ids = env_ids.numpy()
        if (
            env_ids.__class__ is np.ndarray
            and env_ids.dtype == np.int64
            and env_ids.ndim == 1
        ):
            return env_ids
        return None

    # ---- send --------------------------------------------------------------------------------

    def send(self, td: Any, env_ids: Any, op: Op) -> bool:
        """Give envs a step as `Exchange.send` does; return False if that was not done, and nothing has changed."""
        plain = self._intake
        if td.__class__ is not TensorDict or plain is None or not self._is_plain():
            return False
        source: dict[str, Any] = td._tensordict  # noqa: SLF001  # as `fast_tensordict.IS_AS_EXPECTED` says
        if env_ids is None:
            env_ids = source.get(ENV_IDS)
        ids: np.ndarray | None = self._engine.all_ids
        if env_ids is not None:
            ids = self._as_ids(env_ids)
        value = plain.find(source)
        if (
            ids is None
            or value.__class__ is not torch.Tensor
            or value.dtype is not plain.dtype
            or value.requires_grad
            or not value.is_cpu
            or td._batch_size != (len(ids),)  # noqa: SLF001
            or ("next" in source and self._engine.stale_roots.looks_left)
        ):
            return False
        self._engine.positions.is_mixed = True
        return bool(self._native.send(op, ids, value.numpy()))

    # ---- recv --------------------------------------------------------------------------------

    def recv(
        self,
        min_envs: Any,
        max_envs: Any,
        env_ids: Any,
        *,
        with_root: bool,
    ) -> TensorDict | None:
        """Return a batch as `Exchange.recv` does; None if nothing was taken."""
        if not self._is_plain() or self._engine.pool.must_look():
            return None
        count = self._wait_for(min_envs, max_envs, env_ids)
        # A loss may have come during the wait.
        if not count or not self._is_plain():
            return None
        return self._hand_out(count, with_root=with_root)

    def _wait_for(self, min_envs: Any, max_envs: Any, env_ids: Any) -> int:
        """Wait; return how many envs to take, or 0 if the request or its outcome is not plain."""
        ids = None
        if env_ids is not None:
            ids = self._as_ids(env_ids)
            if ids is None:
                return 0
        if min_envs is None and max_envs is None:
            return self._native.wait(ids, -1)
        if min_envs.__class__ is not int or min_envs < 1:
            return 0
        if max_envs is None:
            max_envs = min_envs
        if max_envs.__class__ is not int or max_envs < min_envs:
            return 0
        return min(self._native.wait(ids, min_envs), max_envs)

    def _hand_out(self, count: int, *, with_root: bool) -> TensorDict | None:
        engine = self._engine
        batch = self._batch
        lead = (count,)
        memory, leaves = self._next_memory(count).take()
        before = None
        before_leaves: Leaves = []
        if with_root:
            before, before_leaves = self._before_memory(count).take()
        env_ids = np.empty(count, np.int64)
        num_reset = self._native.take(
            count,
            memory,
            before,
            env_ids,
        )
        # The caller looks again, in Python: nothing was taken.
        if num_reset < 0:
            return None
        if engine.side.infos.has_rows:
            engine.side.infos.take({}, env_ids)
        # C has written the ids behind the last leaf of `next`.
        ids = leaves.pop()
        section = "before" if with_root else "nothing"
        td = batch.shell(section, lead).build(before_leaves)
        source = td._tensordict  # noqa: SLF001
        source["next"] = batch.shell("next", lead).build(leaves)
        source[ENV_IDS] = ids
        engine.received = Received(
            ids,
            env_ids,
            # After a reset, roots are elsewhere.
            None if num_reset else leaves,
            num_writes(leaves),
            engine.pool.words.number[0],
            engine.pool.num_losses,
        )
        return td
