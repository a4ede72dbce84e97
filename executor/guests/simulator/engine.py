"""The engine of one torch simulator in the caller's process. It steps the simulator itself and needs no slab.

It has the methods of `Engine` that `BatchedEnv` uses, and refuses the same calls. There is one env, so a command is
complete when the call that gives it returns; only `send` leaves its outcome for `recv`.

Guarantees: those of `BatchedEnv`. After an exception of the simulator, or an interrupt at any line, the present root is
the last true observation, truncated, and the simulator must be reset as a whole.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envherd.executor.batches.actions import has_true
from envherd.executor.batches.arguments import wrong_rows
from envherd.executor.batches.fast_tensordict import set_leaf, set_next
from envherd.executor.batches.memory import Leaves
from envherd.executor.batches.transfer import as_array
from envherd.executor.guests.simulator.rows import Row, Rows, TensorIntake
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.serial_pool import SerialPool
from envherd.executor.processes.error_messages import env_error, log_notice
from envherd.executor.progress import counted
from envherd.executor.protocol.call_guard import CallGuard, StaleRoots
from envherd.executor.protocol.engine import Calls
from envherd.executor.protocol.env_states import EnvStates, Event, State
from envherd.executor.protocol.exchange import Exchange, set_ids
from envherd.executor.protocol.info_reader import InfoReader, SideData
from envherd.executor.protocol.plain import Plain
from envherd.executor.rollouts.policy_state import Run, run_policy
from envherd.shm.slab import Storage, bin_of, plan_storage
from envherd.workers.errors import EnvError, SpecError
from envherd.workers.infos import packer
from envherd.workers.messages import Prepare
from envherd.workers.protocol import Op, pack_phase
from envherd.workers.reply import Fault, LeftOut
from envherd.workers.seeding import episode_seed

#: `(row, rewards, whether rows are reset afterwards)`: takes the result of a step, before rows are reset.
Take = Callable[[Row, Leaves, bool], None]


class Answer(NamedTuple):
    """The outcome of a command.

    Attributes:
        row: after the command, or its part that was completed; None if no part was.
        error: what the simulator raised; or None.
        infos: message with the infos, if there are any.
        has_ended: whether rows must be reset before the next step.
        was_reset: whether rows were reset.
    """

    row: Row | None
    error: EnvError | None
    infos: Mapping[int, Mapping[str, Any]]
    has_ended: bool
    was_reset: bool


class Sent(NamedTuple):
    """A step between `send` and `recv`: its outcome, root, inputs, and the leaves of its `next`."""

    outcome: Answer
    root: TensorDictBase
    inputs: Leaves
    following: Leaves


class SimulatorEngine(Calls):
    """The engine of one torch simulator in the caller's process.

    Attributes:
        device: of the batches; None if that is the CPU and the caller has not set it.
        batches, positions: the rows; an `Engine` has separate objects for these.
        side: the infos.
        intake: checks actions.
        sent: the step that was sent; or None.
        stale_roots: looks at the batches that are passed.
    """

    plain = Plain.never("a torch simulator runs in this process")

    def __init__(
        self,
        pool: SerialPool,
        *,
        seed: int,
        device: torch.device | None,
        copy: bool,
        options: ExecutorOptions,
    ) -> None:
        super().__init__(pool, options)
        (self._adapter,) = pool.adapters.values()
        self._adapter.gives_tensors = True
        self._adapter.on_left_out = self._note_left_out
        own = self._adapter.device or torch.device("cpu")
        self.device = own if device is None and own.type != "cpu" else device
        self.batches = self.positions = self._rows = Rows(
            pool.specs[0],
            device or own,
            self.device,
            check_finite=options.check_finite,
            unchecked=self._adapter.unchecked,
            is_copy=copy,
        )
        self.states = EnvStates(1)
        self.side = SideData(self.specs, InfoReader(options.info_policy, None, {}))
        self.sent: Sent | None = None
        self.stale_roots = StaleRoots.of(self.specs)
        self.intake = TensorIntake(pool.slab.groups[0], options.check_actions)
        self._pack_info = packer(options.info_policy)
        # Memory views, whose items are read and written faster than those of arrays.
        self._words = {name: array.data for name, array in pool.slab.words.items()}
        self._left_out = set[str]()
        self._row: Row | None = None
        self._reset_mask: np.ndarray | None = None
        self.guard = CallGuard(self)
        self.use_seed(seed)

    @property
    def is_in_flight(self) -> bool:
        """Whether a command of the current call is under way."""
        return self.sent is None and bool(self.states.under_way[0])

    # ---- commands ----------------------------------------------------------------------------

    def step_all(
        self,
        td: TensorDictBase,
        op: Op,
    ) -> tuple[TensorDictBase, TensorDictBase | None]:
        """Step the simulator; return the `next` batch, and the root after it if the op is STEP_RESET."""
        if td.batch_size[:1] != (1,):
            raise wrong_rows("step", 1, td)
        self.guard.refuse_rolling()
        self.states.check(op, self.all_ids)
        following: Leaves = []
        outcome = self.carry_out(op, self.intake.tensors(td), self._taker(following))
        try:
            self.note_outcome(outcome, following)
        except EnvError as error:
            error.partial = self._rows.next_td(following or self._rows.repeated())
            raise
        root = None
        if op == Op.STEP_RESET:
            root = (
                self._rows.current(self.all_ids)
                if outcome.was_reset
                else self._rows.root_over(following)
            )
        return self._rows.next_td(following), root

    def _taker(self, following: Leaves) -> Take:
        """Return a function that puts the leaves of a step's `next` into a list."""
        rows = self._rows
        return lambda row, rewards, is_followed: following.extend(
            rows.next_of(row, rewards, is_copy=rows.is_copy or is_followed)
        )

    def carry_out(self, op: Op, inputs: Leaves, take: Take) -> Answer:
        """Step the simulator, and reset the rows that have ended if the op is STEP_RESET; `note_outcome` must follow.

        Args:
            op: STEP or STEP_RESET; it was checked.
            inputs: from `intake`.
            take: see `Take`.
        """
        return self._run(op, lambda: self._step(op, inputs, take))

    def _step(self, op: Op, inputs: Leaves, take: Take) -> None:
        spec = self.specs[0]
        observation, rewards, terminated, truncated = self._adapter.step(
            [value[0] for value in inputs]
        )
        self._words["env_steps"][0] += 1
        leaves = self._rows.fit("observation", spec.observation, observation)
        given = self._rows.fit("reward", spec.reward, rewards)
        row = Row(leaves, self._rows.flags(terminated, truncated))
        has_ended = has_true(row.flags[0])
        self._words["ends"][0] += has_ended
        self._note_info("next")
        take(row, given, has_ended and op == Op.STEP_RESET)
        self._row = row
        self._has_ended = has_ended
        if has_ended and op == Op.STEP_RESET:
            self._reset(row, row.flags[0], None)

    def _reset(
        self,
        before: Row,
        mask: np.ndarray | None,
        extra: Prepare | None,
    ) -> None:
        """Reset the rows in a mask, bool `[B, 1]`; None for all."""
        words = self._words
        self._phase = "reset"
        words["phase"][0] = pack_phase(Op.RESET, 0)
        inner = None if mask is None or mask.all() else mask
        episode = words["episode"][0]
        words["episode"][0] = episode + 1
        seed = None
        if self.options.episode_seeds:
            seed = episode_seed(self.seed, self.options.first_env_id, episode)
        if extra is not None and extra.has_seed:
            seed = extra.seed
            self._adapter.reseeded()
        observation = self._adapter.reset(
            seed,
            None if extra is None else extra.options,
            inner,
        )
        words["resets"][0] += 1
        self._note_info("root")
        leaves = self._rows.fit("observation", self.specs[0].observation, observation)
        flags = np.zeros_like(before.flags) if inner is None else before.flags & ~inner
        self._row = Row(leaves, flags)
        self._was_reset = True
        self._has_ended = has_true(flags[0])

    def _run(self, op: Op, command: Callable[[], None]) -> Answer:
        """Carry out a command, and count its time; an exception of the simulator becomes a part of the outcome."""
        words = self._words
        self.states.start(self.all_ids, op, 0)
        self._phase = "step"
        self._infos: dict[str, bytes | None] = {}
        self._row = None
        self._was_reset = False
        words["phase"][0] = pack_phase(op, 0)
        words["since_ns"][0] = began = time.perf_counter_ns()
        fault = None
        try:
            command()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also SystemExit: it concerns the simulator
            if isinstance(error, SpecError) and self._adapter.origin:
                error = SpecError(
                    f"{error} Built by {self._adapter.origin}."
                ).with_traceback(error.__traceback__)
            fault = Fault.from_exception(0, self._phase, error).to_plain()
        finally:
            words["phase"][0] = 0
            words["since_ns"][0] = ended = time.perf_counter_ns()
            words["busy_ns"][0] += ended - began
            if self._was_reset:
                words["reset_ns"][0] += ended - began
            else:
                words["step_bins"][bin_of(ended - began)] += 1
        # A step that has failed has no row to which infos belong.
        if fault is not None and self._phase == "step":
            self._infos = {}
        infos = {0: {"next": None, "root": None, **self._infos}} if self._infos else {}
        if fault is not None:
            failure: Any = env_error([fault], 0, os.getpid())
            return Answer(self._row, failure, infos, has_ended=True, was_reset=False)
        return Answer(self._row, None, infos, self._has_ended, self._was_reset)

    def note_outcome(
        self,
        outcome: Answer,
        given: Sequence[torch.Tensor] = (),
        *,
        is_shared: bool = True,
    ) -> None:
        """Note the outcome of a command.

        Args:
            outcome: from `carry_out`.
            given: see `Rows.note_given`; of a step.
            is_shared: likewise.

        Raises:
            EnvError: the simulator has raised it.
        """
        if self._pack_info is not None:
            self.side.infos.take(outcome.infos, self.all_ids)
        if outcome.row is not None:
            self._rows.present = outcome.row
            self._rows.note_given(
                () if outcome.was_reset else given,
                is_shared=is_shared,
            )
        if outcome.error is None:
            self.states.move(
                self.all_ids,
                Event.ENDS if outcome.has_ended else Event.ANSWERED,
            )
        else:
            self.states.move(self.all_ids, Event.FAILS)
            self._words["errors"][0] += 1
            self._lose()
            raise outcome.error

    def _lose(self) -> None:
        """Note that the simulator has lost its episodes."""
        self._rows.keep()
        self._rows.mark_lost(self.all_ids)

    def _note_info(self, section: str) -> None:
        if self._pack_info is not None:
            packed, left_out = self._pack_info(self._adapter.info)
            self._note_left_out(left_out)
            if packed is not None:
                self._infos[section] = packed

    def _note_left_out(self, entries: Mapping[str, str]) -> None:
        """Log info entries that are not passed on, as name -> reason, once each."""
        news = {
            name: why for name, why in entries.items() if name not in self._left_out
        }
        self._left_out.update(news)
        log_notice(LeftOut(0, news).to_plain())

    # ---- resets ------------------------------------------------------------------------------

    def write_reset_masks(self, mask: np.ndarray | None) -> None:
        """Keep the mask of the next reset, bool `[1, B]`; None for all rows."""
        self._reset_mask = (
            None if mask is None else mask.reshape(*self.specs[0].batch_shape, 1).copy()
        )

    def reset_envs(self, _: np.ndarray, extras: Mapping[int, Prepare]) -> None:
        """Reset the rows of the mask; all after an exception or an interrupt."""
        self.states.check(Op.RESET, self.all_ids)
        mask = None if self.states.values[0] == State.NEEDS_RESET else self._reset_mask
        self.note_outcome(
            self._run(
                Op.RESET,
                partial(self._reset, self._rows.present, mask, extras.get(0)),
            )
        )

    def reset_for_rollout(self, *, auto_reset: bool) -> np.ndarray:
        """Reset all rows, or those that have ended; return what was reset, bool `[1, *B]`, or `[1]` for all or none."""
        fresh = self.all_ids == 0
        mask = None
        if not auto_reset:
            if not self.states.needs_reset[0]:
                return ~fresh
            fresh = mask = self._rows.ended_parts()
        self.write_reset_masks(mask)
        self.reset_envs(self.all_ids, {})
        return fresh

    # ---- send and recv -----------------------------------------------------------------------

    def send(self, td: TensorDictBase, op: Op) -> None:
        """Step the simulator, and keep the outcome for `take_sent`."""
        self.states.check(op, self.all_ids)
        inputs = self.intake.tensors(td)
        following = Leaves()
        kept = [value.clone() for value in inputs]
        # Before the step, which replaces the current row.
        root = self._rows.current(self.all_ids)
        self.sent = Sent(
            self.carry_out(op, inputs, self._taker(following)),
            root,
            kept,
            following,
        )

    def take_sent(self, *, with_root: bool) -> TensorDictBase:
        """Return the transition that was sent.

        Raises:
            EnvError: the simulator has raised it.
        """
        assert self.sent is not None
        outcome, td, inputs, following = self.sent
        if outcome.error is not None:
            outcome = outcome._replace(row=None)
        next_td = self._rows.next_td(following) if following else None
        if not with_root:
            td = td.empty()
        else:
            for leaf, value in zip(self.intake.leaves, inputs, strict=True):
                set_leaf(td, leaf.key, value)
        try:
            self.note_outcome(outcome, following)
        finally:
            self.sent = None
        assert next_td is not None
        set_next(td, next_td)
        return td

    # ---- everything else ---------------------------------------------------------------------

    def recover(self) -> None:
        """After a call was broken off anywhere: a command of it counts as lost."""
        self.is_rolling = False
        if not self.states.under_way[0]:
            self.sent = None
        elif self.sent is None:
            self.states.move(self.all_ids, Event.IS_BROKEN_OFF)
            self._lose()
        self.is_dirty = False

    def ask(self, what: str, env_ids: list[int], **question: Any) -> dict[int, Any]:
        """Send the simulator a request other than a step; see `Pool.ask`. A step that was sent is made already."""
        return self.pool.ask(what, env_ids, **question)

    def rebuild(self, *_: Any) -> None:
        """Refuse to replace the simulator: its batches are views of its memory."""
        raise ValueError(
            "rebuild failed: expected no torch simulator in this process, got one. Make another executor."
        )

    def counts(self) -> dict[str, Any]:
        """Return the part of `Statistics` that the pool does not know."""
        return {"interrupted": 0, "path": str(self.plain)}


