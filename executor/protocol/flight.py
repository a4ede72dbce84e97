"""Commands under way: begin, wait for and land them. Only this module reads a pool's reports besides rows.

A `Flight` is one command for some envs. `Flights.begin` gives it to the pool. `Flight.land` waits for it and then
handles the outcome: it records side values and infos, writes rows in place of lost answers, updates the envs' states
and positions, replaces lost workers, resets envs in the successors if the command would have reset them, and raises
envs' exceptions. Envs that were sent (`send`) land one by one: `Flights.wait_for` and `Flights.deliver`.

Guarantees:
- A refused command changes nothing. Its messages (seeds, options) are not used by a later command.
- After an exception at any line, `recover` leaves every env in a known state: it waits for pending commands and drops
  their answers, and the envs concerned need a reset. Envs that were sent, and are not being received, stay sent.
- An env counts as reset only if its present instance has answered a RESET, or a STEP_RESET that reset it.

Order, because a handler may raise between any two lines. The numbers are at the lines; `losses` has its own.
1. `current`, before any state or position changes: from here `recover` breaks the flight off.
2. States, then messages, then the command. An env that was given a command is under way, so `recover` waits for its
   answer and drops it; a message without a command is dropped by the next command (`Flag.PREPARED`). C does all of
   it in one call.
3. `current` of the flight outside, after the command: a parked flight that was not given would have no owner.
4. Positions, then `is_mixed`, then states, after the answers. Until its state moves, an env counts as under way, and
   `recover` marks its root as lost, wherever its position is by then. `is_mixed` keeps the rows of a column that the
   next step overwrites, so it stays True until no env needs that.
5. Side values between `Positions.hold` and `held = None`, around 4: an interrupt leaves the values and the rows of the
   same step, those before the flight.
6. `has_landed`, after 4 and 5; `current` of the flight outside, last: what the flight has raised or replaced by then is
   not done again.
7. Envs that were sent: their faults and lost answers are noted (`losses` 1, 4) before the reports are taken, and
   `_num_settled` is -1 in between, so that the next call looks again.
8. Envs that are received: 1 before their side values are taken (`open_delivery`), then 4, 5 and 6 (`deliver`).
9. IS_LOST, before the worker of envs that a step has reset is replaced: they would count as running in a process that
   is gone.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.base import Pool
from envherd.executor.pools.commands import Outcome
from envherd.executor.processes.error_messages import Frame, env_error, first_fault
from envherd.executor.protocol.call_guard import call_name
from envherd.executor.protocol.env_states import EnvStates, Event, State
from envherd.executor.protocol.info_reader import SideData
from envherd.executor.protocol.losses import NOBODY, Losses
from envherd.executor.protocol.positions import Positions, some_or_none
from envherd.executor.start.waiting import DeadlinePassed
from envherd.workers.errors import EnvherdError, InternalError, ResetNeeded
from envherd.workers.messages import Prepare
from envherd.workers.protocol import EACH, RESET, STEP, STEP_RESET, Flag, Op

#: `(env_ids [k], columns [k] of their steps, replace)`: calls `replace` and resets the envs.
Renew = Callable[[np.ndarray, np.ndarray, Callable[[], None]], None]

NO_EXTRAS: Mapping[int, Prepare] = {}


class Flight:
    """A command under way for some envs, which land together.

    Attributes:
        op: what the envs do, except those of `resets`.
        ids: int64 `[k]`.
        is_all: whether these are all envs.
        at: the column of the rows: int if all envs have the same, else int64 `[k]`.
        resets: int64 `[j]`, envs of `ids` that are reset instead; None for none.
        cut: int64 `[j]`, envs whose episodes an earlier loss had ended: their `next` is an interrupted row. None for
            none.
        extras: env id -> message to send ahead of its RESET.
        number: of the latest command before this one.
        outer: the flight during which it was begun; None for none.
        is_parked: whether it may stay under way between two calls, and is not being landed.
        has_landed: whether rows and states include its outcome.

    After landing:
        ended: int64 `[j]`, ascending: envs whose episodes ended with their step; None for none.
        was_reset: int64 `[j]`, envs that were reset; None for none.
        dead: int64 `[j]`, envs that raised or were lost.
    """

    is_parked = has_landed = False
    ended: np.ndarray | None = None
    was_reset: np.ndarray | None = None
    dead = NOBODY

    def __init__(  # noqa: PLR0913, PLR0917  # the parts of a command
        self,
        flights: "Flights",
        op: Op,
        ids: np.ndarray | None,
        at: Any,
        resets: np.ndarray | None = None,
        cut: np.ndarray | None = None,
        extras: Mapping[int, Prepare] = NO_EXTRAS,
    ) -> None:
        self._flights = flights
        self.op = op
        self.is_all = ids is None
        self.ids = flights.all_ids
        if ids is not None:
            self.ids = ids
        self.at = at
        self.resets = resets
        self.cut = cut
        # Kept: a successor's reset must have the same seeds and options.
        self.extras = extras
        self.number = flights.pool.words.number[0]
        self.outer = flights.current

    @property
    def fresh(self) -> np.ndarray:
        """The envs that it reset, bool `[N]`."""
        fresh = np.zeros(len(self._flights.all_ids), bool)
        if self.was_reset is not None:
            fresh[self.was_reset] = True
        return fresh

    def note_resets(self, resets: np.ndarray | None) -> None:
        """Set `was_reset` of a flight all of whose envs have answered, by its `ended` and its `resets`."""
        self.was_reset = resets
        if self.op == STEP_RESET and self.ended is not None:
            self.was_reset = (
                self.ended if resets is None else np.union1d(resets, self.ended)
            )

    def land(self, timeout_s: float | None = None) -> "Flight":
        """Wait for the answers and handle the outcome; see the module.

        Args:
            timeout_s: seconds; None uses the deadlines of the options, after which a worker is killed.

        Returns:
            Itself.

        Raises:
            TimeoutError: `timeout_s` has passed; the envs need a reset.
            EnvError, WorkerLost, WorkerTimeout: the envs concerned need a reset. The others' rows are complete, if
                `has_landed`; else the envs of this flight all need a reset.
            ResetNeeded: it was broken off after it began.
        """
        self._flights.land(self, timeout_s)
        return self


class Renewal(Protocol):
    """Replaces workers of which all envs are between episodes."""

    def before_resets(
        self,
        env_ids: np.ndarray,
        lose: Callable[[np.ndarray], None],
    ) -> None:
        """Replace workers all of whose envs are about to be reset.

        Args:
            env_ids: int64 `[k]`, which will be reset.
            lose: marks envs, int64 `[j]`, as in need of a reset, because an interrupt may come before it.
        """

    def after_steps(
        self,
        env_ids: np.ndarray,
        columns: np.ndarray,
        renew: Renew,
    ) -> None:
        """Replace workers all of whose envs were just reset by the steps that ended them.

        Args:
            env_ids: int64 `[k]`, which were reset.
            columns: int64 `[k]`, where their steps are.
            renew: makes envs in new instances begin their episodes again.
        """


class Flights:
    """All commands of one executor; see the module.

    Attributes:
        pool, positions, side, states: of the executor.
        current: the flight that the current call begins or lands; None between calls.
        losses: of workers, and exceptions of envs.
        renewal: replaces workers between episodes; None if nothing does.
        native: gives commands to all envs in C, and notes their rows; None if Python must. `begin` and `_note_rows` are
            its specification.
        ended: int64 `[N]`, where C writes which envs have ended.
    """

    native: Any = None

    def __init__(
        self,
        pool: Pool,
        positions: Positions,
        side: SideData,
        options: ExecutorOptions,
    ) -> None:
        self.pool = pool
        self.positions = positions
        self.side = side
        self._options = options
        self.all_ids = np.arange(pool.num_envs)
        self.states = EnvStates(pool.num_envs)
        self.current: Flight | None = None
        self.ended = np.empty(pool.num_envs, np.int64)
        self.renewal: Renewal | None = None
        self.losses = Losses(
            pool,
            positions,
            self.states,
            options,
        )
        # Number of the pool's losses handled while envs were sent.
        self._num_settled = 0

    # ---- begin -------------------------------------------------------------------------------

    def begin(
        self,
        op: Op,
        *,
        at: int | None = None,
        resets: np.ndarray | None = None,
        cut: np.ndarray | None = None,
        write_inputs: Callable[[], None] | None = None,
        is_parked: bool = False,
    ) -> Flight:
        """Give all envs a step.

        Args:
            op: STEP or STEP_RESET.
            at: the column of the rows; None for the next one of the ring.
            resets: int64 `[j]`, envs that are reset instead. Their `next` has reward 0 and no flag.
            cut: int64 `[j]`, as of `Flight`; None for those that are CUT. A STEP_RESET resets them, a STEP leaves them
                out.
            write_inputs: checks and writes the inputs; called after all other checks. None if they have been written.
            is_parked: the call may end before the flight lands.

        Raises:
            Busy, ResetNeeded, ActionError, WorkerLost, WorkerTimeout: refused; nothing was sent or changed. Inputs are
                checked after workers that are due were replaced.
        """
        # A loop of plain steps pays one comparison of bytes for all of these checks.
        if resets is not None or cut is not None or not self.states.are_running():
            if cut is None:
                cut = some_or_none(np.flatnonzero(self.states.values == State.CUT))
            for others in (resets, cut):
                if others is not None:
                    self.states.check(Op.RESET, others)
            self.states.check(op, self._all_but(resets, cut))
            if resets is not None and self.renewal is not None:
                self.renewal.before_resets(resets, self.losses.lose)
        self.pool.await_workers(self.all_ids)
        if write_inputs is not None:
            write_inputs()
        if at is None:
            at = self.positions.next_column()
        # By position: keywords would double the time of a constructor.
        return self._give(
            Flight(
                self,
                op,
                None,
                at,
                resets,
                cut,
            ),
            is_parked=is_parked,
        )

    def begin_resets(
        self,
        ids: np.ndarray,
        *,
        at: np.ndarray | None = None,
        extras: Mapping[int, Prepare] = NO_EXTRAS,
        is_parked: bool = False,
    ) -> Flight:
        """Give some envs a RESET. Reset masks must have been written.

        Args:
            ids: int64 `[k]`, all different.
            at: the columns of the roots, int64 `[k]`; None for `Positions.reset_columns`.
            extras: env id -> message to send ahead of its RESET.
            is_parked: the call may end before the flight lands.

        Raises:
            Busy, WorkerLost, WorkerTimeout: refused; nothing was sent or changed.
        """
        self.states.check(Op.RESET, ids)
        # Before the workers are waited for: it may replace some of them.
        if self.renewal is not None:
            self.renewal.before_resets(ids, self.losses.lose)
        self.pool.await_workers(ids)
        if at is None:
            at = self.positions.reset_columns(ids)
        return self._give(
            Flight(
                self,
                Op.RESET,
                ids,
                at,
                extras=extras,
            ),
            is_parked=is_parked,
        )

    def send(self, op: Op, ids: np.ndarray, write_inputs: Callable[[], None]) -> None:
        """Give some envs, int64 `[k]`, a step each, which `wait_for` and `deliver` land one by one."""
        self.states.check(op, ids)
        self.pool.await_workers(ids)
        write_inputs()
        columns = self.positions.next_columns(ids)
        self._give(
            Flight(
                self,
                op,
                ids,
                columns,
            ),
            is_parked=True,
            flags=Flag.EACH,
        )

    def _give(self, flight: Flight, *, is_parked: bool, flags: int = 0) -> Flight:
        """Give the envs of a flight their commands, with these flags; return the flight."""
        flight.is_parked = is_parked
        self.current = flight  # 1
        try:
            if (
                self.native is not None
                and flight.is_all
                and flight.cut is None
                and not self.pool.absent
            ):
                self.native.give(
                    flight.op,
                    flight.resets,
                    self.positions.where.in_c,
                    flight.at,
                    self.pool.serve,
                )
            else:
                self._depart(flight)  # 2
                self._submit(flight, flags)
        except EnvherdError:
            # Refused after the command was written: some workers may carry it out.
            is_given = self.pool.words.number[0] > flight.number
            self._close(flight, Event.IS_BROKEN_OFF if is_given else Event.IS_WITHDRAWN)
            raise
        if is_parked:  # 3
            self.current = flight.outer
        return flight

    def _all_but(self, *left_out: np.ndarray | None) -> np.ndarray:
        """Return all envs but some, int64 `[k]`, ascending (1 us; numpy's `setdiff1d` takes 20)."""
        is_in = np.ones(len(self.all_ids), bool)
        for env_ids in left_out:
            if env_ids is not None:
                is_in[env_ids] = False
        return self.all_ids[is_in]

    def _depart(self, flight: Flight) -> None:
        """Record the command of every env of a flight as under way."""
        if flight.resets is None and flight.cut is None:
            self.states.start(flight.ids, flight.op, flight.at)
            return
        cut = flight.cut
        root_at = flight.at + self.positions.where.root_ahead
        if flight.resets is not None:
            self.positions.blank_steps(flight.at, flight.resets)
        if cut is not None:
            for env_id in cut.tolist():
                self.positions.cut_off(env_id, flight.at)
            self.side.infos.lose(cut)
        self.states.start(self._all_but(flight.resets, cut), flight.op, flight.at)
        if flight.resets is not None:
            self.states.start(flight.resets, Op.RESET, root_at)
        if cut is not None and flight.op == Op.STEP_RESET:
            self.states.start(cut, Op.RESET, root_at)
        elif cut is not None:
            # No worker gets it, and its row is complete.
            self.states.ops[cut] = int(flight.op)
            self.states.columns[cut] = flight.at
            self.states.move(cut, Event.IS_LOST)

    def _submit(self, flight: Flight, flags: int) -> None:
        ids = flight.ids
        ops: Any = flight.op
        columns: Any = flight.at
        if flight.extras:
            for env_id in ids.tolist():
                if env_id in flight.extras:
                    self.pool.prepare(flight.extras[env_id])
            flags |= Flag.PREPARED
        if flight.cut is not None and flight.op != STEP_RESET:
            ids = np.setdiff1d(ids, flight.cut)
        if flight.cut is not None or flight.resets is not None:
            ops = self.states.ops[ids]
            columns = self.states.columns[ids]
        self.pool.submit(
            ids,
            ops,
            self.positions.where.target,
            columns,
            flags,
        )

    def adopt(self, op: Op, at: int, resets: np.ndarray | None) -> Flight:
        """Return the flight of a STEP or STEP_RESET of all envs that a plain step has given but cannot land."""
        flight = Flight(
            self,
            op,
            None,
            at,
            resets,
        )
        flight.outer = None
        self.current = flight
        return flight

    # ---- land --------------------------------------------------------------------------------

    def land(self, flight: Flight, timeout_s: float | None = None) -> None:
        """Wait for a flight and handle the outcome, for `Flight.land`."""
        if flight.is_parked:
            given = flight.ids
            if flight.cut is not None and flight.op == STEP:
                given = np.setdiff1d(given, flight.cut)
            # An interrupt of another call may have broken it off.
            if not self.states.under_way[given].all():
                raise ResetNeeded(
                    f"{call_name()} failed: its step or reset was interrupted. Reset the envs."
                )
            flight.outer = self.current
            # Parked until it has an owner: an interrupt in between leaves it to the next `land`.
            self.current = flight
            flight.is_parked = False
        self._wait(flight, timeout_s)
        if self.pool.outcome or self.renewal is not None:
            self._land_unusual(flight)
        else:
            self._note_usual(flight)
            self.current = flight.outer

    def _note_usual(self, flight: Flight) -> None:
        """Record the outcome of a flight for which the pool reports only rows."""
        if self.positions.has_interrupted:
            self._forget_interrupted(flight)
        self._note_news(flight.ids)
        self._note_rows(flight)
        flight.has_landed = True  # 6

    def _note_news(self, env_ids: np.ndarray, outcome: Outcome | None = None) -> None:
        """Record the side values and infos of envs that have answered. Nothing else does, for rows or deliveries.

        Args:
            env_ids: int64 `[k]`.
            outcome: their reports; None if the pool reports only rows.
        """
        if outcome is not None:
            self.positions.hold()
            self.side.note_values(outcome.side)
            self.side.infos.take(outcome.infos, env_ids)
        elif self.side.infos.has_rows and env_ids is self.all_ids:
            self.side.infos.take_all()
        elif self.side.infos.has_rows:
            self.side.infos.take({}, env_ids)

    def _wait(self, flight: Flight, timeout_s: float | None) -> None:
        ids = flight.ids
        limit_s = self._options.step_timeout_s
        # Unless a reset can be the reason for more time.
        more_for_resets_s: float | None = 0.0
        if timeout_s is not None:
            limit_s = timeout_s
        elif flight.op == RESET:
            limit_s = self._options.reset_timeout_s
        elif flight.op == STEP_RESET or flight.resets is not None:
            more_for_resets_s = self._options.reset_timeout_s
        try:
            answered = self.pool.wait_some(
                ids,
                len(ids),
                limit_s,
                more_for_resets_s,
                kill_late=timeout_s is None,
            )
        except EnvherdError:
            self._close(flight, Event.IS_BROKEN_OFF)
            raise
        if len(answered) == len(ids):
            return
        if self.pool.outcome.losses and self._options.on_worker_loss != "restart":
            # The flight stays open: the next call waits for the others.
            raise next(iter(self.pool.outcome.losses.values()))
        raise DeadlinePassed(
            f"{call_name()} failed: expected {len(ids)} envs within {timeout_s:g} s. Reset them."
        )

    def _close(self, flight: Flight, event: Event | None = None) -> None:
        """End a flight; move its envs' states by an event, unless they have been set."""
        if event is not None:
            if flight.cut is not None:
                self.states.move(flight.cut, Event.IS_LOST)
            self.states.move(flight.ids[self.states.under_way[flight.ids]], event)
        self.current = flight.outer

    def _note_rows(self, flight: Flight) -> None:
        """Update the positions and the states of the envs of a flight, which have answered.

        Some of them may be dead, or left out (`Flight.cut`).
        """
        positions = self.positions
        ids = flight.ids
        has_all = flight.op != RESET and flight.cut is None and not len(flight.dead)
        if self.native is not None and flight.is_all and has_all:
            num_ended = self.native.land(positions.where.in_c)
            positions.is_mixed = False  # 4
            # A copy: the next step overwrites it, and callers keep the flight.
            flight.ended = some_or_none(self.ended[:num_ended].copy())
            flight.note_resets(flight.resets)
            return
        ahead = positions.where.root_ahead
        ops = self.states.ops[ids]
        at = self.states.columns[ids]
        if flight.op == RESET:
            is_over = np.zeros(len(ids), bool)
        else:
            # Envs that are reset instead have a `next` as well.
            steps = at - ahead * (ops == RESET)
            is_over = positions.where.done_of("next", ids, steps)
            positions.stepped(ids, steps)  # 4
            positions.is_mixed = positions.is_mixed and not flight.is_all
            # No env has ended, as in most steps.
            if has_all and flight.resets is None and 1 not in is_over.tobytes():
                self.states.move(ids, Event.ANSWERED)
                return
        is_reset = ops == RESET
        is_alive = ~np.isin(ids, flight.dead)
        flight.ended = some_or_none(ids[is_over])
        is_fresh = (is_reset | is_over & (ops == STEP_RESET)) & is_alive
        flight.was_reset = some_or_none(ids[is_fresh])
        if flight.was_reset is not None:
            is_over[is_fresh] = positions.were_reset(
                flight.was_reset,
                (at + ahead * ~is_reset)[is_fresh],
            )
        # Envs that a STEP has left out are not under way.
        has_answered = is_alive & self.states.under_way[ids]
        self.states.move(ids[has_answered & is_over], Event.ENDS)
        self.states.move(ids[has_answered & ~is_over], Event.ANSWERED)

    def _land_unusual(self, flight: Flight) -> None:
        """Land a flight for which the pool reports more than rows, or after which workers may be replaced.

        An interrupt breaks off the whole flight: the caller gets none of its rows.
        """
        try:
            if self.pool.outcome:
                outcome, own = self._note_unusual(flight)
                raised = self._fault_to_raise(outcome.faults)
                faults = outcome.faults if raised is None else {}
                error = (
                    self.losses.replace(outcome.losses, own)
                    or self._make_good(flight, own, faults)
                    or raised
                )
                if error is not None:
                    raise error
            else:
                self._note_usual(flight)
            # Inside the `try`: a worker that cannot be replaced ends this flight.
            self._recycle(flight)
        except EnvherdError:
            self._close(flight)
            raise
        self._close(flight)

    def _note_unusual(self, flight: Flight) -> tuple[Outcome, np.ndarray]:
        """Record the outcome of a flight; return the pool's reports, and the flight's envs that were lost."""
        positions = self.positions
        outcome = self.pool.outcome.hand_out(flight.ids)
        lost = self.pool.blueprint.envs_of(outcome.losses)
        own = lost[np.isin(lost, flight.ids)]
        # An env may have answered before its worker died in another env's command.
        outcome.forget_rows(own)
        self.side.infos.lose(own)
        self._note_news(flight.ids, outcome)  # 5, until `held` below
        self._forget_interrupted(flight)
        failed = [i for i, fault in outcome.faults.items() if fault["phase"] == "step"]
        for env_id in [*own[self.states.ops[own] != RESET].tolist(), *failed]:
            positions.cut_off(env_id, int(self.states.columns[env_id]))
        flight.dead = np.union1d(own, [*outcome.faults]).astype(np.int64)
        self._note_rows(flight)
        self.states.move(own, Event.IS_LOST)
        self.states.move(np.array([*outcome.faults], np.int64), Event.FAILS)
        # A step has ended the episode, except for rows of an env that is a batch and has raised in the reset after it.
        positions.mark_lost(flight.dead)
        positions.held = None
        flight.has_landed = True
        return outcome, own

    def _forget_interrupted(self, flight: Flight) -> None:
        """Set the interrupted rows of a step before any loss in it: those of `cut`."""
        if self.positions.has_interrupted and flight.op != Op.RESET:
            self.positions.interrupted[flight.ids] = False
            if flight.cut is not None:
                self.losses.note_interrupted(flight.cut)

    def _make_good(
        self,
        flight: Flight,
        lost: np.ndarray,
        faults: Mapping[int, Frame],
    ) -> EnvherdError | None:
        """Mark the rows of failed envs as interrupted, and reset those that the flight would have reset.

        Args:
            flight: whose other envs have landed.
            lost: int64 `[k]`, envs of lost workers; they are reset in the successors.
            faults: of envs that have raised. One that has raised in its reset is built again.
        """
        broken = {
            i for i, fault in faults.items() if fault["phase"] == "reset"
        }.difference(lost.tolist())
        failed = np.union1d(lost, [*faults]).astype(np.int64)
        ops = self.states.ops[failed]
        self.losses.note_interrupted(
            failed[(ops != RESET) & ~np.isin(failed, [*broken])]
        )
        is_due = ops != STEP
        if not is_due.any():
            return None
        due = failed[is_due].tolist()
        # An env whose reset has raised may be in any state, so it is built again.
        self.pool.send_calls(broken)
        # The resets below replace all infos of these envs, but their steps' are still to be read.
        of_steps = self.side.infos.read("next")
        at = self.states.columns[failed] + self.positions.where.root_ahead * (
            ops != RESET
        )
        try:
            self.begin_resets(
                failed[is_due],
                at=at[is_due],
                extras=flight.extras,
            ).land()
            # These resets may lose envs that had answered. Then they are reset again: a reset returns no lost env.
            raised = np.setdiff1d(flight.dead, failed)
            while flight.op == RESET:
                is_lost = self.states.values[flight.ids] == State.NEEDS_RESET
                is_lost &= ~np.isin(flight.ids, raised)
                if not is_lost.any():
                    break
                self.begin_resets(
                    flight.ids[is_lost],
                    at=flight.at[is_lost],
                    extras=flight.extras,
                ).land()
        except EnvherdError as error:
            return error
        self.side.infos.put("next", of_steps, due)
        flight.was_reset = np.union1d(
            failed[is_due],
            flight.was_reset if flight.was_reset is not None else NOBODY,
        )
        return None

    def _recycle(self, flight: Flight) -> None:
        """Replace workers that are due and all of whose envs a step has just reset."""
        if self.renewal is not None and flight.ended is not None:
            alive = flight.ended[~np.isin(flight.ended, flight.dead)]
            alive = alive[self.states.ops[alive] == STEP_RESET]
            self.renewal.after_steps(alive, self.states.columns[alive], self._renew)

    def _renew(
        self,
        env_ids: np.ndarray,
        columns: np.ndarray,
        replace: Callable[[], None],
    ) -> None:
        """Reset envs, which steps at `columns` have reset, again in new instances, which `replace` begins to build."""
        self.states.move(env_ids, Event.IS_LOST)  # 9
        replace()
        self.begin_resets(env_ids, at=columns + self.positions.where.root_ahead).land()

    # ---- envs that were sent -----------------------------------------------------------------

    def wait_for(
        self,
        sent: np.ndarray,
        wanted: int,
        timeout_s: float | None,
    ) -> np.ndarray:
        """Wait until some of the sent envs have answered; return these, in the order in which they were sent.

        Args:
            sent: int64 `[k]`, under way.
            wanted: how many, at most `k`.
            timeout_s: seconds, after which fewer are returned; None for the deadlines of the options.

        Raises:
            EnvError, WorkerLost, WorkerTimeout: the envs concerned are no longer under way; the others still are.
        """
        pool = self.pool
        deadline = timeout_s
        if timeout_s is None:
            deadline = self._options.step_timeout_s
        end = None
        if deadline is not None:
            end = time.monotonic() + deadline
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            ready = pool.words.by_order(
                pool.wait_some(
                    sent,
                    wanted,
                    left,
                    self._options.reset_timeout_s,
                    kill_late=timeout_s is None,
                )
            )
            if (
                pool.outcome.losses
                or pool.outcome.faults
                or pool.num_losses != self._num_settled
            ):
                self._settle_sent()
                if timeout_s is None and deadline is not None:
                    # The resets that complete the answers have the same time.
                    end = time.monotonic() + deadline
                continue  # not with `ready`: such a reset may have raised by now
            if len(ready) >= wanted:
                return ready
            if end is None or time.monotonic() < end:
                continue
            if timeout_s is not None:
                return ready
            end = time.monotonic() + (deadline or 0.0)

    def let_finish(self, sent: np.ndarray) -> None:
        """Wait until sent envs, int64 `[k]`, have answered or their worker is lost; the answers remain for `recv`."""
        self.pool.wait_some(
            sent,
            len(sent),
            self._options.step_timeout_s,
            self._options.reset_timeout_s,
        )

    def end_episodes(self, env_ids: np.ndarray) -> None:
        """End the episodes of envs, int64 `[k]`, whose instances will be replaced, as a loss would.

        Those that were sent finish their steps first, and their answers count as lost.

        Raises:
            Busy: a parked flight, which lands its envs as one, has some of them.
        """
        sent = env_ids[self.states.under_way[env_ids]]
        self.states.check(
            Op.RESET,
            sent[self.pool.words.command[sent] & EACH == 0],
        )
        self.let_finish(sent)
        self.states.move(env_ids, Event.IS_CUT)
        self.pool.words.answers_lost[sent] = True  # 7
        self._num_settled = -1

    def _settle_sent(self) -> None:
        """Handle failures of sent envs: raise, or make a successor reset lost envs."""
        pool = self.pool
        num_losses = pool.num_losses
        faults = dict(pool.outcome.faults)
        faulty = np.array([*faults], np.int64)
        raised = self._fault_to_raise(faults)
        if raised is not None:
            self.losses.drop(faulty, Event.FAILS)  # 7
        else:
            pool.words.answers_lost[faulty] = True  # 7: from here on, `left` has them
        self._num_settled = -1  # 7
        reported = pool.outcome.hand_out(faulty)
        broken = set[int]()
        if raised is None:
            broken = {i for i, fault in faults.items() if fault["phase"] == "reset"}
            pool.outcome.keep(reported, broken)
        # 7: not only `losses`, which an interrupted call may have taken.
        answers_lost = self.states.under_way & pool.words.must_complete()
        workers = {int(w) for w in pool.worker_of[answers_lost]} & set(pool.lost)
        error = self.losses.replace(
            {**{w: pool.lost[w] for w in workers}, **reported.losses},
            NOBODY,
        )
        left = np.flatnonzero(self.states.under_way & pool.words.must_complete())
        # Also if a loss is raised: envs that were rebuilt meanwhile have lost their answers, too.
        if len(left):
            self.losses.cut_off_sent(left, broken)
        self._num_settled = num_losses
        error = error or raised
        if error is not None:
            raise error

    def is_written(self, column: int) -> bool:
        """Return whether workers may be writing to a column of the ring for a step of all envs."""
        flight = self.current
        if (
            column != self.positions.column
            or self.positions.where is not self.positions.ring
        ):
            return False
        while flight is not None and not (flight.is_all and not flight.has_landed):
            flight = flight.outer
        # Parked.
        return (
            flight is not None or column in (self.states.columns[self.states.under_way])
        )

    def has_reports(self) -> bool:
        """Return whether the pool reports more than rows, or a loss that was not handled for sent envs."""
        return bool(self.pool.outcome) or self.pool.num_losses != self._num_settled

    def open_delivery(self, env_ids: np.ndarray) -> None:
        """Begin to hand out sent envs that have answered, and record their side values and infos.

        `deliver` must follow; until then an interrupt breaks them off. `wait_for` has handled their faults and losses.
        """
        self.current = Flight(
            self,
            Op.STEP,
            env_ids,
            None,
        )  # 8
        reported = self.pool.outcome
        self._note_news(
            env_ids,
            reported.hand_out(env_ids) if reported.side or reported.infos else None,
        )

    def deliver(self, env_ids: np.ndarray) -> None:
        """Update the positions of sent envs, int64 `[k]`, that are handed out now, after `open_delivery`."""
        flight = self.current
        assert flight is not None
        if self.positions.has_interrupted:
            self.positions.interrupted[env_ids] = False
        self._note_rows(flight)
        self.positions.held = None
        try:
            self._recycle(flight)
        except EnvherdError:
            self._close(flight)
            raise
        self._close(flight)

    def _fault_to_raise(self, faults: Mapping[int, Frame]) -> EnvherdError | None:
        """Count and log envs' exceptions; return the error to raise, if they end more than these envs' episodes."""
        if not faults:
            return None
        is_interrupted = self.losses.may_interrupt(faults)
        frames = list(faults.values())
        if all(frame["type_name"] == InternalError.__name__ for frame in frames):
            return InternalError(frames[0]["message"], env_ids=tuple(sorted(faults)))
        worker_id = int(self.pool.worker_of[first_fault(frames)["env_id"]])
        error = env_error(
            frames,
            worker_id,
            self.pool.pid_of(worker_id),
            self.pool.gpu_of(worker_id),
            is_interrupted=is_interrupted,
        )
        if not is_interrupted:
            return error
        self.losses.log(error, len(faults))
        return None

    # ---- after an interrupt ------------------------------------------------------------------

    def recover(self) -> None:
        """After a call was broken off anywhere: wait for pending commands, and drop their answers."""
        flight = self.current
        while flight is not None:
            self._break_off(flight)
            flight = flight.outer
        pool = self.pool
        # The call may have been broken off between a command and its announcement.
        pool.wake_workers()
        # Those that were broken off, whose commands are still carried out. Envs that were sent stay so.
        idle = np.flatnonzero(~self.states.under_way)
        limits = [
            s
            for s in (self._options.step_timeout_s, self._options.reset_timeout_s)
            if s is not None
        ]
        pool.wait_some(
            idle,
            len(idle),
            max(limits, default=None),
            through_losses=True,
        )
        losses = pool.outcome.hand_out(idle).losses  # this empties the pool's own
        pool.outcome.losses.update(losses)
        self.losses.accept()
        # Also those whose worker was lost, if the interrupt came between `losses` 2's state and root.
        self.positions.mark_lost(
            np.flatnonzero(self.states.values == State.NEEDS_RESET)
        )
        self.current = None

    def _break_off(self, flight: Flight) -> None:
        """End a flight after an interrupt."""
        ids = flight.ids
        if not flight.is_parked:
            self.states.move(ids, Event.IS_BROKEN_OFF)
            return
        sent = ids[self.states.under_way[ids]]
        not_given = sent[~self.pool.was_given(sent, flight.number)]
        is_in_doubt = self.pool.words.number[0] > flight.number
        self.states.move(
            not_given,
            Event.IS_BROKEN_OFF if is_in_doubt else Event.IS_WITHDRAWN,
        )
