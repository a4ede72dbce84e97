"""The envs' positions: which column holds each env's latest row. Also writes rows in place of lost envs.

Workers write rows to columns: the frames of the ring, or the time steps of a rollout's storage. A command names a
target and a column. `Columns` gives both kinds of target the index order `[column, row, ...]`.

An env's present root is the `next` of its latest step, or the `root` of its latest reset. Rows are not copied for that;
two small arrays record the place. Uses only numpy: `env_batches` makes TensorDicts of the rows.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from envherd.executor.options import ExecutorOptions
from envherd.executor.protocol.info_reader import SideData
from envherd.shm.slab import Name, Slab, SlabPlan, Storage, root_leaves
from envherd.workers.protocol import RING

if TYPE_CHECKING:
    from envherd.executor.batches.memory import Loans
    from envherd.executor.batches.transfer import Mover


class Places:
    """The group and the row of each env, which are the same in all columns.

    Attributes:
        all_ids: int64 `[N]`.
        of_env: the place of each env.
        group_of, row_of: the same, int64 `[N]`.
        env_ids: per group, the envs of its rows, int64, ascending.
        is_one_group: whether all envs are in one group, so that rows equal ids.
        is_flat: whether also no env is a batch itself: the done flags of a column are bool `[N, 1]`.
    """

    def __init__(self, plan: SlabPlan) -> None:
        self.all_ids = np.arange(plan.num_envs)
        self.of_env = [plan.place(env_id) for env_id in range(plan.num_envs)]
        self.group_of = np.array([place.group for place in self.of_env])
        self.row_of = np.array([place.row for place in self.of_env])
        self.env_ids = [np.array(group.env_ids) for group in plan.groups]
        self.is_one_group = len(plan.groups) == 1
        self.is_flat = self.is_one_group and not plan.groups[0].spec.batch_shape

    def by_group(
        self,
        batch: Any,
        env_ids: np.ndarray,
    ) -> list[tuple[int, Any, np.ndarray]]:
        """Return the groups of some envs: the number of each, its rows of a batch (VIEWS of a lazy stack), and its ids.

        Args:
            batch: of these envs; `batch[indices]` returns some of its rows.
            env_ids: of the envs.
        """
        if self.is_one_group and len(env_ids):
            return [(0, batch, env_ids)]
        groups = self.group_of[env_ids]
        numbers = dict.fromkeys(groups.tolist())
        if len(numbers) == 1:
            return [(int(groups[0]), batch, env_ids)]
        return [
            (
                number,
                batch[(groups == number).nonzero()[0].tolist()],
                env_ids[groups == number],
            )
            for number in numbers
        ]


class Columns:
    """The arrays of one target.

    Attributes:
        target: its number in commands.
        root_ahead: column offset from a step's `next` to the root after it: 0 in the ring, 1 in a storage.
        in_c: `target` of the calls in `executor/native/exchange.c`, for envs of one kind.
        groups: per group, `("next" | "root", *key)` -> array `[column, row, ...]` (VIEW).
    """

    def __init__(
        self,
        target: int,
        groups: Sequence[Mapping[Name, np.ndarray]],
        places: Places,
        *,
        root_ahead: int,
    ) -> None:
        self.target = target
        self.root_ahead = root_ahead
        self.groups = tuple(groups)
        self._places = places
        # "next" and "root" -> by group, `[column, row, *B, 1]`.
        self._done = {
            section: [group[section, "done"] for group in groups]
            for section in ("next", "root")
        }
        self.in_c: Any = None
        if target != RING:
            next_done = self._done["next"][0]
            # C reads it by position.
            self.in_c = target, next_done, self._done["root"][0], len(next_done)

    def row(self, env_id: int, column: int) -> dict[Name, np.ndarray]:
        """Return one env's row by name (VIEWS, also of scalars)."""
        group, row = self._places.of_env[env_id]
        arrays = self.groups[group].items()
        return {
            name: array[column, row : row + 1].reshape(array.shape[2:])
            for name, array in arrays
        }

    def done_of(
        self,
        section: str,
        env_ids: np.ndarray,
        columns: np.ndarray | int,
    ) -> np.ndarray:
        """Return whether the rows of some envs, at one column or each at its own, are done: bool `[k]`, fresh.

        Args:
            section: "next" or "root".
            env_ids: int64 `[k]`.
            columns: int, or int64 `[k]`.
        """
        arrays = self._done[section]
        if self._places.is_flat and columns.__class__ is int:
            # A seventh of the time of an index with the column.
            return np.asarray(arrays[0][columns, :, 0][env_ids])
        if self._places.is_flat:
            return np.asarray(arrays[0][columns, env_ids, 0])
        # Few: envs of several kinds, or batches. Their shapes differ, so each is looked at alone.
        group_of = self._places.group_of
        row_of = self._places.row_of
        places = zip(env_ids, np.broadcast_to(columns, env_ids.shape), strict=True)
        return np.array(
            [arrays[group_of[i]][column, row_of[i]].any() for i, column in places],
            bool,
        )


