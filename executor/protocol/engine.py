"""The engine of an executor: what may be asked of the envs now, and what becomes of the answers.

It joins a pool (commands and waiting) with the rows (where every env is) and keeps the protocol:
nothing is sent unless all of it is legal, and whatever breaks a call off (an interrupt, a fault, a
loss) leaves every env in a known state. `BatchedEnv`, rollouts and the exchange all stand on it.
"""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDictBase

from envherd.executor.batches.actions import has_true
from envherd.executor.batches.fast_tensordict import set_leaf
from envherd.executor.batches.hand_out import add_side
from envherd.executor.batches.random_actions import ActionSampler
from envherd.executor.monitor.running import announce
from envherd.executor.monitor.statistics import Statistics, count
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.base import Pool
from envherd.executor.pools.error_messages import env_error, first_fault
from envherd.executor.protocol.call_guard import Turn
from envherd.executor.protocol.recycling import MemoryLog, Recycler
from envherd.executor.protocol.rows import Rows
from envherd.shm.specs import EnvSpec
from envherd.workers import messages
from envherd.workers.errors import Busy, EnvherdError, InternalError, ResetNeeded
from envherd.workers.protocol import RING, Flag, Op
from envherd.workers.seeding import draw_root_seed


class Engine:
    """See the module.

    Attributes:
        turn: entered for the length of every call.
        rows: where every env is.
        pending: bool `[N]`, envs that were sent and not received.
        is_dirty: a call was broken off; the next one begins with `recover`.
        in_flight: envs that are given a command, or whose answers are being noted; None between calls.
        is_rolling: a rollout is in progress; its policy and callback may ask the envs things, but not step them.
        ready_at: monotonic seconds.
        memory: what is known of the workers' growth.
        recycler: replaces workers between episodes, if the options ask for it and the pool does not do it itself.
        known: keys of the envs' leaves, without `next`.
        side_inputs: env id -> the inputs of its latest step that did not go through the slab, one per side leaf.
        end_sent: deals with envs that were sent, and lost while something else was waited for.
        settle_sends: after a call was broken off, finds out what was really sent.
    """

    def __init__(
        self, pool: Pool, *, seed: int, device: torch.device | None, copy: bool, options: ExecutorOptions
    ) -> None:
        self.pool = pool
        self.options = options
        self.device = device
        self.specs: tuple[EnvSpec, ...] = tuple(pool.specs)
        self.num_envs = pool.num_envs
        self.known = {leaf.key for spec in self.specs for leaf in spec.leaves()}
        self.all_ids = np.arange(self.num_envs)
        self.rows = Rows(pool.slab, options, device, is_copy=copy, lenders=pool.lenders, residences=pool.settle(device))
        self.pending = np.zeros(self.num_envs, bool)
        self.num_pending = self.num_errors = self.num_interrupted = 0
        self.is_dirty = self.is_rolling = False
        self.in_flight: np.ndarray | None = None
        self.settle_sends: Callable[[], None] = lambda: None
        self.end_sent: Callable[..., None] = _nobody_was_sent
        self.turn = Turn(self)
        self.has_infos = options.infos != "drop"
        self._prepared: dict[int, messages.Prepare] = {}
        self.side_inputs: dict[int, list[Any]] = {}
        self._intake = self.rows.intakes[0] if len(self.rows.intakes) == 1 else None
        self.ready_at = time.monotonic()
        #: Takes this executor off the list that `envherd top` reads.
        self.withdraw = self._announce()
        self.memory = MemoryLog()
        recyclable = pool.recyclable if options.recycles else None
        self.recycler = None if recyclable is None else Recycler(self, recyclable)
        self.use_seed(seed)

    @property
    def batch_size(self) -> torch.Size:
        """`[N]`, or `[N, *B]` if every env is itself a batch of shape B."""
        return torch.Size((self.num_envs, *self.specs[0].batch_shape))

    # ---- refusals ----------------------------------------------------------------------------

    def refuse_pending(self, env_ids: np.ndarray) -> None:
        """Raise `Busy` if any of the envs was sent and not received."""
        if self.num_pending and has_true(self.pending[env_ids]):
            busy = env_ids[self.pending[env_ids]].tolist()
            raise Busy(f"the call failed: envs {busy} still owe an answer. recv() them first.", env_ids=tuple(busy))

    def refuse_rolling(self) -> None:
        """Raise `Busy` inside a rollout."""
        if self.is_rolling:
            raise Busy("the call failed: a rollout is in progress. Its policy and callback cannot step or reset envs.")

    @contextlib.contextmanager
    def rolling(self) -> Iterator[None]:
        """Let the policy or callback of a rollout run, which must not step envs."""
        self.is_rolling = True
        try:
            yield
        finally:
            self.is_rolling = False

    def refuse_ended(self, env_ids: np.ndarray) -> None:
        """Raise `ResetNeeded` if any of the envs has ended or was never reset."""
        if self.rows.has_ended and has_true(self.rows.ended[env_ids]):
            ended = env_ids[self.rows.ended[env_ids]].tolist()
            raise ResetNeeded(
                f"step failed: expected running envs, got envs {ended} that have ended or were never reset. Reset them "
                f"with a '_reset' mask, or use step_and_maybe_reset. No env was stepped.",
                env_ids=tuple(ended),
            )

    # ---- inputs ------------------------------------------------------------------------------

    def write_inputs(self, td: TensorDictBase, env_ids: np.ndarray | None = None) -> None:
        """Check and write the actions of a batch (for all envs, or for some); all of it or nothing."""
        if self._intake is None:
            self._write_mixed_inputs(td, self.all_ids if env_ids is None else env_ids)
            return
        rows = None if env_ids is None else self.rows.rows_of(env_ids)
        if self._intake.take(td, rows):
            return
        values, side = self._intake.read(td, rows), self._intake.read_side(td, rows)
        self._intake.write(values, rows)
        if side:
            self._send_side_inputs(self.all_ids if env_ids is None else env_ids, side)

    def _write_mixed_inputs(self, td: TensorDictBase, env_ids: np.ndarray) -> None:
        checked = []
        for position, env_id in enumerate(env_ids.tolist()):
            intake = self.rows.intakes[self.rows.group_of[env_id]]
            rows, own = self.rows.row_of[[env_id]], td[position].unsqueeze(0)
            checked.append((intake, intake.read(own, rows), rows, intake.read_side(own, rows)))
        for env_id, (intake, values, rows, side) in zip(env_ids, checked, strict=True):
            intake.write(values, rows)
            if side:
                self._send_side_inputs([env_id], side)

    def _send_side_inputs(self, env_ids: Iterable[int], side: list[list[Any]]) -> None:
        for env_id, values in zip(map(int, env_ids), side, strict=True):
            self.side_inputs[env_id] = values
            self.pool.prepare(messages.Prepare(env_id=env_id, side=values))

    def add_inputs(self, td: TensorDictBase, env_ids: np.ndarray) -> None:
        """Add the inputs of the envs' latest steps to a batch."""
        rows = self.rows
        if self._intake is not None or len(groups := set(rows.group_of[env_ids].tolist())) == 1:
            intake = self._intake or rows.intakes[groups.pop()]
            for leaf, value in zip(intake.leaves, intake.current(rows.row_of[env_ids]), strict=True):
                set_leaf(td, leaf.key, torch.from_numpy(value))
            if intake.side_leaves:
                add_side(td, intake.side_keys, [self.side_inputs[i] for i in env_ids.tolist()])
            return
        for own, env_id in zip(td.unbind(0), env_ids.tolist(), strict=True):
            intake = rows.intakes[rows.group_of[env_id]]
            for leaf, value in zip(intake.leaves, intake.current(rows.row_of[[env_id]]), strict=True):
                own.set(leaf.key, torch.from_numpy(value)[0])
            for index, key in intake.side_keys:
                own.set(key, NonTensorData(self.side_inputs[env_id][index]))

    # ---- step --------------------------------------------------------------------------------

    def step_all(
        self, td: TensorDictBase, op: Op, cut: np.ndarray | None = None
    ) -> tuple[TensorDictBase, TensorDictBase | None]:
        """Step all envs; return the `next` batch, and the root after it if the op is STEP_RESET.

        Args:
            td: batch `[N]` with the inputs.
            op: STEP or STEP_RESET.
            cut: int `[k]`, envs whose episodes a loss has ended since their latest row. Their `next` is an interrupted
                row, and they are not stepped: a STEP_RESET resets them, a STEP leaves them ended. None for none.
        """
        batch_size = td.batch_size
        if not batch_size or batch_size[0] != self.num_envs:
            raise ValueError(f"step failed: expected a batch of {self.num_envs} envs, got batch size {batch_size}.")
        self.refuse_rolling()
        if self.num_pending:
            self.refuse_pending(self.all_ids)
        if self.rows.has_ended:
            self.refuse_ended(self.all_ids if cut is None else np.setdiff1d(self.all_ids, cut))
        self.pool.await_workers(self.all_ids)
        self.write_inputs(td)
        rows, has_root = self.rows, op == Op.STEP_RESET
        column = self.begin_step(op, cut)
        draft = rows.draft(column, has_root=has_root)
        ended = self.end_step(op, column, cut)
        return rows.finish(draft, column, ended, has_root=has_root)

    def begin_step(self, op: Op, cut: np.ndarray | None = None) -> int:
        """Make all envs take the step whose inputs are written; `end_step` must come next.

        Args:
            op: STEP or STEP_RESET.
            cut: see `step_all`.

        Returns:
            The ring column that the rows go to.
        """
        self.pool.await_workers(self.all_ids)
        column = self.rows.next_column()
        self.in_flight = self.all_ids
        try:
            for env_id in () if cut is None else cut.tolist():
                self.end_in_ring(env_id, column)
            self._submit_steps(op, RING, column, cut)
        except BaseException as error:
            self._break_off(self.all_ids, error)
            raise
        return column

    def end_step(self, op: Op, column: int, cut: np.ndarray | None = None) -> np.ndarray | None:
        """Wait for the step that was begun, and note where the envs are.

        Returns:
            The ids of the envs whose episodes ended (reset by now, if the op is STEP_RESET), or None.
        """
        rows = self.rows
        self._wait_for_steps(may_reset=op == Op.STEP_RESET)
        if self.pool.outcome:
            self._settle_steps(op, column)
        else:
            if rows.has_interrupted:
                rows.interrupted[:] = False
            if self.has_infos:
                rows.forget_infos()
        if cut is not None:
            self.note_interrupted(cut)
        ended = rows.stepped_all_and_reset(column) if op == Op.STEP_RESET else rows.stepped_all(column)
        self.in_flight = None
        if self.recycler is not None and ended is not None and op == Op.STEP_RESET:
            self._follow_up(self.recycler, ended, column)
        return ended

    def _follow_up(self, recycler: Recycler, ended: np.ndarray, column: int) -> None:
        """Do what is to be done between the episodes of envs that a step of all has ended."""
        try:
            recycler.after_steps(ended, np.full(len(ended), column))
        except EnvherdError as error:
            error.partial = self.rows.next_td(self.rows.next_leaves(column))
            raise

    def run_all(self, op: Op, target: int, column: int, cut: np.ndarray | None = None) -> None:
        """Make all envs step at a column of a target, and wait; for `cut`, see `step_all`.

        If the wait is broken off, the answers are lost.
        """
        self.pool.await_workers(self.all_ids)
        try:
            self._submit_steps(op, target, column, cut)
        except BaseException as error:
            self._break_off(self.all_ids, error)
            raise
        self._wait_for_steps(may_reset=op == Op.STEP_RESET)

    def _submit_steps(self, op: Op, target: int, column: int, cut: np.ndarray | None) -> None:
        """Give all envs a step command; for those in `cut`, a RESET with a STEP_RESET, and none with a STEP."""
        if cut is None or op == Op.STEP_RESET:
            self.pool.submit_all(op, target, column, cut)
            return
        env_ids = np.setdiff1d(self.all_ids, cut)
        self.pool.submit(env_ids, op, target, np.full(len(env_ids), column))

    def _wait_for_steps(self, *, may_reset: bool) -> None:
        """Wait for the steps of all envs."""
        options = self.options
        with self._may_break_off(self.all_ids):
            if not self.pool.wait_all(options.step_timeout_s, options.reset_timeout_s if may_reset else 0.0):
                raise self.loss_without_the_others()

    def loss_without_the_others(self) -> EnvherdError:
        """Return the loss to raise while other workers still owe answers; the next call waits for these first."""
        self.is_dirty = True
        return next(iter(self.pool.outcome.losses.values()))

    def _break_off(self, env_ids: np.ndarray, error: BaseException) -> None:
        self.rows.mark_ended(env_ids)
        if isinstance(error, EnvherdError):
            self.in_flight = None

    def recover(self) -> None:
        """After a call was broken off, anywhere: let what is under way finish, and forget its answers."""
        self.is_rolling = False
        self.rows.rolled_roots = None
        self.settle_sends()
        self.pool.nudge()  # it may have been broken off between a command and its announcement
        idle = np.flatnonzero(~self.pending)
        limits = [s for s in (self.options.step_timeout_s, self.options.reset_timeout_s) if s is not None]
        self.pool.wait_some(idle, len(idle), max(limits, default=None), through_losses=True)
        losses = self.pool.take_outcome(idle).losses
        self.pool.outcome.losses.update(losses)
        self._accept_losses()
        if self.in_flight is not None:
            self.rows.mark_ended(self.in_flight)
            self.in_flight = None
        self.is_dirty = False

    def ask(self, what: str, env_ids: list[int], **question: Any) -> dict[int, Any]:
        """Ask envs for something that is not a step; see `Pool.ask`."""
        try:
            return self.pool.ask(what, env_ids=env_ids, **question)
        except EnvherdError:
            self._accept_losses()
            raise

    def _accept_losses(self) -> None:
        """Note losses that came up outside of any step; those that are made good wait for the next one to tell."""
        if self.options.on_worker_loss != "restart":
            lost = self.envs_of(self.pool.outcome.losses)
            self.pool.outcome.losses.clear()
            self._lose(lost, is_replaced=False)

    def _settle_steps(self, op: Op, column: int) -> None:
        """Deal with what happened besides the rows of a step of all envs."""
        rows, outcome = self.rows, self.pool.take_outcome()
        rows.note_side(outcome.side)
        rows.note_infos(outcome.infos, self.all_ids.tolist())
        rows.interrupted[:] = False
        self.num_errors += len(outcome.faults)
        lost = self.envs_of(outcome.losses)
        failed = [i for i, fault in outcome.faults.items() if fault["phase"] == "step"]
        for env_id in [*lost.tolist(), *failed]:
            self.end_in_ring(env_id, column)
        error = loss = self.replace_lost(outcome.losses)
        was_reset = lost[:0]
        if loss is None and len(lost):
            self.note_interrupted(lost)
            if op == Op.STEP_RESET:
                try:
                    self.reset_at(lost, np.full(len(lost), column))
                    was_reset = lost
                except EnvherdError as reset_error:
                    error = reset_error
        error = error or self.fault_error(outcome.faults)
        if error is not None:
            dead = np.setdiff1d([*lost.tolist(), *outcome.faults], was_reset).astype(np.int64)
            self._note_partial(op, column, dead, was_reset)
            self.in_flight = None
            error.partial = rows.next_td(rows.next_leaves(column))
            raise error

    def _note_partial(self, op: Op, column: int, dead: np.ndarray, was_reset: np.ndarray) -> None:
        """Note where all envs are after a step that some of them did not survive.

        Args:
            op: of the step.
            column: of the ring.
            dead: int, envs that must be reset.
            was_reset: int, envs that were lost, and are reset by now.
        """
        ended = self.rows.stepped_all(column)
        self.rows.were_reset(was_reset, column)
        if op == Op.STEP_RESET and ended is not None:
            self.rows.were_reset(ended[~np.isin(ended, [*dead, *was_reset])], column)
        self.rows.mark_ended(dead)

    def envs_of(self, worker_ids: Any) -> np.ndarray:
        """Return the ids of all envs of some workers, ascending."""
        return np.array(sorted(i for w in worker_ids for i in self.pool.blueprint.blocks[w]), np.int64)

    def end_in_ring(self, env_id: int, column: int) -> None:
        """Write the row of an env whose answer was lost to a ring column."""
        self.rows.repeat_resident(env_id, column)
        source = {key: array.copy() for key, array in self.rows.latest_root(env_id).items()}
        self.rows.end_at(env_id, self.rows.ring_row(env_id, column), source)

    def note_interrupted(self, env_ids: np.ndarray) -> None:
        """Mark the envs' rows of this step as interrupted."""
        self.num_interrupted += int(np.count_nonzero(~self.rows.interrupted[env_ids]))
        self.rows.interrupted[env_ids] = True

    def replace_lost(self, losses: dict[int, EnvherdError]) -> EnvherdError | None:
        """Begin to replace lost workers; return the loss to raise if one may not be replaced."""
        for worker_id, loss in losses.items():
            if self.options.on_worker_loss != "restart":
                return loss
            lost = self.envs_of([worker_id])  # first: an interrupt must not leave them as running, or as answered
            self.rows.mark_ended(lost[~self.pending[lost]])
            self.pool.forfeited[lost[self.pending[lost]]] = True
            for group in self.rows.slab.groups:  # of an env that is a batch, all rows must be reset
                if ("reset_mask",) in group.inputs:
                    group.inputs["reset_mask",][np.isin(group.plan.env_ids, lost)] = True
            try:
                self.pool.begin_restart(worker_id)
            except EnvherdError as error:
                return error
        return None

    def fault_error(self, faults: dict[int, Any]) -> EnvherdError | None:
        """Return the error for what envs raised; None for nothing."""
        if not faults:
            return None
        frames = list(faults.values())
        worker_id = int(self.pool.worker_of[first_fault(frames)["env_id"]])
        if all(frame["type_name"] == InternalError.__name__ for frame in frames):
            return InternalError(frames[0]["message"], env_ids=tuple(sorted(faults)))
        return env_error(frames, worker_id, self.pool.pid_of(worker_id))

    # ---- reset -------------------------------------------------------------------------------

    def reset_envs(self, env_ids: np.ndarray) -> None:
        """Reset some envs and wait for them."""
        try:
            self.reset_at(env_ids, self.rows.reset_columns(env_ids))
        finally:
            self._prepared = {}

    def reset_at(self, env_ids: np.ndarray, columns: np.ndarray) -> None:
        """Reset some envs at ring columns; replaces lost workers and tries again, as often as the options allow."""
        rows, pool = self.rows, self.pool
        before, self.in_flight = self.in_flight, self.all_ids[~self.pending]
        faults: dict[int, Any] = {}
        try:
            if self.recycler is not None:
                self.recycler.before_resets(env_ids)
            while len(env_ids):
                self._replace_lost_of(env_ids)
                pool.await_workers(env_ids)
                with self._may_break_off(env_ids):
                    flags = self.send_prepared(env_ids)
                    pool.submit(env_ids, Op.RESET, RING, columns, flags)
                    if len(pool.wait_some(env_ids, len(env_ids), self.options.reset_timeout_s)) < len(env_ids):
                        raise self.loss_without_the_others()
                outcome = pool.take_outcome(env_ids)
                rows.note_side(outcome.side)
                rows.note_infos(outcome.infos, env_ids.tolist())
                self.num_errors += len(outcome.faults)
                faults |= outcome.faults
                lost = self.envs_of(outcome.losses)
                is_lost, is_faulty = np.isin(env_ids, lost), np.isin(env_ids, [*outcome.faults])
                was_reset = ~(is_lost | is_faulty)
                rows.were_reset(env_ids[was_reset], columns[was_reset])
                if outcome.faults:
                    rows.mark_ended([*outcome.faults])
                loss = self.replace_lost(outcome.losses)
                self._lose(lost, is_replaced=loss is None)
                if loss is not None:
                    raise loss
                env_ids, columns = env_ids[is_lost], columns[is_lost]
            error = self.fault_error(faults)
            if error is not None:
                raise error
        except EnvherdError:
            self.in_flight = before
            raise
        self.in_flight = before

    def _replace_lost_of(self, env_ids: np.ndarray) -> None:
        """Begin to replace workers that had been lost before, if they may be, now that their envs are to be reset."""
        lost = [w for w in self.pool.lost if np.isin(self.pool.blueprint.blocks[w], env_ids).any()]
        for worker_id in lost if self.options.on_worker_loss == "restart" else ():
            loss = self.replace_lost({worker_id: self.pool.lost[worker_id]})
            self._lose(self.envs_of([worker_id]), is_replaced=loss is None)
            if loss is not None:
                raise loss

    def _lose(self, lost: np.ndarray, *, is_replaced: bool) -> None:
        """Note that envs have lost their episodes, those that were sent too."""
        if len(lost):
            self.rows.mark_lost(lost[~self.pending[lost]])
            self.end_sent(lost[self.pending[lost]], is_replaced=is_replaced)

    def allow_steps(self) -> None:
        """Let all envs be stepped that were never reset, where a facade leaves that to the envs themselves."""
        self.ask("allow_steps", self.all_ids.tolist())
        self.rows.allow_steps()

    @contextlib.contextmanager
    def _may_break_off(self, env_ids: np.ndarray) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._break_off(env_ids, error)
            raise

    def reset_for_rollout(self, *, auto_reset: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """Reset all envs, or those that have ended.

        Returns:
            `(fresh, cut)`: bool `[N]`, which were reset; int `[k]`, which were running until a loss that came up
            meanwhile, and must be reset now (the first step does it: see `step_all`), or None for none.
        """
        self._prepared = {}  # of a reset that was refused
        if auto_reset:
            self.write_reset_masks(None)
            self.reset_envs(self.all_ids)
            return np.ones(self.num_envs, bool), None
        fresh = self.rows.ended.copy()
        if not fresh.any():
            return fresh, None
        rows = self.rows
        running = np.flatnonzero(~fresh).tolist() if rows.has_interrupted else []
        flags = {i: {leaf.key: rows.latest_root(i)[leaf.key].copy() for leaf in self.specs[i].done} for i in running}
        self.write_reset_masks(rows.ended_parts())
        self.reset_envs(np.flatnonzero(fresh))
        cut = np.flatnonzero(rows.ended & ~fresh)
        for env_id in cut.tolist():  # the interrupted row tells of the loss, not the row before it
            for key, flag in flags[env_id].items():
                rows.latest_root(env_id)[key][...] = flag
        return fresh, cut if len(cut) else None

    def prepare_resets(
        self,
        env_ids: np.ndarray,
        seeds: Sequence[int | None] | None,
        per_env: Sequence[dict[str, Any]] | None,
        common: dict[str, Any],
    ) -> None:
        """Keep seeds and keyword arguments for the resets that come; `reset_at` sends them ahead of each try.

        Raises:
            ValueError, TypeError: not one item for each env, or an item is no seed or no dict. Nothing is kept then.
        """
        self._prepared = {}
        if seeds is None and not per_env and not common:
            return
        for given, name in ((seeds, "seed"), (per_env, "list_of_kwargs")):
            if given is not None and len(given) != self.num_envs:
                raise ValueError(f"reset failed: expected {self.num_envs} items in {name}, got {len(given)}.")
        prepared = {}
        for env_id in env_ids.tolist():
            own = per_env[env_id] if per_env else {}
            if not isinstance(own, Mapping):
                raise TypeError(f"reset failed: expected a dict in list_of_kwargs, got {own!r} (env {env_id}).")
            seed = None if seeds is None else _as_seed(seeds[env_id], env_id)
            options = {**common, **own} or None
            prepared[env_id] = messages.Prepare(env_id=env_id, seed=seed, has_seed=seeds is not None, options=options)
        self._prepared = prepared

    def send_prepared(self, env_ids: np.ndarray) -> int:
        """Send what was kept for resets ahead of them; return the flags that their commands need."""
        if not self._prepared:
            return 0
        for env_id in env_ids.tolist():
            self.pool.prepare(self._prepared[env_id])
        return Flag.PREPARED

    def write_reset_masks(self, mask: np.ndarray | None) -> None:
        """Tell envs that are batches themselves which of their rows to reset: bool `[N, *B]`, None for all."""
        for group in self.rows.slab.groups:
            target = group.inputs.get(("reset_mask",))
            if target is not None:
                target[...] = True if mask is None else mask[list(group.plan.env_ids)].reshape(target.shape)

    def use_seed(self, seed: int | None) -> None:
        """Draw random actions from a root seed."""
        seed = draw_root_seed() if seed is None else int(seed)
        if seed < 0:
            raise ValueError(f"set_seed failed: expected a seed of at least 0, got {seed}.")
        self.seed = seed
        self.sampler = ActionSampler(self.specs, seed)

    def set_seed(self, seed: int | None) -> None:
        """Use a new root seed everywhere: the next reset of every env begins its episode 0."""
        self.refuse_pending(self.all_ids)
        self.use_seed(seed)
        self.pool.seed(self.seed)

    def _announce(self) -> Callable[[], Any]:
        segment = self.pool.segment
        if segment is None:
            return _nothing
        return announce(self, segment, self.pool.plan, self.pool.blueprint.blocks, self.specs[0].family)

    def statistics(self) -> Statistics:
        """Return what was done so far."""
        return count(self)


def _nothing() -> None:
    """Withdraw nothing: it was not announced."""


def _nobody_was_sent(lost: np.ndarray, *, is_replaced: bool) -> None:
    assert not len(lost), is_replaced


def _as_seed(given: Any, env_id: int) -> int | None:
    try:
        return None if given is None else operator.index(given)
    except TypeError:
        raise ValueError(f"reset failed: expected an integer or None as seed, got {given!r} (env {env_id}).") from None
