"""Check actions and reset masks, and write actions to the slab.

Guarantees: a whole batch is checked before anything is written, so a refused batch changes nothing. The caller's
values are read, never kept or changed.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envherd.executor.batches.arguments import MASK_ADVICE
from envherd.executor.batches.fast_tensordict import IS_AS_EXPECTED
from envherd.executor.batches.plain_actions import (
    Check,
    PlainIntake,
    compile_intake,
    finite,
)
from envherd.executor.options import ActionCheck
from envherd.shm.slab import GroupSlab
from envherd.shm.specs import (
    Binary,
    Box,
    Discrete,
    Key,
    LeafSpec,
    MultiDiscrete,
    OneHot,
    Unbounded,
)
from envherd.workers.errors import ActionError

RESET_KEY = "_reset"
_WHAT_IS_CHECKED = " ExecutorOptions(check_actions=...) chooses what is refused."

#: `(key, rows of a group)` -> values `[k, ...]` of the envs' present roots; None if roots have no such leaf.
Present = Callable[[Key, np.ndarray | None], np.ndarray | None]


def to_numpy(value: Any) -> np.ndarray:
    """Return a tensor (any device, with or without grad) or array as a numpy array; a VIEW if possible."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            value = value.detach()
        if value.is_meta:
            raise ActionError(
                "the call failed: expected values, got a tensor on the meta device, which holds none."
            )
        if value.device.type != "cpu":
            value = value.cpu()
        try:
            return value.numpy()
        except TypeError:
            # Numpy has no bfloat16, which policies under autocast return.
            return value.float().numpy()
    return np.asarray(value)


def has_true(flags: np.ndarray) -> bool:
    """Return whether any of some bools is set (0.2 us for a few; `any` takes 2)."""
    return 1 in flags.tobytes()


def _if_any(illegal: np.ndarray) -> np.ndarray | None:
    """Return flags of illegal values; None if none is set."""
    if illegal.any():
        return illegal
    return None


def _unsigned_below(limit: int | np.ndarray, dtype: np.dtype) -> Check:
    """Check `0 <= value < limit` with one comparison: a negative integer is huge when read as unsigned."""
    unsigned = np.dtype(f"u{dtype.itemsize}")

    def check(values: np.ndarray) -> np.ndarray | None:
        read = values.view(unsigned)
        # The most common case needs no array of flags.
        if isinstance(limit, int) and read.max(initial=0) < limit:
            return None
        return _if_any(read >= limit)

    return check


def _within(domain: Box) -> Check:
    def check(values: np.ndarray) -> np.ndarray | None:
        # NaN is in no range.
        legal = (values >= domain.low) & (values <= domain.high)
        return _if_any(~legal)

    return check


def _one_hot(values: np.ndarray) -> np.ndarray | None:
    illegal = (values != 0).sum(-1, keepdims=True) != 1
    return _if_any(np.broadcast_to(illegal, values.shape))


def check_for(leaf: LeafSpec, level: ActionCheck) -> Check | None:
    """Return the check of a leaf's values, or None if there is nothing to check."""
    dtype = np.dtype(leaf.dtype)
    if level == "off":
        return None
    if isinstance(leaf.domain, Discrete) and dtype.kind in "iu":
        return _unsigned_below(leaf.domain.n, dtype)
    if isinstance(leaf.domain, MultiDiscrete) and dtype.kind in "iu":
        return _unsigned_below(
            np.asarray(leaf.domain.nvec).astype(f"u{dtype.itemsize}"),
            dtype,
        )
    if level == "strict":
        if isinstance(leaf.domain, Box):
            return _within(leaf.domain)
        if isinstance(leaf.domain, Binary) and dtype.kind != "b":
            return lambda values: _if_any((values != 0) & (values != 1))
        if isinstance(leaf.domain, OneHot):
            return _one_hot
    if dtype.kind == "f":
        return finite
    return None


