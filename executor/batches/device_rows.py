"""Rows that stay on a device, for envs in this process whose tensors are on the device of the batches.

Guarantees: observations and rewards of such envs never leave the device. They are copied once, from the env's tensors
into a ring on the device, so an env that overwrites its tensors does not change data of earlier or later batches. A
batch is a copy of its frame. Only done flags are copied to the host, where the protocol needs them.
Assumes: torch's current stream is the same for the env and for the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from envherd.executor.batches.hand_out import GroupBatch, Leaves
from envherd.shm.layout import Name
from envherd.shm.slab import GroupSlab
from envherd.shm.specs import LeafSpec
from envherd.workers.adapters import Adapter
from envherd.workers.errors import SpecError
from envherd.workers.writers import Writer


class RowWriters(NamedTuple):
    """The functions that write one env's tensors, per leaf."""

    next_observation: list[Writer]
    root_observation: list[Writer]
    reward: list[Writer]


def lives_on(adapters: Sequence[Adapter], device: torch.device | None) -> bool:
    """Return whether all envs have their tensors on the device and it is not the CPU."""
    if device is None or not _is_apart(device):
        return False
    places = [getattr(adapter, "device", None) for adapter in adapters]
    return all(isinstance(place, torch.device) and _is_same(place, device) for place in places)


def _is_apart(device: torch.device) -> bool:
    return device.type != "cpu"


def _is_same(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.index or 0) == (other.index or 0)


class Residence:
    """The ring of one group of equal envs on their device.

    Args:
        slab: the group's arrays; it holds only the done flags.
        num_frames: of the ring.
        device: of the envs.
        check_finite: refuse NaN and infinities.

    Attributes:
        columns: `("next" | "root", *key)` -> tensor `[frame, env, *shape]`.
    """

    def __init__(self, slab: GroupSlab, num_frames: int, device: torch.device, *, check_finite: bool) -> None:
        self.device = device
        self.columns: dict[Name, torch.Tensor] = {}
        self._spec = spec = slab.spec
        self._check_finite = check_finite
        sections = [("next", leaf) for leaf in (*spec.observation, *spec.reward)]
        for section, leaf in [*sections, *(("root", leaf) for leaf in spec.observation)]:
            shape = (num_frames, len(slab.plan.env_ids), *leaf.shape)
            ring = torch.zeros(shape, dtype=getattr(torch, leaf.dtype), device=device)
            self.columns[section, *leaf.key] = ring

    def writers_of(self, row: int) -> RowWriters:
        """Return the functions that write the tensors of one env."""
        spec = self._spec
        return RowWriters(
            [self._writer("next", leaf, row) for leaf in spec.observation],
            [self._writer("root", leaf, row) for leaf in spec.observation],
            [self._writer("next", leaf, row) for leaf in spec.reward],
        )

    def _writer(self, section: str, leaf: LeafSpec, row: int) -> Writer:
        ring = self.columns[section, *leaf.key]
        is_checked = self._check_finite and ring.dtype.is_floating_point

        def write(column: int, value: Any) -> None:
            if tuple(value.shape) != leaf.shape or value.is_floating_point() > ring.is_floating_point():
                raise SpecError(
                    f"writing {'/'.join(leaf.key)} failed: expected {leaf.dtype} {leaf.shape}, got {value.dtype} "
                    f"{tuple(value.shape)}. The env breaks its own spec: fix the env or the space it declares."
                )
            if is_checked and not bool(torch.isfinite(value).all()):
                raise SpecError(f"writing {'/'.join(leaf.key)} failed: expected finite numbers, got NaN or infinity.")
            ring[column, row].copy_(value)

        return write

    def move_latest(self, row: int, latest: int, section: str, column: int) -> None:
        """Copy the latest row, at column `latest` of a section, to the root of `column`."""
        for leaf in self._spec.observation:
            self.columns["root", *leaf.key][column, row] = self.columns[section, *leaf.key][latest, row]

    def repeat(self, row: int, column: int, latest: int, section: str) -> None:
        """Write a `next` without a step: the latest observation again, and reward 0."""
        for leaf in self._spec.observation:
            self.columns["next", *leaf.key][column, row] = self.columns[section, *leaf.key][latest, row]
        for leaf in self._spec.reward:
            self.columns["next", *leaf.key][column, row] = 0


class ResidentBatch(GroupBatch):
    """Hands out copies of the rows of one group whose tensors stay on their device."""

    def __init__(self, slab: GroupSlab, num_frames: int, residence: Residence, *, has_interrupted: bool) -> None:
        super().__init__(slab, num_frames, residence.device, has_interrupted=has_interrupted)
        self.is_on_cpu = False
        self.residence = residence
        self._rings = {
            section: [residence.columns.get((section, *key)) for key in keys]
            for section, keys in (("next", self.next_keys), ("root", self.root_keys))
        }
        self._arrays = {"next": self.next_arrays, "root": self.root_arrays}

    def next_copies(self, column: int) -> Leaves:
        """Return copies of the `next` leaves of a frame."""
        return self._frame("next", column)

    next_views = next_copies

    def _frame(self, section: str, column: int) -> Leaves:
        pairs = zip(self._rings[section], self._arrays[section], strict=True)
        return [
            torch.from_numpy(array[column].copy()).to(self.device) if ring is None else ring[column].clone()
            for ring, array in pairs
        ]

    def gather_next(self, columns: np.ndarray, rows: np.ndarray) -> list[Any]:
        """Return the `next` leaves of some rows, each from its own column: tensors, and arrays of flags."""
        return self._gather("next", columns, rows)

    def _gather(self, section: str, columns: np.ndarray, rows: np.ndarray) -> list[Any]:
        at = torch.from_numpy(columns).to(self.device), torch.from_numpy(rows).to(self.device)
        pairs = zip(self._rings[section], self._arrays[section], strict=True)
        return [array[columns, rows] if ring is None else ring[at] for ring, array in pairs]

    def gather_roots(self, columns: np.ndarray, in_root: np.ndarray, rows: np.ndarray) -> list[Any]:
        """Return the current root leaves of some rows; see `gather_next`."""
        following, roots = self._gather("next", columns, rows), self._gather("root", columns, rows)
        gathered = []
        for index, root in zip(self.root_in_next, roots, strict=True):
            leaf = following[index]
            mask = in_root if isinstance(leaf, np.ndarray) else torch.from_numpy(in_root).to(self.device)
            leaf[mask] = root[mask]
            gathered.append(leaf)
        return gathered

    def roots_after(self, leaves: Leaves, column: int, reset_rows: np.ndarray | None) -> Leaves:
        """Return the root leaves after a step; see `GroupBatch.roots_after`."""
        following = [leaves[index] for index in self.root_in_next]
        if reset_rows is None:
            return following
        at = torch.from_numpy(reset_rows).to(self.device)
        roots = []
        for leaf, fresh in zip(following, self._frame("root", column), strict=True):
            mended = leaf.clone()
            mended[at] = fresh[at]
            roots.append(mended)
        return roots

    def to_tensors(self, arrays: Sequence[Any]) -> Leaves:
        """Return arrays as tensors on the device; tensors are returned unchanged."""
        return [torch.from_numpy(one).to(self.device) if isinstance(one, np.ndarray) else one for one in arrays]
