"""Batches of all envs or of some, in env order: TensorDicts over the rows of one group of equal envs or of several."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envherd.executor.batches.actions import to_numpy
from envherd.executor.batches.hand_out import (
    GroupBatch,
    Members,
    StepBatches,
    WithRoot,
    add_side,
    stack_groups,
)
from envherd.executor.batches.memory import Leaves
from envherd.executor.batches.transfer import Mover
from envherd.executor.protocol.info_reader import SideData
from envherd.executor.protocol.positions import Positions, some_or_none
from envherd.shm.slab import Name, Place
from envherd.shm.specs import EnvSpec, LeafSpec


class EnvBatches:
    """Hands out the rows of all envs of one executor; see the module.

    Args:
        positions: of the envs.
        side: the envs' values outside the slab.
        device: of the batches; None leaves them on the CPU.
        mover: moves frames to the device; None on the CPU.
        is_copy: hand out copies of steps, not views of the ring.

    Attributes:
        mover: as given.
        groups: the `GroupBatch` of each group of equal envs.
        root_shell: for all envs of the first group.
        steps: the batches of steps of all envs. Only if `Plain.rows` is empty.
    """

    def __init__(
        self,
        positions: Positions,
        side: SideData,
        device: torch.device | None,
        *,
        mover: Mover | None,
        is_copy: bool,
    ) -> None:
        self._positions = positions
        self._side = side
        self.mover = mover
        self._is_copy = is_copy
        self._places = positions.places
        self.groups = [
            GroupBatch(
                group,
                positions.num_frames,
                device,
                has_interrupted=positions.has_interrupted,
                mover=mover,
                loans=positions.loans,
            )
            for group in positions.slab.groups
        ]
        first = self.groups[0]
        lead = (first.num_rows,)
        self.root_shell = first.shell("root", lead)
        interrupted = None
        if positions.has_interrupted:
            interrupted = self._interrupted(first, slice(None))
        self.steps = StepBatches(
            first,
            first.shell("next", lead),
            first.shell("root over next", lead),
            self.root_shell,
            is_copy=is_copy,
            interrupted=interrupted,
        )

    # ---- steps of all envs -------------------------------------------------------------------

    def after_step(
        self,
        column: int,
        reset_ids: np.ndarray | None,
        *,
        has_root: bool,
    ) -> WithRoot:
        """The same as `StepBatches.finish` without a draft, for all rows; with a root only if `has_root`."""
        leaves = self.next_leaves(column)
        root = None
        if has_root:
            root = self._root_after(leaves, column, reset_ids)
        return self.next_td(leaves), root

    def next_leaves(self, column: int) -> list[Leaves]:
        """Return the `next` leaves of each group at a column: copies, or views if the executor hands out views."""
        if self._is_copy or self.mover is not None:
            return [batch.next_copies(column) for batch in self.groups]
        return [list(batch.next_views(column)) for batch in self.groups]

    def next_td(self, leaves: list[Leaves]) -> TensorDictBase:
        """Return the `next` batch `[N]` over given leaves (no copy)."""
        tds = [
            self._group_next(*group)
            for group in zip(self.groups, leaves, self._places.env_ids, strict=True)
        ]
        return stack_groups(tds, self._places.of_env)

    def _group_next(
        self,
        batch: GroupBatch,
        leaves: Leaves,
        env_ids: np.ndarray,
    ) -> TensorDict:
        """Return the `next` batch `[k]` of some envs of a group over given leaves, with its other entries."""
        if self._positions.has_interrupted:
            leaves = [
                *leaves,
                *batch.to_tensors([self._interrupted(batch, env_ids).copy()]),
            ]
        td = batch.shell("next", (len(env_ids),)).build(leaves)
        add_side(td, batch.side_keys, self._side.next, env_ids.tolist())
        return td

    def _interrupted(
        self,
        batch: GroupBatch,
        env_ids: np.ndarray | slice,
    ) -> np.ndarray:
        """Return which rows of some envs of a group are interrupted, bool `[k, *B, 1]` (VIEW, not to be written)."""
        own_shape = batch.spec.batch_shape
        flags = self._positions.interrupted[env_ids]
        flags = flags.reshape(-1, *(1 for _ in own_shape), 1)
        return np.broadcast_to(flags, (len(flags), *own_shape, 1))

    def _root_after(
        self,
        leaves: list[Leaves],
        column: int,
        reset_ids: np.ndarray | None,
    ) -> TensorDictBase:
        """Return the root batch `[N]` after a step whose `next` leaves are given."""
        places = self._places
        tds: list[TensorDictBase] = []
        for index, (batch, own) in enumerate(zip(self.groups, leaves, strict=True)):
            rows = None
            if reset_ids is not None:
                own_ids = reset_ids[places.group_of[reset_ids] == index]
                rows = some_or_none(places.row_of[own_ids])
            td = batch.shell("root", (batch.num_rows,)).build(
                batch.roots_after(own, column, rows)
            )
            self.add_root_side(td, batch, places.env_ids[index].tolist())
            tds.append(td)
        return stack_groups(tds, places.of_env)

    # ---- some envs ---------------------------------------------------------------------------

    def next_of(self, env_ids: np.ndarray, columns: np.ndarray) -> TensorDictBase:
        """Return the `next` of some envs, each from its own column: batch `[k]` in its own memory."""

        def make(batch: GroupBatch, members: Members) -> TensorDict:
            ids = env_ids[members]
            leaves = batch.next_at(columns[members], self._places.row_of[ids])
            return self._group_next(batch, leaves, ids)

        return self._by_group(env_ids, make)

    def current(self, env_ids: np.ndarray) -> TensorDictBase:
        """Return the present root batch `[k]` of some envs, in its own memory."""
        if self._places.is_one_group and not self._side.has_values:
            return self._roots_of(0, env_ids)

        def make(batch: GroupBatch, members: Members) -> TensorDict:
            ids = env_ids[members]
            td = self._roots_of(self.groups.index(batch), ids)
            self.add_root_side(td, batch, ids.tolist())
            return td

        return self._by_group(env_ids, make)

    def present(
        self,
        group: int,
        key: Name,
        rows: np.ndarray | None,
    ) -> np.ndarray | None:
        """Return a leaf of the present roots of some rows of a group, fresh; None if roots have no such leaf."""
        keys = self.groups[group].root_keys
        if key not in keys:
            return None
        env_ids = self._places.env_ids[group]
        if rows is not None:
            env_ids = env_ids[rows]
        return self._positions.gather_roots(group, env_ids)[keys.index(key)]

    def add_root_side(
        self,
        td: TensorDict,
        batch: GroupBatch,
        env_ids: Collection[int],
    ) -> None:
        """Add the side-channel leaves of some envs' present roots."""
        if batch.side_keys:
            latest = self._side.latest(self._positions.in_root)
            add_side(td, batch.side_keys, latest, env_ids)

    def _roots_of(self, group: int, env_ids: np.ndarray) -> TensorDict:
        """Return the present root batch `[k]` of some envs of one group, without side values, in its own memory."""
        positions = self._positions
        batch = self.groups[group]
        if batch.native is not None and positions.where is positions.ring:
            leaves = batch.to_device(batch.present_roots(env_ids))
        else:
            leaves = batch.to_tensors(positions.gather_roots(group, env_ids))
        return batch.shell("root", (len(env_ids),)).build(leaves)

    def _by_group(
        self,
        env_ids: np.ndarray,
        make: Callable[[GroupBatch, Members], TensorDict],
    ) -> TensorDictBase:
        """Return a batch in the order of `env_ids` from one batch for each group that has members."""
        if self._places.is_one_group:
            return make(self.groups[0], slice(None))
        tds: list[TensorDictBase] = []
        # Of each env, its batch among `tds`, and its row there.
        order = [Place(0, 0)] * len(env_ids)
        for index, batch in enumerate(self.groups):
            members = np.flatnonzero(self._places.group_of[env_ids] == index)
            if len(members):
                for row, member in enumerate(members.tolist()):
                    order[member] = Place(len(tds), row)
                tds.append(make(batch, members))
        return stack_groups(tds, order)

    def ended_parts(
        self,
        needs_reset: np.ndarray,
        read: Callable[[], TensorDictBase],
    ) -> np.ndarray:
        """Return which parts of some envs have ended; all parts of an env of which no row is done.

        Args:
            needs_reset: bool `[N]`, the envs that must be reset, or were.
            read: returns the batch `[N, *B]` with their last flags; only called for envs that are batches themselves.

        Returns:
            Bool `[N, *B]`, or `needs_reset` for no such envs.
        """
        if not needs_reset.any() or not any(
            batch.spec.batch_shape for batch in self.groups
        ):
            return needs_reset
        done = read()["done"].cpu().numpy()[..., 0]
        inner = tuple(range(1, done.ndim))
        is_whole = ~done.any(inner, keepdims=True)
        return (done | is_whole) & needs_reset.reshape(is_whole.shape)

    # ---- roots that are saved ----------------------------------------------------------------

    def roots(self, env_ids: np.ndarray) -> list[dict[str, Any]]:
        """Return the present roots of envs, as nested dicts of tensors and side values (copies)."""
        return [td.to_dict() for td in self.current(env_ids).unbind(0)]

    def put_roots(
        self,
        env_ids: np.ndarray,
        roots: Sequence[Mapping[str, Any]],
    ) -> None:
        """Set the roots of envs, from `roots`."""
        positions = self._positions
        columns = positions.reset_columns(env_ids)
        for env_id, root, column in zip(
            env_ids.tolist(),
            roots,
            columns.tolist(),
            strict=True,
        ):
            place = positions.where.row(env_id, column)
            spec = positions.specs[env_id]
            # A state may be restored in several envs, which must not share an object.
            self._side.root[env_id] = copy.deepcopy(
                [
                    entry(root, leaf.key) if leaf.is_side else None
                    for leaf in spec.observation
                ]
            )
            for leaf in (*spec.observation, *spec.done):
                if not leaf.is_side:
                    place["root", *leaf.key][...] = to_numpy(entry(root, leaf.key))
        positions.were_reset(env_ids, columns)


def check_root(root: Any, spec: EnvSpec, env_id: int, call: str) -> None:
    """Refuse a saved root that does not fit an env of this spec.

    Raises:
        ValueError: with the first leaf that is missing or of another shape.
    """
    for leaf in (*spec.observation, *spec.done):
        got = _why_not(leaf, entry(root, leaf.key))
        if got:
            raise ValueError(
                f"{call} failed: expected {leaf}, got {got} (root of env {env_id}). Nothing was restored."
            )


def _why_not(leaf: LeafSpec, value: Any) -> str:
    """Return what a value is, if it is none of a leaf; otherwise an empty text."""
    if value is None:
        return "none"
    if leaf.is_side:
        return ""
    try:
        array = to_numpy(value)
    except Exception as error:  # a tensor without memory, or no array
        return f"a {type(value).__name__} ({type(error).__name__}: {error})"
    if (array.shape, str(array.dtype)) == (leaf.shape, leaf.dtype):
        return ""
    return f"{array.dtype} {array.shape}"


def entry(root: Mapping[str, Any], key: Name) -> Any:
    """Return an entry of nested dicts, or None."""
    found: Any = root
    for name in key:
        if not isinstance(found, Mapping):
            return None
        found = found.get(name)
    return found
