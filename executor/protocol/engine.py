"""The engine of an executor: which commands the envs accept now, and how their answers are handled.

It combines a pool (commands and waiting) with positions (the envs' latest rows) and enforces the protocol: a command is
sent only if it is legal for all its envs, and after an interrupt, a fault or a loss every env is in a known state.
`BatchedEnv`, rollouts and the exchange are built on it.
"""

import contextlib
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from envherd.executor.batches.actions import ActionSampler, GroupIntake, PlainIntake
from envherd.executor.batches.arguments import wrong_rows
from envherd.executor.batches.hand_out import Draft, StepBatches, WithRoot
from envherd.executor.batches.memory import Leaves, make_loans
from envherd.executor.batches.transfer import Mover
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.base import Pool
from envherd.executor.processes.memory_log import MemoryLog
from envherd.executor.protocol.call_guard import CallGuard, StaleRoots
from envherd.executor.protocol.env_batches import EnvBatches
from envherd.executor.protocol.env_states import NEXT, EnvStates, Event, State
from envherd.executor.protocol.flight import NO_EXTRAS, Flight, Flights
from envherd.executor.protocol.info_reader import InfoReader, SideData
from envherd.executor.protocol.plain import what_is_plain
from envherd.executor.protocol.positions import Positions, some_or_none
from envherd.executor.sending.blueprint import Blueprint
from envherd.shm.interrupts import uninterrupted
from envherd.shm.specs import EnvSpec
from envherd.workers import messages
from envherd.workers.errors import EnvherdError
from envherd.workers.protocol import Op
from envherd.workers.seeding import as_root_seed

# ---- calls -------------------------------------------------------------------------------------
# The part of an engine that does not depend on where rows are: refusals, seeds, and the arguments of resets.


class Received(NamedTuple):
    """The batch that the latest `recv` returned.

    Attributes:
        ids: its `env_ids`, which the caller may have changed since.
        env_ids: the same, unchanged.
        leaves: of its `next`; None if they are not the envs' present roots.
        num_writes: torch's number of writes to these leaves when it was received.
        number, num_losses: those of the latest command and of losses; if one has changed, `leaves` are outdated.
    """

    ids: torch.Tensor
    env_ids: np.ndarray
    leaves: Leaves | None
    num_writes: float
    number: int
    num_losses: int

    def is_of(self, env_ids: Any) -> bool:
        """Return whether an object is `ids`, with the values that they had."""
        return (
            env_ids is self.ids and self.ids.numpy().tobytes() == self.env_ids.tobytes()
        )


class Rolling:
    """A context that sets `engine.is_rolling` (0.3 us; a generator-based one takes 1)."""

    def __init__(self, engine: "Calls") -> None:
        self._engine = engine

    def __enter__(self) -> None:
        self._engine.is_rolling = True

    def __exit__(self, *_: object) -> None:
        self._engine.is_rolling = False