class GroupIntake:
    """Checks and writes the inputs of one group of equal envs.

    Args:
        slab: the group's arrays.
        level: of `ExecutorOptions.check_actions`.
        present: returns state leaves that a batch lacks; None refuses such a batch.

    Attributes:
        targets: the slab's array of each of `leaves`, `[num_rows, ...]`.
        plain: the fast path for plain batches; None if no batch is plain.
    """

    def __init__(
        self,
        slab: GroupSlab,
        level: ActionCheck,
        present: Present | None = None,
    ) -> None:
        self._env_ids = slab.plan.env_ids
        spec = slab.spec
        self.leaves = [leaf for leaf in (*spec.action, *spec.state) if not leaf.is_side]
        self.side_leaves = [
            leaf for leaf in (*spec.action, *spec.state) if leaf.is_side
        ]
        self.side_keys = dict(enumerate(leaf.key for leaf in self.side_leaves))
        self.targets = [slab.inputs["input", *leaf.key] for leaf in self.leaves]
        self._dtypes = [np.dtype(leaf.dtype) for leaf in self.leaves]
        self._checks = [
            check_for(leaf, level) if leaf in spec.action else None
            for leaf in self.leaves
        ]
        self._present = present
        self.plain: PlainIntake | None = None
        # Side values do not go through the slab: the caller sends them.
        if len(self.leaves) == 1 and not self.side_leaves:
            self.plain = compile_intake(
                self.leaves[0],
                self.targets[0],
                self._checks[0],
            )

    def take(self, td: TensorDictBase, rows: np.ndarray | None = None) -> bool:
        """Check and write a batch if it is plain: one legal tensor on the CPU.

        Args:
            td: batch of k.
            rows: int `[k]`, which rows of the group it is for; None for all.

        Returns:
            False if nothing was written: then call `read` and `write`, which accept it or raise.
        """
        plain = self.plain
        if plain is None or not (IS_AS_EXPECTED and td.__class__ is TensorDict):
            return False
        value = plain.find(td._tensordict)  # noqa: SLF001
        if rows is None:
            return plain.take_all(value)
        return plain.take_some(value, rows)

    def put(self, td: TensorDictBase, rows: np.ndarray | None = None) -> None:
        """Check and write a batch, whose leaves all go through the slab; on an error nothing is written.

        Args:
            td: batch of k.
            rows: as of `take`.

        Raises:
            ActionError: what `read` refuses.
        """
        if not self.take(td, rows):
            self.write(self.read(td, rows), rows)

    def read(self, td: TensorDictBase, rows: np.ndarray | None) -> list[np.ndarray]:
        """Return the checked inputs, one array `[k, ...]` per leaf.

        Args:
            td: batch of k.
            rows: int `[k]`, which rows of the group they are for; None for all.

        Raises:
            ActionError: a key is missing, or a shape, dtype or value is wrong; names the first bad env.
        """
        return [
            self._read_leaf(index, self._get(td, leaf, rows), rows)
            for index, leaf in enumerate(self.leaves)
        ]

    def read_side(self, td: TensorDictBase, rows: np.ndarray | None) -> list[list[Any]]:
        """Return the inputs that do not go through the slab: for each env one value per side leaf (copies).

        Raises:
            ActionError: a key is missing.
        """
        columns = [_side_values(self._get(td, leaf, rows)) for leaf in self.side_leaves]
        # Copies, because they are sent later, and the caller may change them meanwhile.
        return [copy.deepcopy(list(values)) for values in zip(*columns, strict=True)]

    def _read_leaf(self, index: int, given: Any, rows: np.ndarray | None) -> np.ndarray:
        """Return one leaf's values, checked."""
        leaf = self.leaves[index]
        dtype = self._dtypes[index]
        check = self._checks[index]
        num_rows = len(self._env_ids) if rows is None else len(rows)
        value = to_numpy(given)
        if value.shape != (num_rows, *leaf.shape):
            raise self._refuse(
                leaf,
                f"shape {(num_rows, *leaf.shape)}",
                f"shape {value.shape}",
                advice=_reshaping(leaf, value.shape, num_rows),
            )
        # Identity first: types of one array library are mostly the same objects, and comparing takes longer.
        if value.dtype is not dtype and value.dtype != dtype:
            uncast = value
            if not np.can_cast(uncast.dtype, dtype, "same_kind"):
                raise self._refuse(
                    leaf,
                    leaf.dtype,
                    str(uncast.dtype),
                    advice=f" Pass action.to(torch.{leaf.dtype}).",
                )
            value = uncast.astype(dtype)
            # A number that is too large for the type has wrapped around.
            if dtype.kind in "iu" and (changed := value != uncast).any():
                raise self._refuse_first(
                    leaf,
                    uncast,
                    changed,
                    rows,
                )
        if check is not None and (illegal := check(value)) is not None:
            raise self._refuse_first(
                leaf,
                value,
                illegal,
                rows,
                _WHAT_IS_CHECKED,
            )
        return value

    def write(self, values: Sequence[np.ndarray], rows: np.ndarray | None) -> None:
        """Write the result of `read`."""
        for target, value in zip(self.targets, values, strict=True):
            if rows is None:
                target[...] = value
            else:
                target[rows] = value

    def _get(self, td: TensorDictBase, leaf: LeafSpec, rows: np.ndarray | None) -> Any:
        value = td.get(leaf.key, None)
        if value is None and self._present is not None:
            value = self._present(leaf.key, rows)
        if value is None:
            names = _names_next_to(leaf.key, td)
            raise self._refuse(
                leaf,
                f"a key {leaf.key}",
                f"none among {names}" if names else "none",
                advice=" The policy must set it.",
            )
        return value

    def _refuse_first(
        self,
        leaf: LeafSpec,
        value: np.ndarray,
        illegal: np.ndarray,
        rows: np.ndarray | None,
        advice: str = "",
    ) -> ActionError:
        first = tuple(np.argwhere(illegal)[0].tolist())
        row = first[0]
        if rows is not None:
            row = int(rows[row])
        got = f"{value[first]} at {first}"
        return self._refuse(
            leaf,
            # Without bounds, only NaN, infinities and what the dtype cannot hold are refused.
            f"a finite {leaf.dtype}"
            if isinstance(leaf.domain, Unbounded)
            else str(leaf.domain),
            got,
            [self._env_ids[row]],
            advice,
        )

    def _refuse(
        self,
        leaf: LeafSpec,
        expected: str,
        got: str,
        env_ids: Sequence[int] = (),
        advice: str = "",
    ) -> ActionError:
        """Return the error; `env_ids` is one env, or empty for the whole batch."""
        ids = env_ids or self._env_ids
        where = f"env {ids[0]}" if len(ids) == 1 else f"envs {ids[0]}-{ids[-1]}"
        return ActionError(
            f"step failed: {'/'.join(leaf.key)} expected {expected}, got {got} ({where}). No env was stepped.{advice}",
            env_ids=tuple(env_ids),
            key=leaf.key,
        )


