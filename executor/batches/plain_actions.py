"""The actions of a step of all envs of one kind, compiled for these envs.

Plain actions are one tensor on the CPU with the slab's dtype and shape, and legal values.

Guarantees: an accepted batch of actions has the effect of `GroupIntake.read` and `write`; a batch that is not accepted
    changes nothing.
"""

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch

from envherd.executor.batches.fast_tensordict import Find, finder
from envherd.shm.specs import Discrete, LeafSpec

#: Number of values up to which plain Python is faster than numpy and torch (1 us against 2.5 for 8).
_FEW = 48
#: Number of legal values up to which a set of them is faster than `min` and `max` (0.15 us against 0.35 for 8).
_FEW_LEGAL = 1024

#: Returns which values are illegal, bool like the values, or None if all are legal.
Check = Callable[[np.ndarray], np.ndarray | None]


class Legal(IntEnum):
    """How C code checks actions; `tools.native_header` hands the numbers to C."""

    ANY = 0
    INDEX = 1
    """int64 in `0 .. limit - 1`."""
    FINITE = 2
    """Floats, none of them NaN or infinite."""


class PlainIntake(NamedTuple):
    """The functions that check and write one leaf of a group's actions, or return False.

    Attributes:
        find: finds the leaf among the entries of a batch.
        dtype: of its tensors.
        target: the slab's array, `[num_rows, ...]`.
        legal: the complete check as C code makes it; None if C cannot.
        limit: of `Legal.INDEX`, else 0.
        take_all: checks and writes the leaf of a batch of the whole group.
        take_some: the same of a batch of some rows, int `[k]`.
    """

    find: Find
    dtype: torch.dtype
    target: np.ndarray
    legal: Legal | None
    limit: int
    take_all: Callable[[Any], bool]
    take_some: Callable[[Any, np.ndarray], bool]


def compile_intake(
    leaf: LeafSpec,
    target: np.ndarray,
    check: Check | None,
) -> PlainIntake:
    """Return the intake of a leaf.

    Args:
        leaf: of an action.
        target: the slab's array, `[num_rows, ...]`.
        check: of its values; None for none.
    """
    find = finder(leaf.key)
    dtype = torch.from_numpy(target).dtype
    legal, limit = _legal(leaf, check)

    def is_plain(value: Any, shape: tuple[int, ...]) -> bool:
        return (
            value.__class__ is torch.Tensor
            and value.dtype is dtype
            and value.shape == shape
            # Numpy refuses a tensor that requires grad.
            and not value.requires_grad
            and value.is_cpu
        )

    if (
        leaf.shape == ()
        and isinstance(leaf.domain, Discrete)
        and leaf.dtype == "int64"
        and len(target) <= _FEW
    ):
        most = None
        if check is not None:
            most = leaf.domain.n
        return PlainIntake(
            find,
            dtype,
            target,
            legal,
            limit,
            *_take_numbers(is_plain, target, most),
        )

    def take(value: Any, rows: Any, shape: tuple[int, ...]) -> bool:
        if not is_plain(value, shape):
            return False
        array = value.numpy()
        if check is not None and check(array) is not None:
            return False
        target[rows] = array
        return True

    return PlainIntake(
        find,
        dtype,
        target,
        legal,
        limit,
        lambda value: take(value, ..., target.shape),
        lambda value, rows: take(value, rows, (len(rows), *target.shape[1:])),
    )


def finite(values: np.ndarray) -> np.ndarray | None:
    """Check that no float is NaN or infinite."""
    legal = np.isfinite(values)
    if legal.all():
        return None
    return ~legal


def _legal(leaf: LeafSpec, check: Check | None) -> tuple[Legal | None, int]:
    if check is None:
        return Legal.ANY, 0
    if isinstance(leaf.domain, Discrete) and leaf.dtype == "int64":
        return Legal.INDEX, leaf.domain.n
    # C reads these two types of floats only.
    if check is finite and leaf.dtype in ("float32", "float64"):
        return Legal.FINITE, 0
    return None, 0


def _take_numbers(
    is_plain: Callable[[Any, tuple[int, ...]], bool],
    target: np.ndarray,
    limit: int | None,
) -> tuple[Callable[[Any], bool], Callable[[Any, np.ndarray], bool]]:
    """Return `take_all` and `take_some` of a few int64 in `0 .. limit - 1` (None: any), as python's own numbers."""
    memory = target.data
    shape = torch.Size(target.shape)
    pack = struct.Struct(f"{len(target)}q").pack_into

    def are_in_range(values: list[int]) -> bool:
        return limit is None or not values or (min(values) >= 0 and max(values) < limit)

    are_legal: Callable[[list[int]], bool] = are_in_range
    # One call of C for all numbers; True and 1.0 cannot be among them, because the dtype is int64.
    if limit is not None and limit <= _FEW_LEGAL:
        are_legal = frozenset(range(limit)).issuperset

    def take_all(value: Any) -> bool:
        if not is_plain(value, shape) or not are_legal(values := value.tolist()):
            return False
        pack(memory, 0, *values)
        return True

    def take_some(value: Any, rows: np.ndarray) -> bool:
        if not is_plain(value, rows.shape) or not are_legal(values := value.tolist()):
            return False
        for row, one in zip(rows.tolist(), values, strict=True):
            memory[row] = one
        return True

    return take_all, take_some