def storage_columns(target: int, storage: Storage, places: Places) -> Columns:
    """Return the time steps of a rollout's storage, whose own arrays are `[row, column, ...]`."""
    groups = [
        {
            name: array.swapaxes(0, 1)
            for name, array in group.items()
            if name[0] != "input"
        }
        for group in storage.columns
    ]
    return Columns(target, groups, places, root_ahead=1)


class _Kept(NamedTuple):
    """Copies of all positions and side values, and the columns to which the positions belong."""

    where: Columns
    table: np.ndarray
    next_values: dict[int, list[Any]]
    root_values: dict[int, list[Any]]


#: Rows of `Positions.table`. A step sets all three of an env, a reset the last two.
_STEP_COLUMN, _COLUMN, _IN_ROOT = range(3)


class Positions:
    """The positions of all envs of one executor; see the module.

    Args:
        slab: of the pool.
        side: side values; they move with the rows that they belong to.
        options: of the executor.
        mover: reads frames of the ring for a device; None on the CPU.
        loans: frames that are lent; None if there are none.

    Attributes:
        loans: as given.
        num_frames: of the slab.
        num_ring: those of the ring, which come first; the others are lendable.
        specs: of each env.
        places: group and row of each env.
        has_interrupted: whether a loss, or an exception of an env, interrupts rows instead of being raised.
        interrupted: bool `[N, 1]`, rows of the last step that were interrupted.
        ring: the frames of the ring.
        where: the columns with the latest rows: the ring's, or those of a rollout in progress.
        table: int64 `[3, N]`: `step_columns`, `columns`, and whether rows are in roots (C writes it as well). An event
            of an env is one store to it, so an interrupt leaves the old position or the new one.
        step_columns: the ring column of each env's latest step: int64 `[N]` (VIEW).
        columns: the column of `where` with each env's latest row: int64 `[N]` (VIEW).
        column: of the ring, of the latest command to all envs.
        held: what `hold` keeps, or a move to other columns until it is complete; the caller of `hold` sets None once
            positions and side values are those of the same rows again.
        is_mixed: whether latest rows may be in several columns.
    """

    def __init__(
        self,
        slab: Slab,
        side: SideData,
        options: ExecutorOptions,
        *,
        mover: "Mover | None",
        loans: "Loans | None",
    ) -> None:
        self.slab = slab
        self._side = side
        self._mover = mover
        self.loans = loans
        self.num_envs = slab.plan.num_envs
        self.num_frames = slab.plan.num_frames
        self.num_ring = self.num_frames - slab.plan.num_lendable
        self.places = Places(slab.plan)
        self.specs = [slab.groups[place.group].spec for place in self.places.of_env]
        self.has_interrupted = options.interrupts
        self.interrupted = np.zeros((self.num_envs, 1), bool)
        self.ring = self.where = Columns(
            RING,
            [group.columns for group in slab.groups],
            self.places,
            root_ahead=0,
        )
        self.held: _Kept | None = None
        self.column = 0
        self.table = np.zeros((3, self.num_envs), np.int64)
        self.table[_IN_ROOT] = True
        self.step_columns = self.table[_STEP_COLUMN]
        self.columns = self.table[_COLUMN]
        following = np.arange(1, self.num_frames + 1)
        self._following = np.where(following < self.num_ring, following, 0)
        self.is_mixed = False
        self._is_poisoning = options.poison

    @property
    def in_root(self) -> np.ndarray:
        """Whether each env's latest row is a reset's root rather than a step's next: bool `[N]`, fresh."""
        return self.table[_IN_ROOT] != 0

    # ---- columns for commands ----------------------------------------------------------------

    def next_column(self) -> int:
        """Return the column for a command to all envs: a frame that can be lent, else one of the ring."""
        lendable = -1
        if self.loans is not None:
            lendable = self.loans.pick(self.column)
        if lendable < 0:
            lendable = (self.column + 1) % self.num_ring
        self.column = lendable
        if self._mover is not None:
            self._mover.await_frame(self.column)
        if self.is_mixed:
            self._keep_latest(self.column)
        if self._is_poisoning:
            self._poison((self.column + 1) % self.num_ring)
        return self.column

    def next_columns(self, env_ids: np.ndarray) -> np.ndarray:
        """Return the ring columns for a command to some envs, int64 `[k]`: one after that of each env's latest step."""
        self.is_mixed = True
        return np.asarray(self._following[self.step_columns[env_ids]])

    def reset_columns(self, env_ids: np.ndarray) -> np.ndarray:
        """Return the ring columns for resets, int64 `[k]`: those of the envs' latest steps, so no frame is used up.

        A reset writes only roots, and only steps are handed out as views. An env whose latest row is the root of that
        column uses the previous column, because an interrupted reset may leave a partly written root. The next step of
        an env is at the column after its latest step, so in a ring of three it does not overwrite the row before it.
        """
        columns = self.step_columns[env_ids]
        is_there = self.in_root[env_ids] & (self.columns[env_ids] == columns)
        if is_there.any():
            # After interrupted steps, a step of all may write to the previous column.
            self.is_mixed = True
        return np.asarray((columns - is_there) % self.num_frames)

    def _keep_latest(self, column: int) -> None:
        """Move the latest rows out of a column that will be overwritten: they are needed if the step fails."""
        for env_id in np.flatnonzero(self.columns == column).tolist():
            self._move_latest(env_id, (column - 1) % self.num_frames)
            self.step_columns[env_id] = column

    def _move_latest(self, env_id: int, column: int) -> None:
        """Copy an env's latest row to the root of a column and note that it is there.

        Roots of the ring are never handed out as views, so this changes nothing that a caller holds.
        """
        self._write_root(env_id, column, self.latest_root(env_id))
        if not self.in_root[env_id]:
            self._side.root[env_id] = self._side.next[env_id]
        self._put_root(np.array([env_id]), column)

    def _write_root(
        self,
        env_id: int,
        column: int,
        row: Mapping[Name, np.ndarray],
    ) -> None:
        place = self.where.row(env_id, column)
        for key, array in row.items():
            if ("root", *key) in place:  # a root has no reward
                place["root", *key][...] = array

    def _poison(self, column: int) -> None:
        """Poison a frame that is no longer valid, unless it holds an env's latest row."""
        if (self.columns == column).any():
            return
        for group in self.slab.groups:
            for array in group.columns.values():
                poison(array[column])

    # ---- a rollout's columns -----------------------------------------------------------------

    def move_to(self, where: Columns) -> None:
        """Copy all envs' roots to column 0 of a rollout's storage, to which the next commands write."""
        self._move(where, 0)

    def move_back(self) -> None:
        """Copy all envs' roots back to the ring. An interrupted move, or what came after `hold`, is undone first."""
        if self.held is not None:
            self._restore(self.held)
            self.held = None
        if self.where is not self.ring:
            self._move(self.ring, self.column)

    def _move(self, where: Columns, column: int) -> None:
        # The move writes only to roots that no env's position uses.
        self.held = self._kept()
        for group, (arrays, env_ids) in enumerate(
            zip(where.groups, self.places.env_ids, strict=True)
        ):
            leaves = root_leaves(self.slab.groups[group].spec)
            for leaf, latest in zip(
                leaves,
                self.gather_roots(group, env_ids),
                strict=True,
            ):
                arrays["root", *leaf.key][column] = latest
        if self._side.has_values:
            self._side.root = self._side.latest(self.in_root)
        self.table[:_IN_ROOT] = column
        self.table[_IN_ROOT] = True
        self.is_mixed = False
        self.where = where
        self.held = None

    def _kept(self) -> _Kept:
        return _Kept(
            self.where,
            self.table.copy(),
            dict(self._side.next),
            dict(self._side.root),
        )

    def _restore(self, kept: _Kept) -> None:
        self.table[:] = kept.table
        self._side.next = kept.next_values
        self._side.root = kept.root_values
        self.is_mixed = True
        self.where = kept.where

    # ---- after a command ---------------------------------------------------------------------

    def hold(self) -> None:
        """Keep positions and side values in `held`: until it is None, an interrupt leaves those, and not a mixture."""
        if self._side.has_values:
            self.held = self._kept()

    def copy_root(self, source: int, targets: np.ndarray) -> None:
        """Make the present root of an env also that of others, int64 `[k]` (with its side values)."""
        latest = {key: array.copy() for key, array in self.latest_root(source).items()}
        side = self._side.latest(self.in_root)[source]
        # As a reset would: no frame is used up, and no view changes.
        columns = self.reset_columns(targets)
        for env_id, column in zip(targets.tolist(), columns.tolist(), strict=True):
            self._write_root(env_id, column, latest)
            self._side.root[env_id] = side
        self._side.infos.copy(source, targets.tolist())
        self.were_reset(targets, columns)

    def stepped(self, env_ids: np.ndarray, columns: np.ndarray | int) -> None:
        """Note that some envs were stepped, to one column or each to its own."""
        places = np.zeros((3, len(env_ids)), np.int64)
        places[:_IN_ROOT] = columns
        self.table[:, env_ids] = places

    def were_reset(self, env_ids: np.ndarray, columns: np.ndarray | int) -> np.ndarray:
        """Note that some envs were reset, at one column or each at its own; return which roots are done."""
        self._put_root(env_ids, columns)
        return self.where.done_of("root", env_ids, columns)

    def _put_root(self, env_ids: np.ndarray, columns: np.ndarray | int) -> None:
        places = np.ones((2, len(env_ids)), np.int64)
        places[0] = columns
        self.table[_COLUMN:, env_ids] = places

    # ---- rows --------------------------------------------------------------------------------

    def latest_root(self, env_id: int) -> dict[Name, np.ndarray]:
        """Return an env's present root row by key (VIEWS)."""
        section = "next"
        if self.in_root[env_id]:
            section = "root"
        found = self.where.row(env_id, int(self.columns[env_id]))
        return {name[1:]: array for name, array in found.items() if name[0] == section}

    def gather_roots(self, group: int, env_ids: np.ndarray) -> list[np.ndarray]:
        """Return the present roots of some envs of a group, one fresh array `[k, ...]` per leaf."""
        columns = self.columns[env_ids]
        in_root = self.in_root[env_ids]
        rows = self.places.row_of[env_ids]
        arrays = self.where.groups[group]
        gathered = []
        for leaf in root_leaves(self.slab.groups[group].spec):
            roots = arrays["root", *leaf.key]
            # The usual case: right after a reset.
            if in_root.all():
                latest = roots[columns, rows]
            else:
                latest = arrays["next", *leaf.key][columns, rows]
                latest[in_root] = roots[columns[in_root], rows[in_root]]
            gathered.append(latest)
        return gathered

    # ---- rows that no env has written --------------------------------------------------------

    @functools.cached_property
    def _blanks(self) -> list[list[np.ndarray]]:
        """The leaves of `next` other than the observation, by group, each `[column, row, ...]` (VIEWS)."""
        return [
            [
                group.columns["next", *leaf.key]
                for leaf in (*group.spec.reward, *group.spec.done)
            ]
            for group in self.slab.groups
        ]

    def blank_steps(self, column: int, env_ids: np.ndarray) -> None:
        """Write reward 0 and no flag to the `next` of envs that are reset at a column, because no step writes it."""
        places = self.places
        for index, arrays in enumerate(self._blanks):
            rows = places.row_of[env_ids[places.group_of[env_ids] == index]]
            for array in arrays:
                array[column][rows] = 0

    def cut_off(self, env_id: int, column: int) -> None:
        """Write the `next` of an env whose answer was lost: its last true observation, reward 0, truncated."""
        source = {key: array.copy() for key, array in self.latest_root(env_id).items()}
        dest = self.where.row(env_id, column)
        spec = self.specs[env_id]
        for leaf in spec.observation:
            if not leaf.is_side:
                dest["next", *leaf.key][...] = source[leaf.key]
        for leaf in spec.reward:
            dest["next", *leaf.key][...] = 0
        for leaf in spec.done:
            dest["next", *leaf.key][...] = leaf.key[-1] != "terminated"
        # Side values have no column: those of the root are the last true ones.
        if self.in_root[env_id]:
            self._side.next[env_id] = self._side.root[env_id]

    def mark_lost(self, env_ids: np.ndarray) -> None:
        """Note that envs have lost their episodes: set truncated in their present rows.

        A row that has ended its episode keeps its flags, also of an env that is a batch. A step's `next` that was
        handed out as a view is not changed.
        """
        self._set_flags(env_ids, is_cut_off=True)

    def mark_running(self) -> None:
        """Note that all envs are running: clear the flags of their present rows."""
        self._set_flags(np.arange(self.num_envs), is_cut_off=False)

    def _set_flags(self, env_ids: np.ndarray, *, is_cut_off: bool) -> None:
        last = len(self.where.groups[0]["root", "done"]) - 1
        for env_id in env_ids.tolist():
            # A refused reset takes nothing from an episode that was terminated.
            if is_cut_off and self.latest_root(env_id)["done",].all():
                continue
            column = int(self.columns[env_id])
            # Of a rollout, the root of the step itself is already data.
            if not self.in_root[env_id]:
                column = min(column + self.where.root_ahead, last)
            self._move_latest(env_id, column)
            row = self.latest_root(env_id)
            # Of an env that is a batch, only some rows may have ended.
            is_set = ~row["done",][..., 0] | (not is_cut_off)
            for leaf in self.specs[env_id].done:
                row[leaf.key][is_set] = is_cut_off and leaf.key[-1] != "terminated"


def poison(array: np.ndarray) -> None:
    """Fill an array with values that no env returns: NaN, the largest integer, or True."""
    array[...] = True
    if array.dtype.kind in "fc":
        array[...] = np.nan
    elif array.dtype.kind in "iu":
        array[...] = np.iinfo(array.dtype).max


def some_or_none(env_ids: np.ndarray) -> np.ndarray | None:
    """Return ids, or None if there are none."""
    if len(env_ids):
        return env_ids
    return None