class Calls:
    """What calls of every engine share: refusals, seeds and arguments of resets; the base of engines.

    Attributes:
        pool: of the executor.
        batches, positions: the envs' rows.
        states: the state of every env.
        known: keys of the envs' leaves, without `next`.
        is_rolling: a rollout is in progress; its policy and callback may send requests to envs, but not step them.
        rolling: the context for these, which sets `is_rolling`.
        is_dirty: a call was broken off.
        is_asking: a facade has asked the envs, and will take their answers in another call.
        received: the batch that was received last, while it holds its envs' present roots; else None.
        ready_at: monotonic seconds.
        memory: samples of the workers' memory.
    """

    batches: Any
    positions: Any
    states: EnvStates

    def __init__(self, pool: Pool, options: ExecutorOptions) -> None:
        self.pool = pool
        self.options = options
        self.specs: tuple[EnvSpec, ...] = tuple(pool.specs)
        self.num_envs = pool.num_envs
        self.known = {leaf.key for spec in self.specs for leaf in spec.leaves()}
        self.all_ids = np.arange(self.num_envs)
        self.memory = MemoryLog()
        self.is_rolling = self.is_dirty = self.is_asking = False
        self.received: Received | None = None
        self.rolling = Rolling(self)
        self.ready_at = time.monotonic()

    @property
    def batch_size(self) -> torch.Size:
        """`[N]`, or `[N, *B]` if every env is itself a batch of shape B."""
        return torch.Size((self.num_envs, *self.specs[0].batch_shape))

    # ---- refusals ----------------------------------------------------------------------------

    def refuse_under_way(self, env_ids: np.ndarray) -> None:
        """Raise `Busy` if any of the envs has a command whose answer was not taken yet."""
        if not self.states.are_running():
            self.states.check(Event.RESET, env_ids)

    # ---- seeds and arguments -----------------------------------------------------------------

    def extras_of(
        self,
        env_ids: np.ndarray,
        seeds: Sequence[int | None] | None,
        per_env: Sequence[dict[str, Any]] | None,
        common: dict[str, Any],
    ) -> dict[int, messages.Prepare]:
        """Return the messages to send ahead of the envs' resets, by env id: seeds and keyword arguments.

        Raises:
            ValueError, TypeError: not one item for each env, or an item is no seed or no dict.
        """
        if seeds is None and per_env is None and not common:
            return {}
        # Before any message is made: a refused reset sends none.
        for given, name in ((seeds, "seed"), (per_env, "list_of_kwargs")):
            if given is not None and len(given) != self.num_envs:
                raise ValueError(
                    f"reset failed: expected {self.num_envs} items in {name}, got {len(given)}."
                )
        extras = {}
        for env_id in env_ids.tolist():
            own = {} if per_env is None else per_env[env_id]
            if not isinstance(own, Mapping):
                raise TypeError(
                    f"reset failed: expected a dict in list_of_kwargs, got {own!r} (env {env_id})."
                )
            seed = None if seeds is None else _as_seed(seeds[env_id], env_id)
            # An env's own argument takes the place of a common one.
            options = {**common, **own} or None
            extras[env_id] = messages.Prepare(
                env_id=env_id,
                seed=seed,
                has_seed=seeds is not None,
                options=options,
            )
        return extras

    def use_seed(self, seed: int | None) -> None:
        """Seed the generator of random actions."""
        self.seed = as_root_seed(seed, "set_seed")
        self.sampler = ActionSampler(self.specs, self.seed, self.options.first_env_id)

    def set_seed(self, seed: int | None, episodes: Sequence[int] | None = None) -> None:
        """Use a new root seed everywhere; the next resets begin these episodes, or episode 0 of all envs."""
        self.refuse_under_way(self.all_ids)
        self.use_seed(seed)
        self.pool.seed(self.seed, episodes)

    def give_up(self, env_ids: np.ndarray) -> None:
        """Note that envs, int64 `[k]`, must be reset, unless `restore` follows; their roots show it."""
        with uninterrupted():  # or rows and states would disagree
            self.positions.mark_lost(env_ids)
            self.states.move(env_ids, Event.IS_BROKEN_OFF)
        self.received = None

    def restore(
        self,
        env_ids: np.ndarray,
        roots: Sequence[Mapping[str, Any]] | None,
        ended: np.ndarray | None,
    ) -> None:
        """Note that envs have been restored.

        Args:
            env_ids: int64 `[k]`.
            roots: their present roots; None if these are unknown, and all envs count as running.
            ended: bool `[k]`, envs that must be reset.
        """
        with uninterrupted():
            if roots is None or ended is None:
                # The observations from before stay: only the flags are known.
                self.positions.mark_running()
                self.states.move(env_ids, Event.IS_ALLOWED)
            else:
                self.batches.put_roots(env_ids, roots)
                self.states.restore(env_ids, ended)


def _as_seed(given: Any, env_id: int) -> int | None:
    if given is None:
        return None
    if not isinstance(given, bool):
        with contextlib.suppress(TypeError):
            return operator.index(given)
    raise ValueError(
        f"reset failed: expected an integer or None as seed, got {given!r} (env {env_id})."
    )


# ---- engine ------------------------------------------------------------------------------------