class SimulatorExchange(Exchange):
    """Sends to one simulator: a send steps it, so it is ready at once."""

    _engine: SimulatorEngine  # type: ignore[assignment]  # with the same methods, as far as they are used

    def send(self, td: TensorDictBase, env_ids: Any, op: Op) -> None:
        """Check a batch of actions and make the step."""
        ids = self.ids_of(td, env_ids)
        if len(ids):
            self._engine.send(td, op)
            self._engine.stale_roots.look(td, ids)

    def _wait_for(self, sent: np.ndarray, *_: Any) -> np.ndarray:
        return sent

    def _take(self, ready: np.ndarray, *, with_root: bool) -> TensorDictBase:
        return set_ids(self._engine.take_sent(with_root=with_root), ready)


# ---- rollout -----------------------------------------------------------------------------------
# Rollouts of one simulator: its tensors are copied once into `[1, T, ...]`, on their device.
#
# Guarantees and result are those of `rollout`.


class SimulatorRun(Run[SimulatorEngine]):
    """One rollout of a simulator in progress."""

    def collect(self, max_steps: int, *, auto_reset: bool) -> TensorDictBase:
        """Return `[1, t]`."""
        self._rows = self._engine.batches
        self._fresh = self._engine.reset_for_rollout(auto_reset=auto_reset)
        plan = plan_storage(self._engine.pool.plan, max_steps)
        place = self._rows.place
        tensors = {
            name: torch.from_numpy(array)
            if place.type == "cpu"
            else torch.from_numpy(array).to(place)
            for name, array in Storage(plan, np.empty(plan.nbytes, np.uint8))
            .columns[0]
            .items()
        }
        sections = {
            "root": self._rows.root_keys,
            "next": self._rows.next_keys,
            "input": [leaf.key for leaf in self._engine.intake.leaves],
        }
        self._leaves = {
            section: [tensors[section, *key] for key in keys]
            for section, keys in sections.items()
        }
        #: Section -> for each step its leaves, `[1, ...]` (VIEWS).
        self._at = {
            section: list(zip(*(leaf.unbind(1) for leaf in leaves), strict=True))
            for section, leaves in self._leaves.items()
        }
        num_steps = self._go(max_steps)
        if num_steps < max_steps:
            self._leaves = {
                name: [leaf[:, :num_steps].clone() for leaf in own]
                for name, own in self._leaves.items()
            }
        data: TensorDict = self._rows.shell("root", (1, num_steps)).build(
            self._leaves["root"]
        )
        data.set(
            "next",
            self._rows.shell("next", (1, num_steps)).build(self._leaves["next"]),
        )
        for leaf, value in zip(
            self._engine.intake.leaves,
            self._leaves["input"],
            strict=True,
        ):
            data.set(leaf.key, value)
        return self._finished(data)

    def _go(self, max_steps: int) -> int:
        """Step until the end; return how many steps were made."""
        for step in counted(max_steps, "rollout"):
            present = self._rows.present
            _put(self._at["root"][step], [*present.observation, *present.flags])
            acted = self._act(step)
            # Rows that end in the last step are reset by the next rollout, if there is one.
            op = Op.STEP if self._breaks or step == max_steps - 1 else Op.STEP_RESET
            outcome = self._engine.carry_out(
                op,
                self._inputs,
                partial(self._take, step),
            )
            try:
                self._engine.note_outcome(
                    outcome,
                    self._at["next"][step],
                    is_shared=False,
                )
            except EnvError:
                self._carried.renew(np.zeros(1, bool))
                raise
            if self._callback is not None:
                with self._engine.rolling:
                    next_td = self._rows.next_td(self._at["next"][step])
                    self._callback(self._with_next(acted, next_td))
            if self._breaks and outcome.has_ended:
                return step + 1
        return max_steps

    def _act(self, step: int) -> TensorDictBase:
        root = self._rows.shells["root"].build(self._at["root"][step])
        self._carried.hand_over(root, self._fresh)
        with self._engine.rolling:
            acted = run_policy(self._policy, root)
        self._inputs = self._engine.intake.tensors(acted)
        self._carried.keep(acted)
        _put(self._at["input"][step], self._inputs)
        self._keep_extras(acted, self._engine.known)
        return acted

    def _take(self, step: int, row: Row, rewards: Leaves, _: bool) -> None:  # noqa: FBT001  # as `Take` has it
        _put(self._at["next"][step], [*row.observation, *rewards, *row.flags])
        # These rows are reset, unless it is the last step.
        self._fresh = row.flags[0][None, ..., 0]


def _put(places: Sequence[torch.Tensor], values: Sequence[Any]) -> None:
    """Copy rows to their places in a rollout, `[1, ...]` each."""
    for place, value in zip(places, values, strict=True):
        if place.is_cpu:  # numpy takes half the time of torch
            np.copyto(
                as_array(place),
                value if isinstance(value, np.ndarray) else as_array(value.cpu()),
            )
        else:
            place.copy_(torch.as_tensor(value))
