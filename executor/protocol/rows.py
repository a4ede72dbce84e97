"""Where every env is: which column of the ring holds its latest row, whether it has ended, what to hand out.

An env's present root is the `next` of its latest step, or the `root` of its latest reset. Nothing is
copied to keep that true; two small arrays say which.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envherd.executor.batches.actions import GroupIntake, to_numpy
from envherd.executor.batches.device_rows import Residence, ResidentBatch
from envherd.executor.batches.hand_out import GroupBatch, Leaves, Members, add_side, poison, stack_groups
from envherd.executor.batches.tensor_actions import Lend, LendingIntake
from envherd.executor.batches.transfer import Mover
from envherd.executor.options import ActionCheck, ExecutorOptions
from envherd.executor.protocol.columns import Columns, Places, ring_columns
from envherd.shm.layout import Name
from envherd.shm.slab import Slab
from envherd.workers.infos import unpack

INTERRUPTED: Name = ("interrupted",)


class Draft(NamedTuple):
    """The batches of a step, made before their memory is filled."""

    buffer: np.ndarray | None
    leaves: Leaves
    next_td: TensorDict
    root_td: TensorDict | None


class Rows:
    """The rows of all envs; see the module.

    Attributes:
        interrupted: bool `[N, 1]`, rows of the last step that a loss has ended.
        is_plain: one group of equal envs on the cpu, with nothing besides the slab's leaves.
        root_shell, _next_shell, _root_shell_over_next: for all envs of that group.
        infos: "next" and "root" -> what envs said in the step and in the reset of their latest command.
        ring: the frames of the ring.
        where: the columns that hold the latest rows: the ring's, or those of a rollout in progress.
        is_moving: set while that changes.
        side_next, side_root: env id -> values of side-channel leaves, as of the latest row.
    """

    _reset_there: np.ndarray | None = None  # those that were reset at `_stepped_to`

    def __init__(
        self,
        slab: Slab,
        options: ExecutorOptions,
        device: torch.device | None,
        *,
        is_copy: bool,
        lenders: Mapping[int, Lend],
        residences: Mapping[int, Residence],
    ) -> None:
        self.slab = slab
        self.num_envs = slab.plan.num_envs
        self.num_frames = slab.plan.num_frames
        self.is_copy = is_copy
        self.has_interrupted = options.on_worker_loss == "restart"
        self.places = Places(slab.plan)
        self.group_of, self.row_of = self.places.group_of, self.places.row_of
        self.residences = residences
        is_on_device = bool(residences) or (device is not None and device.type != "cpu")
        self.mover = Mover(slab.buffer, device, self.num_frames) if is_on_device and device is not None else None
        self.batches = [
            ResidentBatch(group, self.num_frames, residences[index], has_interrupted=self.has_interrupted)
            if index in residences
            else GroupBatch(group, self.num_frames, device, has_interrupted=self.has_interrupted, mover=self.mover)
            for index, group in enumerate(slab.groups)
        ]
        self.intakes = [
            self._make_intake(index, options.check_actions, lenders.get(index)) for index in range(len(slab.groups))
        ]
        self.ring = self.where = ring_columns(slab, self.places)
        self.is_moving = False
        self._columns = np.zeros(self.num_envs, np.int64)
        self._following = (np.arange(self.num_frames) + 1) % self.num_frames
        self._in_root = np.ones(self.num_envs, bool)
        self._stepped_to: int | None = None  # a column that all envs were stepped to, which the two do not say yet
        self.interrupted = np.zeros((self.num_envs, 1), bool)
        # Of an env that was never reset: None for each leaf, as its numbers are 0.
        blank = {
            i: [None] * len(self.batches[group].spec.observation) for i, group in enumerate(self.group_of.tolist())
        }
        self.side_next: dict[int, list[Any]] = dict(blank)
        self.side_root: dict[int, list[Any]] = dict(blank)
        self.infos: dict[str, dict[int, dict[str, Any]]] = {"next": {}, "root": {}}
        self._info_policy = options.infos
        self.has_side = any(batch.side_keys for batch in self.batches)
        self._is_one_group = self.places.is_one_group
        self.is_plain = self._is_one_group and self.batches[0].is_on_cpu and not (self.has_side or self.has_interrupted)
        first = self.batches[0]
        self.root_shell = first.shell("root", (first.num_rows,))
        self._next_shell = first.shell("next", (first.num_rows,))
        self._root_shell_over_next = first.root_shell_over_next((first.num_rows,))
        self._column = 0
        self._is_mixed = False  # whether latest rows may be in several columns
        self._is_poisoning = options.poison

    def _make_intake(self, index: int, level: ActionCheck, lend: Lend | None) -> GroupIntake:
        group = self.slab.groups[index]
        present = functools.partial(self._present, index) if group.spec.state else None
        return GroupIntake(group, level, present) if lend is None else LendingIntake(group, level, lend, present)

    @property
    def columns(self) -> np.ndarray:
        """int64 `[N]`, which of the columns `where` has each env's latest row."""
        self._catch_up()
        return self._columns

    @property
    def in_root(self) -> np.ndarray:
        """Bool `[N]`, whether that row is a reset's root rather than a step's next."""
        self._catch_up()
        return self._in_root

    def _catch_up(self) -> None:
        if self._stepped_to is not None:
            self._columns[:] = self._stepped_to
            self._in_root[:] = False
            if self._reset_there is not None:
                self._in_root[self._reset_there] = True
                self._columns[self._reset_there] += self.where.root_ahead
            self._stepped_to = None

    # ---- columns -----------------------------------------------------------------------------

    def next_column(self) -> int:
        """Return the ring column for a command to all envs."""
        self._column = (self._column + 1) % self.num_frames
        if self.mover is not None:
            self.mover.await_frame(self._column)
        if self._is_mixed:
            self._keep_latest(self._column)
        if self._is_poisoning:
            self._poison((self._column + 1) % self.num_frames)
        return self._column

    def _keep_latest(self, column: int) -> None:
        """Put aside the latest rows in a column that is to be written: they are needed should the step fail."""
        for env_id in np.flatnonzero(self.columns == column).tolist():
            self._move_latest(env_id, (column - 1) % self.num_frames)

    def _move_latest(self, env_id: int, column: int) -> None:
        """Copy an env's latest row to the root of a column and note that it is there.

        Roots of the ring are never handed out as views, so this changes nothing that a caller holds.
        """
        place = self.row_at(env_id, column)
        for key, array in self.latest_root(env_id).items():
            if ("root", *key) in place:  # a root has no reward
                place["root", *key][...] = array
        section = "root" if self.in_root[env_id] else "next"
        if section == "next" and env_id in self.side_next:
            self.side_root[env_id] = self.side_next[env_id]
        if (residence := self.residences.get(int(self.group_of[env_id]))) is not None:
            residence.move_latest(self.row_of[env_id], int(self.columns[env_id]), section, column)
        self.columns[env_id] = column
        self.in_root[env_id] = True

    def _poison(self, column: int) -> None:
        """Make a frame that is no longer valid unusable, unless it still says where some env is."""
        if (self.columns == column).any():
            return
        for group in self.slab.groups:
            poison(group, column)

    def next_columns(self, env_ids: np.ndarray) -> np.ndarray:
        """Return the ring column for a command to some envs: one after each env's own latest."""
        self._is_mixed = True
        return np.asarray(self._following[self.columns[env_ids]])

    def reset_columns(self, env_ids: np.ndarray) -> np.ndarray:
        """Return the ring columns for resets, int64 `[k]`: where the envs are, so that no frame is used up.

        A reset writes roots alone, and views are handed out of steps alone. All envs together go to one column.
        """
        if len(env_ids) == self.num_envs:
            return np.full(self.num_envs, self._column)
        return np.asarray(self.columns[env_ids])

    def _present(self, group: int, key: Name, rows: np.ndarray | None) -> np.ndarray | None:
        """Return a leaf of the present roots of some rows of a group; None if roots have no such leaf."""
        batch = self.batches[group]
        if key not in batch.root_keys:
            return None
        rows = np.arange(batch.num_rows) if rows is None else rows
        ids = np.array(batch.slab.plan.env_ids)[rows]
        return self._roots_of(group, ids, rows)[batch.root_keys.index(key)]

    def _roots_of(self, group: int, env_ids: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
        """Return where some envs of a group are now, as fresh arrays `[k, ...]`."""
        columns, in_root = self.columns[env_ids], self.in_root[env_ids]
        if self.where is self.ring:
            return self.batches[group].gather_roots(columns, in_root, rows)
        arrays, gathered = self.where.groups[group], []
        for key in self.batches[group].root_keys:
            latest = arrays["next", *key][columns, rows]
            if in_root.any():
                latest[in_root] = arrays["root", *key][columns[in_root], rows[in_root]]
            gathered.append(latest)
        return gathered

    # ---- a rollout's columns -----------------------------------------------------------------

    def move_to(self, where: Columns) -> None:
        """Copy where all envs are to the root of column 0 of a rollout's storage; the next commands write there."""
        self.is_moving = True
        for index, (batch, arrays) in enumerate(zip(self.batches, where.groups, strict=True)):
            ids = np.array(batch.slab.plan.env_ids)
            for key, roots in zip(batch.root_keys, self._roots_of(index, ids, self.row_of[ids]), strict=True):
                arrays["root", *key][0] = roots
        for env_id in np.flatnonzero(~self.in_root).tolist() if self.has_side else ():
            self.side_root[env_id] = self.side_next[env_id]
        self._be_at(where, 0)

    def move_back(self) -> None:
        """Copy where all envs are back to the ring, unless an interrupt has ended a move; see `abandon`."""
        if self.where is self.ring or self.is_moving:
            return
        self.is_moving = True
        column = self._column
        for index, batch in enumerate(self.batches):
            ids = np.array(batch.slab.plan.env_ids)
            for key, roots in zip(batch.root_keys, self._roots_of(index, ids, self.row_of[ids]), strict=True):
                batch.slab.columns["root", *key][column] = roots
        if self.has_side:
            self.side_root = self.latest_side()
        self._be_at(self.ring, column)

    def _be_at(self, where: Columns, column: int) -> None:
        """Note that all envs are at the root of a column."""
        self._stepped_to = None
        self._columns[:] = column
        self._in_root[:] = True
        self._is_mixed = False
        self.where = where
        self.is_moving = False

    def abandon(self) -> None:
        """Be back at the ring after an interrupt has ended a move; all envs must be reset."""
        self._be_at(self.ring, self._column)

    def latest_side(self) -> dict[int, list[Any]]:
        """Return of each env the values of side-channel leaves where it is now; a fresh dict."""
        root, following = self.side_root, self.side_next
        return {i: root[i] if is_root else following[i] for i, is_root in enumerate(self.in_root.tolist())}

    # ---- after a command ---------------------------------------------------------------------

    def stepped_all(self, column: int, reset_ids: np.ndarray | None = None) -> np.ndarray | None:
        """Note that all envs were stepped to a column, or reset there; return the ids that ended, or None.

        Args:
            column: of the ring.
            reset_ids: envs that were not stepped, after `blank_steps`.
        """
        self._stepped_to, self._reset_there = column, reset_ids
        self._is_mixed = False
        return self.where.find_ended(column)

    def stepped_all_and_reset(self, column: int) -> np.ndarray | None:
        """Note that all envs were stepped to a column, and those that ended reset there; return them, or None."""
        self._stepped_to, self._is_mixed = column, False
        self._reset_there = ended = self.where.find_ended(column)
        return ended

    def over_at_once(self, env_ids: np.ndarray | None, column: int) -> np.ndarray | None:
        """Return which of some envs that were just reset, int `[k]`, have roots that say done (some resets do).

        Args:
            env_ids: int `[k]`; None for none.
            column: of their roots, where these are in one column.
        """
        if env_ids is None or self.where.has_no_done_root(column):
            return None
        over = env_ids[self.where.root_done_of(env_ids, self.columns[env_ids])]
        return over if len(over) else None

    @functools.cached_property
    def _blanks(self) -> list[list[np.ndarray]]:
        """What a step says besides its observation, by group, each `[column, row, ...]` (VIEWS)."""
        return [
            [group.columns["next", *leaf.key] for leaf in (*group.spec.reward, *group.spec.done)]
            for group in self.slab.groups
        ]

    def blank_steps(self, column: int, env_ids: np.ndarray) -> None:
        """Have the `next` of envs that are to be reset at a column say reward 0 and no flag: no step will."""
        for index, arrays in enumerate(self._blanks):
            rows = env_ids if len(self._blanks) == 1 else self.row_of[env_ids[self.group_of[env_ids] == index]]
            for array in arrays:
                array[column][rows] = 0

    def stepped(self, env_ids: np.ndarray, columns: np.ndarray, ended: np.ndarray | None = None) -> np.ndarray:
        """Note that some envs were stepped to columns of their own; return `ended`, bool `[k]`, found if None."""
        self._catch_up()
        self._columns[env_ids] = columns
        self._in_root[env_ids] = False
        if ended is None:
            ended = self.where.next_done_of(env_ids, columns)
        return ended

    def were_reset(self, env_ids: np.ndarray, columns: np.ndarray | int) -> np.ndarray:
        """Note that some envs were reset, at one column or at columns of their own; return whose roots say done."""
        self.columns[env_ids] = columns
        self.in_root[env_ids] = True
        return self.where.root_done_of(env_ids, self.columns[env_ids])

    def mark_lost(self, env_ids: np.ndarray) -> None:
        """Note that envs have lost their episodes: their present rows say truncated from now on.

        A step's `next` that was handed out as a view keeps what it says.
        """
        for env_id in env_ids.tolist():
            self._move_latest(env_id, int(self.columns[env_id]))
            row = self.latest_root(env_id)
            for leaf in self.batches[self.group_of[env_id]].spec.done:
                row[leaf.key][...] = leaf.key[-1] != "terminated"

    def mark_running(self) -> None:
        """Note that all envs are in the middle of an episode, whatever their rows say of that."""
        for env_id in range(self.num_envs):
            self._move_latest(env_id, int(self.columns[env_id]))
            row = self.latest_root(env_id)
            for leaf in self.batches[self.group_of[env_id]].spec.done:
                row[leaf.key][...] = False

    def roots(self) -> list[dict[str, Any]]:
        """Return where each env is now, as nested dicts of tensors and side values, in memory of their own."""
        return [td.to_dict() for td in self.current(np.arange(self.num_envs)).unbind(0)]

    def check_roots(self, roots: Sequence[Mapping[str, Any]]) -> None:
        """Refuse roots that are not of these envs.

        Raises:
            ValueError: with the first leaf that is missing or of another shape.
        """
        if len(roots) != self.num_envs:
            raise ValueError(f"load_state_dict failed: expected {self.num_envs} roots, got {len(roots)}.")
        for env_id, root in enumerate(roots):
            for leaf in (*(spec := self.batches[self.group_of[env_id]].spec).observation, *spec.done):
                value = _entry(root, leaf.key)
                if value is None or not (leaf.is_side or tuple(value.shape) == leaf.shape):
                    got = "none" if value is None else f"shape {tuple(value.shape)}"
                    raise ValueError(f"load_state_dict failed: expected {leaf}, got {got} (root of env {env_id}).")

    def put_roots(self, roots: Sequence[Mapping[str, Any]]) -> None:
        """Note where all envs are: what `roots` returned."""
        column = self._column
        for env_id, root in enumerate(roots):
            group, place = int(self.group_of[env_id]), self.row_at(env_id, column)
            residence, spec = self.residences.get(group), self.batches[group].spec
            self.side_root[env_id] = [_entry(root, leaf.key) if leaf.is_side else None for leaf in spec.observation]
            for leaf in (*spec.observation, *spec.done):
                if residence is not None and ("root", *leaf.key) in residence.columns:
                    residence.columns["root", *leaf.key][column, self.row_of[env_id]] = _entry(root, leaf.key)
                elif not leaf.is_side:
                    place["root", *leaf.key][...] = to_numpy(_entry(root, leaf.key))
        self.were_reset(np.arange(self.num_envs), column)

    def ended_parts(self, needs_reset: np.ndarray) -> np.ndarray | None:
        """Return which parts of envs that are batches themselves have ended, bool `[N, *B]`; None for no such envs.

        Args:
            needs_reset: bool `[N]`, which envs must be reset: as a whole, where no row of theirs says done.
        """
        if not any(spec.batch_shape for spec in (batch.spec for batch in self.batches)):
            return None
        done = self.current(np.arange(self.num_envs))["done"].cpu().numpy()[..., 0]
        done[needs_reset & ~done.reshape(self.num_envs, -1).any(1)] = True
        return done

    def note_side(self, frames: Mapping[int, Mapping[str, Any]]) -> None:
        """Keep the side-channel values that came with the latest rows."""
        for env_id, frame in frames.items():
            if any(value is not None for value in frame["next"]):  # else a new instance that has made no step
                self.side_next[env_id] = frame["next"]
            self.side_root[env_id] = frame["root"]

    def note_infos(self, frames: Mapping[int, Mapping[str, Any]], env_ids: Iterable[int]) -> None:
        """Keep what envs said in their latest command, and forget what they had said before.

        Args:
            frames: env id -> infos message, of those that said something.
            env_ids: who was given the command.
        """
        if not frames and not any(self.infos.values()):
            return
        for env_id in env_ids:
            frame = frames.get(env_id)
            for section, kept in self.infos.items():
                kept.pop(env_id, None)
                if frame is not None and frame[section] is not None:
                    kept[env_id] = unpack(frame[section], self._info_policy)

    def forget_infos(self) -> None:
        """Note that no env has said anything in its latest command, which was to all of them."""
        for kept in self.infos.values():
            if kept:
                kept.clear()

    # ---- hand-outs ---------------------------------------------------------------------------

    def next_leaves(self, column: int) -> list[Leaves]:
        """Return the `next` leaves of each group at a column: copies, or views if the executor hands out views."""
        if self.is_copy or self.mover is not None:
            return [batch.next_copies(column) for batch in self.batches]
        return [list(batch.next_views(column)) for batch in self.batches]

    def next_td(self, leaves: list[Leaves]) -> TensorDictBase:
        """Return the `next` batch `[N]` over given leaves."""
        tds: list[TensorDictBase] = []
        for batch, own in zip(self.batches, leaves, strict=True):
            ids = np.array(batch.slab.plan.env_ids)
            all_leaves = [*own, self._interrupted_leaf(batch, ids)] if self.has_interrupted else own
            td = batch.shell("next", (batch.num_rows,)).build(all_leaves)
            if batch.side_keys:
                add_side(td, batch.side_keys, [self.side_next[i] for i in batch.slab.plan.env_ids])
            tds.append(td)
        return stack_groups(tds, self.places.pairs)

    def _interrupted_leaf(self, batch: GroupBatch, env_ids: np.ndarray) -> torch.Tensor:
        shape = (len(env_ids), *(1 for _ in batch.spec.batch_shape), 1)
        flags = self.interrupted[env_ids].reshape(shape)
        flags = np.broadcast_to(flags, (len(env_ids), *batch.spec.batch_shape, 1)).copy()
        return batch.to_tensors([flags])[0]

    def next_of(self, env_ids: np.ndarray, columns: np.ndarray) -> TensorDictBase:
        """Return the `next` of some envs, each from its own column: batch `[k]` in memory of its own."""

        def make(batch: GroupBatch, members: Members) -> TensorDict:
            ids = env_ids[members]
            leaves = batch.to_tensors(batch.gather_next(columns[members], self.row_of[ids]))
            if self.has_interrupted:
                leaves.append(self._interrupted_leaf(batch, ids))
            td = batch.shell("next", (len(ids),)).build(leaves)
            if batch.side_keys:
                add_side(td, batch.side_keys, [self.side_next[i] for i in ids.tolist()])
            return td

        return self._by_group(env_ids, make)

    def draft(self, column: int, *, has_root: bool) -> Draft | None:
        """Make the batches of a step before its rows are there; None where that is not worth it.

        The parent does it while the workers step. `finish` fills it in.
        """
        if not self.is_plain:
            return None
        batch = self.batches[0]
        if self.is_copy:
            buffer, leaves = batch.blank_next()
        else:
            buffer, leaves = None, batch.next_views(column)
        root = self._root_shell_over_next.build(leaves) if has_root else None
        return Draft(buffer, leaves, self._next_shell.build(leaves), root)

    def finish(
        self, draft: Draft | None, column: int, reset_ids: np.ndarray | None, *, has_root: bool
    ) -> tuple[TensorDictBase, TensorDictBase | None]:
        """Return the `next` batch of a step, and the root after it if that is wanted."""
        if draft is None:
            leaves = self.next_leaves(column)
            return self.next_td(leaves), self.root_after(leaves, column, reset_ids) if has_root else None
        if draft.buffer is not None:
            draft.buffer[:] = self.batches[0].next_bytes[column]
        if has_root and reset_ids is not None:
            mended = self.batches[0].mended_roots(column, self.row_of[reset_ids])
            return draft.next_td, self.root_shell.build(mended)
        return draft.next_td, draft.root_td

    def root_after(self, leaves: list[Leaves], column: int, reset_ids: np.ndarray | None) -> TensorDictBase:
        """Return the root batch `[N]` after a step whose `next` leaves are given."""
        tds: list[TensorDictBase] = []
        for index, (batch, own) in enumerate(zip(self.batches, leaves, strict=True)):
            rows = None
            if reset_ids is not None:
                rows = self.row_of[reset_ids[self.group_of[reset_ids] == index]]
                rows = rows if len(rows) else None
            td = batch.shell("root", (batch.num_rows,)).build(batch.roots_after(own, column, rows))
            self.add_root_side(td, batch, batch.slab.plan.env_ids)
            tds.append(td)
        return stack_groups(tds, self.places.pairs)

    def current(self, env_ids: np.ndarray) -> TensorDictBase:
        """Return where some envs are now: a root batch `[k]` in memory of its own."""
        if self._is_one_group and not self.has_side:
            return self.batches[0].roots(self._roots_of(0, env_ids, env_ids))

        def make(batch: GroupBatch, members: Members) -> TensorDict:
            ids = env_ids[members]
            td = batch.roots(self._roots_of(self.batches.index(batch), ids, self.places.rows_of(ids)))
            self.add_root_side(td, batch, ids.tolist())
            return td

        return self._by_group(env_ids, make)

    def _by_group(self, env_ids: np.ndarray, make: Callable[[GroupBatch, Members], TensorDict]) -> TensorDictBase:
        """Return a batch in the order of `env_ids` from one batch for each group that has members."""
        if self._is_one_group:
            return make(self.batches[0], slice(None))
        tds: list[TensorDictBase] = []
        order: list[tuple[int, int]] = [(0, 0)] * len(env_ids)
        for index, batch in enumerate(self.batches):
            members = np.flatnonzero(self.group_of[env_ids] == index)
            if len(members):
                for row, member in enumerate(members.tolist()):
                    order[member] = (len(tds), row)
                tds.append(make(batch, members))
        return stack_groups(tds, order)

    def add_root_side(self, td: TensorDict, batch: GroupBatch, env_ids: Any) -> None:
        """Add the side-channel leaves of where some envs are now."""
        if batch.side_keys:
            latest = [self.side_root[i] if self.in_root[i] else self.side_next[i] for i in env_ids]
            add_side(td, batch.side_keys, latest)

    # ---- rows that a loss or a fault has left without an answer --------------------------------

    def cut_off(self, env_id: int, column: int) -> None:
        """Write the `next` of an env whose answer was lost: its last true observation, reward 0, truncated."""
        self._repeat_resident(env_id, column)
        source = {key: array.copy() for key, array in self.latest_root(env_id).items()}
        dest = self.row_at(env_id, column)
        batch = self.batches[self.group_of[env_id]]
        for leaf in batch.spec.observation:
            if not leaf.is_side:
                dest["next", *leaf.key][...] = source[leaf.key]
        for leaf in batch.spec.reward:
            dest["next", *leaf.key][...] = 0
        for leaf in batch.spec.done:
            dest["next", *leaf.key][...] = leaf.key[-1] != "terminated"
        if self.has_side:
            self.side_next[env_id] = self.side_root[env_id] if self.in_root[env_id] else self.side_next[env_id]

    def row_at(self, env_id: int, column: int) -> dict[Name, np.ndarray]:
        """Return the row of an env at a column by name (VIEWS, also of scalars)."""
        return self.where.row(env_id, column)

    def _repeat_resident(self, env_id: int, column: int) -> None:
        """Write a row of no step to a ring column, where its tensors are on a device."""
        residence = self.residences.get(int(self.group_of[env_id]))
        if residence is not None:
            section = "root" if self.in_root[env_id] else "next"
            residence.repeat(self.row_of[env_id], column, int(self.columns[env_id]), section)

    def latest_root(self, env_id: int) -> dict[Name, np.ndarray]:
        """Return an env's present root row by key (VIEWS)."""
        section = "root" if self.in_root[env_id] else "next"
        found = self.row_at(env_id, int(self.columns[env_id]))
        return {name[1:]: array for name, array in found.items() if name[0] == section}


def _entry(root: Mapping[str, Any], key: Name) -> Any:
    """Return an entry of nested dicts, or None."""
    found: Any = root
    for name in key:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