class Engine(Calls):
    """What an executor does with its pool: legal commands, and known states after every fault.

    Attributes:
        guard: held during every call.
        positions: of every env.
        side: the envs' values outside the slab.
        batches: makes batches of the rows.
        flights: all commands.
        write_inputs: `(batch, env_ids=None)`: checks and writes its actions, for all envs or for some. On an error
            nothing is written.
        intakes: check and write the inputs of each group of equal envs.
        stale_roots: looks at the batches that are passed.
        plain: which calls are made in C.
        side_inputs: env id -> the inputs of its latest step that did not go through the slab, one per side leaf.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        seed: int,
        device: torch.device | None,
        copy: bool,
        options: ExecutorOptions,
    ) -> None:
        super().__init__(pool, options)
        self.device = device
        mover = None
        if device is not None and device.type != "cpu":
            mover = Mover(pool.slab.buffer, device, pool.plan.num_frames)
        infos = InfoReader(options.info_policy, pool.slab, pool.schemas)
        self.side = SideData(self.specs, infos)
        loans = None
        if copy and mover is None and not options.poison:
            loans = make_loans(pool.slab, pool.lendable)
        self.positions = Positions(
            pool.slab,
            self.side,
            options,
            mover=mover,
            loans=loans,
        )
        self.batches = EnvBatches(
            self.positions,
            self.side,
            device,
            mover=mover,
            is_copy=copy,
        )
        self.intakes = [
            self._make_intake(group) for group in range(len(pool.slab.groups))
        ]
        self.write_inputs: Callable[..., None] = self._write_unlike_inputs
        # One group: rows are ids.
        if len(self.intakes) == 1 and not self.intakes[0].side_leaves:
            self.write_inputs = self.intakes[0].put
        # The fast path for the actions of a step of all envs, if they are one leaf of one group.
        self.plain_intake: PlainIntake | None = None
        if len(self.intakes) == 1:
            self.plain_intake = self.intakes[0].plain
        self.flights = Flights(
            pool,
            self.positions,
            self.side,
            options,
        )
        self.states = self.flights.states
        if loans is not None:
            loans.is_written = self.flights.is_written
        # They need a reset, and their roots show it.
        self.positions.mark_lost(self.all_ids)
        self.guard = CallGuard(self)
        self.side_inputs: dict[int, list[Any]] = {}
        self._being_rebuilt: list[int] = []
        self.use_seed(seed)
        self.stale_roots = StaleRoots.of(self.specs)
        self.plain = what_is_plain(
            pool,
            options,
            device,
            self.plain_intake,
        )
        pool.show_path(str(self.plain))
        if not pool.why_python and len(self.intakes) == 1:
            self.flights.native = pool.compile(self.facts())
            self.batches.groups[0].native = self.flights.native

    def facts(self) -> dict[str, Any]:
        """Return the arguments for C, as `executor/native/exchange.c` names them."""
        batch = self.batches.groups[0]
        step_columns, columns, in_root = self.positions.table
        facts = {
            "states": self.states.values,
            "ops": self.states.ops,
            "at": self.states.columns,
            "step_columns": step_columns,
            "columns": columns,
            "in_root": in_root,
            "ended": self.flights.ended,
            "num_columns": self.positions.num_frames,
            "num_ring": self.positions.num_ring,
            "next": batch.next_arrays,
            "root": batch.root_arrays,
            "root_in_next": batch.root_in_next,
            "inputs": self.intakes[0].targets,
            "done": batch.next_keys.index(("done",)),
            "root_done": batch.root_keys.index(("done",)),
            "blank": len(batch.next_arrays)
            - len(batch.spec.reward)
            - len(batch.spec.done),
            "action": None,
            "check": 0,
            "limit": 0,
            "follows": NEXT,
            "answered": int(Event.ANSWERED),
            "ends": int(Event.ENDS),
        }
        plain = self.plain_intake
        if plain is not None and plain.legal is not None and not self.plain.send:
            facts |= {
                "action": plain.target,
                "check": int(plain.legal),
                "limit": plain.limit,
            }
        return facts

    def _make_intake(self, index: int) -> GroupIntake:
        group = self.pool.slab.groups[index]
        present = None
        if group.spec.state:
            present = partial(self.batches.present, index)
        return GroupIntake(group, self.options.check_actions, present)

    @property
    def is_in_flight(self) -> bool:
        """Whether a flight of the current call is open, or a rebuild is not complete."""
        return self.flights.current is not None or bool(self._being_rebuilt)

    # ---- inputs ------------------------------------------------------------------------------

    def _write_unlike_inputs(
        self,
        td: TensorDictBase,
        env_ids: np.ndarray | None = None,
    ) -> None:
        """As `write_inputs`, for envs of several kinds, or with inputs that do not go through the slab."""
        if env_ids is None:
            env_ids = self.all_ids
        # All are checked before the first is written: a refused batch changes nothing.
        checked = []
        for group, own, ids in self.positions.places.by_group(td, env_ids):
            intake = self.intakes[group]
            rows = self.positions.places.row_of[ids]
            checked.append(
                (intake, ids, rows, intake.read(own, rows), intake.read_side(own, rows))
            )
        for intake, ids, rows, values, side in checked:
            intake.write(values, rows)
            # Empty without such inputs.
            for env_id, own_side in zip(ids.tolist(), side, strict=bool(side)):
                self.side_inputs[env_id] = own_side
                self.pool.prepare(messages.Prepare(env_id=env_id, side=own_side))

    # ---- step --------------------------------------------------------------------------------

    def step_all(
        self,
        td: TensorDictBase,
        op: Op,
        cut: np.ndarray | None = None,
    ) -> WithRoot:
        """Step all envs; return the `next` batch, and the root after it if the op is STEP_RESET.

        Args:
            td: batch `[N]` with the inputs.
            op: STEP or STEP_RESET.
            cut: int64 `[j]`, as of `flight.Flight`.
        """
        batch_size = td.batch_size
        if not batch_size or batch_size[0] != self.num_envs:
            raise wrong_rows("step", self.num_envs, td)
        self.guard.refuse_rolling()
        flight = self.flights.begin(
            op,
            cut=cut,
            write_inputs=partial(self.write_inputs, td),
        )
        # Batches are made while the workers step; only the rows are missing then.
        draft = None
        if not self.plain.rows:
            draft = self.batches.steps.draft[op](flight.at)
        return self.land_step(flight, draft)

    def land_step(
        self,
        flight: Flight,
        draft: Draft | None,
        steps: StepBatches | None = None,
    ) -> WithRoot:
        """Land a step of all envs, with batches if they were drafted; return the same as `step_all`.

        Args:
            flight: of the step.
            draft: of its batches, or None.
            steps: what drafted them; None for the engine's own.
        """
        batches = self.batches
        try:
            self.flights.land(flight)
        except EnvherdError as error:
            # Else the rows of the other envs are not complete.
            if flight.has_landed:
                error.partial = batches.next_td(batches.next_leaves(flight.at))
            raise
        if draft is not None:
            return (steps or batches.steps).finish(draft, flight.at, flight.ended)
        return batches.after_step(
            flight.at,
            flight.ended,
            has_root=flight.op == Op.STEP_RESET,
        )

    def recover(self) -> None:
        """After a call was broken off anywhere: wait for pending commands, and drop their answers."""
        self.is_rolling = False
        self.received = None
        # Before the flights, which mark roots where the positions are: not in a storage that a rollout gives back.
        self.positions.move_back()
        self.pool.send_calls(self._being_rebuilt)
        # After an interrupt before this line they are sent once more.
        self._being_rebuilt = []
        self.flights.recover()
        self.is_dirty = False

    def drop_parked(self) -> None:
        """Drop commands that no call will land, because an interrupt has ended the call that began them.

        For facades, which have one command at a time. Its envs need a reset.
        """
        env_ids = np.flatnonzero(self.states.under_way)
        if len(env_ids):
            # Not parked, so `recover` breaks it off.
            self.flights.current = Flight(
                self.flights,
                Op.STEP,
                env_ids,
                None,
            )
            self.recover()

    def ask(self, what: str, env_ids: list[int], **question: Any) -> dict[int, Any]:
        """Send envs a request other than a step (`Pool.ask`). They answer after the steps that were sent before.

        A worker reads requests before commands, so this waits for those steps; `recv` still returns them.

        Raises:
            Busy: a facade's `call_async` is open.
        """
        self.guard.refuse_asking()
        sent = np.array(env_ids, np.int64)[self.states.under_way[env_ids]]
        try:
            if len(sent):
                self.flights.let_finish(sent)
            return self.pool.ask(what, env_ids=env_ids, **question)
        except EnvherdError:
            self.flights.losses.accept()
            raise

    # ---- reset -------------------------------------------------------------------------------

    def reset_envs(
        self,
        env_ids: np.ndarray,
        extras: Mapping[int, messages.Prepare] = NO_EXTRAS,
    ) -> None:
        """Reset some envs and wait for them.

        Args:
            env_ids: int64 `[k]`.
            extras: from `extras_of`.
        """
        self.flights.begin_resets(env_ids, extras=extras).land()

    def rebuild(self, env_ids: np.ndarray, others: Blueprint) -> None:
        """Replace envs, int64 `[k]`, by those of a blueprint that has the same ids, for `BatchedEnv.rebuild`.

        Until the pool's own blueprint has the new calls, the old ones count: after an error or an interrupt, the next
        call gives them to the workers again (`recover`).
        """
        self.guard.refuse_rolling()
        # Not only in `ask` below: a refused call changes nothing.
        self.guard.refuse_asking()
        self.pool.await_workers(env_ids)
        self.flights.end_episodes(env_ids)
        # Before the first message: from here an error or an interrupt makes `recover` send the old calls.
        self._being_rebuilt = env_ids.tolist()
        self.pool.send_calls(self._being_rebuilt, others)
        self.ask("rebuild", self._being_rebuilt)
        # Envs and calls change at once: in between, a successor would build the wrong env.
        with uninterrupted():
            self.pool.blueprint.calls.update(others.calls)
            self.pool.slab.words["episode"][env_ids] = 0
            self._being_rebuilt = []

    def allow_steps(self) -> None:
        """Allow steps of envs that were never reset, for facades that leave this check to the envs."""
        self.ask("allow_steps", self.all_ids.tolist())
        self.restore(self.all_ids, None, None)

    def take_over(self, roots: Sequence[Mapping[str, Any]], ended: np.ndarray) -> None:
        """Continue the batch of another executor, which was lost with its envs.

        A rollout without a reset then begins with an interrupted row for each env whose episode was lost.

        Args:
            roots: the last roots of all envs there.
            ended: bool `[N]`, envs whose episodes had ended.
        """
        self.restore(self.all_ids, roots, ended)
        self.states.move(self.all_ids, Event.IS_CUT)

    def reset_for_rollout(
        self,
        *,
        auto_reset: bool,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Reset all envs, or those that have ended.

        Returns:
            `(fresh, cut)`: bool `[N]` or `[N, *B]`, what was reset; int64 `[k]`, envs that were running until a loss
            during this call or elsewhere (`cut` of a flight, `take_over`), or None for none.
        """
        was_lost = self.states.values == State.CUT
        if auto_reset:
            self.write_reset_masks(None)
            self.reset_envs(self.all_ids)
            return np.ones(self.num_envs, bool), None
        needs_reset = self.states.needs_reset
        if not needs_reset.any():
            return needs_reset, None
        fresh = needs_reset & ~was_lost
        positions = self.positions
        # Only these can lose an episode in the resets below.
        running = []
        if positions.has_interrupted or was_lost.any():
            running = np.flatnonzero(~fresh).tolist()
        flags = {
            i: {
                leaf.key: positions.latest_root(i)[leaf.key].copy()
                for leaf in self.specs[i].done
            }
            for i in running
        }
        parts = self.batches.ended_parts(
            fresh,
            partial(self.batches.current, self.all_ids),
        )
        if fresh.any():
            self.write_reset_masks(parts)
            self.reset_envs(np.flatnonzero(fresh))
        cut = np.flatnonzero(self.states.needs_reset & ~fresh)
        # The interrupted row reports the loss, not the row before it.
        for env_id in cut.tolist():
            for key, flag in flags[env_id].items():
                positions.latest_root(env_id)[key][...] = flag
        return parts, some_or_none(cut)

    def write_reset_masks(self, mask: np.ndarray | None) -> None:
        """Write the reset masks of envs that are batches themselves: bool `[N, *B]`, None for all."""
        for group in self.pool.slab.groups:
            target = group.inputs.get(("reset_mask",))
            if target is None:
                continue
            target[...] = True
            if mask is not None:
                target &= mask[list(group.plan.env_ids)].reshape(target.shape)

    def counts(self) -> dict[str, Any]:
        """Return the part of `Statistics` that the pool does not know."""
        loans = self.positions.loans
        return {
            "interrupted": self.flights.losses.num_interrupted,
            "frames_lent": 0 if loans is None else loans.num_lent,
            "path": str(self.plain),
        }