def _reshaping(leaf: LeafSpec, shape: tuple[int, ...], num_rows: int) -> str:
    """Return advice for a batch of actions of another shape than its leaf's; "" if none is known."""
    if shape == (num_rows, *leaf.shape, 1):
        return " Pass action.squeeze(-1)."
    if isinstance(leaf.domain, Discrete) and shape == (
        num_rows,
        *leaf.shape,
        leaf.domain.n,
    ):
        return " It takes the index of a one-hot action: action.argmax(-1)."
    return ""


def _side_values(given: Any) -> list[Any]:
    """Return the value of each row of a batch of non-tensor data, or of a tensor."""
    if isinstance(given, torch.Tensor):
        return [*to_numpy(given)]
    return [row.tolist() for row in given.unbind(0)]


def reset_mask(
    td: TensorDictBase | None,
    batch_shape: tuple[int, ...],
) -> np.ndarray | None:
    """Return which envs the caller's mask selects, bool `batch_shape`; None if the td has no mask.

    The root `_reset` takes precedence; without one, an env is selected if any entry of its nested masks
    (`("agents", "_reset")`) is set. A trailing dimension of 1 is optional.

    Raises:
        ValueError: a mask of another dtype or shape.
    """
    if td is None:
        return None
    root = td.get(RESET_KEY, None)
    masks = [root]
    if root is None:
        masks = [
            td.get(key)
            for key in td.keys(include_nested=True)
            if isinstance(key, tuple) and key[-1] == RESET_KEY and key[0] != "next"
        ]
    if not masks:
        return None
    found = np.zeros(batch_shape, bool)
    for mask in map(to_numpy, masks):
        # Numbers are refused: they may be ids of envs.
        if mask.dtype != bool or mask.shape[: len(batch_shape)] != batch_shape:
            raise ValueError(
                f"reset failed: expected a bool mask of shape {batch_shape} or {(*batch_shape, 1)}, "
                f"got {mask.dtype} {mask.shape}. {MASK_ADVICE}"
            )
        found |= mask.reshape(*batch_shape, -1).any(-1)
    return found


def _names_next_to(key: Key, td: TensorDictBase) -> list[str]:
    """Return the names of the entries where a key was expected; of the whole batch if it has no such group."""
    group = td.get(key[:-1], None) if len(key) > 1 else None
    if not isinstance(group, TensorDictBase):
        return sorted(map(str, td.keys()))
    return ["/".join((*key[:-1], name)) for name in sorted(map(str, group.keys()))]
