"""The rows of one simulator: its tensors, checked against its spec, and batches of them.

Guarantees: with `copy=True` a batch is the caller's: the simulator may write to its tensors again, and the caller to
the batch, and neither changes what the other has. With `copy=False` the `next` of a step holds the simulator's own
tensors, unless rows are reset after the step. Observations and rewards stay on their device; done flags are copied to
the host, where the protocol needs them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envherd.executor.batches.actions import GroupIntake, to_numpy
from envherd.executor.batches.fast_tensordict import Shell, num_writes
from envherd.executor.batches.memory import Leaves
from envherd.executor.batches.transfer import as_array
from envherd.executor.options import ActionCheck
from envherd.executor.protocol.env_batches import entry
from envherd.shm.slab import GroupSlab, next_leaves, root_leaves
from envherd.shm.specs import Box, Discrete, EnvSpec, Key, LeafSpec, MultiDiscrete
from envherd.workers.errors import SpecError
from envherd.workers.writers import coerce, not_finite


class Row(NamedTuple):
    """All rows of the simulator at one time.

    Attributes:
        observation: one tensor `[B, ...]` per leaf: the simulator's own, or unshared memory.
        flags: done, terminated and truncated, bool `[3, B, 1]`, in unshared memory, never changed.
    """

    observation: Leaves
    flags: np.ndarray


class Rows:
    """Takes rows from one simulator, and makes batches of them.

    Args:
        spec: of the simulator.
        place: the device of the batches.
        label: the same, as the batches show it; None if that is the CPU.
        check_finite: refuse NaN and infinities.
        unchecked: leaves for which they are allowed.
        is_copy: hand out copies of steps.

    Attributes:
        place: as given.
        present: the root to act on next.
        shells: the nesting of a batch `[1]`, by section.
    """

    mover = None  # nothing is moved

    def __init__(
        self,
        spec: EnvSpec,
        place: torch.device,
        label: torch.device | None,
        *,
        check_finite: bool,
        unchecked: frozenset[Key],
        is_copy: bool,
    ) -> None:
        self._spec = spec
        self.place = place
        self._label = label
        self.is_copy = is_copy
        self._finite = {
            leaf.key
            for leaf in spec.leaves()
            if check_finite and leaf.key not in unchecked
        }
        self._dtypes = {
            leaf.key: getattr(torch, leaf.dtype)
            for leaf in (*spec.observation, *spec.reward)
        }
        # The observation of the batch that was returned last, and its number of writes.
        self._given: Leaves = []
        self._num_writes: float | None = 0
        self.next_keys = [leaf.key for leaf in next_leaves(spec)]
        self.root_keys = [leaf.key for leaf in root_leaves(spec)]
        self.shells = {
            "next": self.shell("next", (1,)),
            "root": self.shell("root", (1,)),
        }
        self.present = Row(
            self._zeros(spec.observation),
            np.zeros((3, *spec.batch_shape, 1), bool),
        )
        self.mark_lost(np.zeros(1, np.int64))  # it needs a reset

    def shell(self, section: str, lead: tuple[int, ...]) -> Shell:
        """Return the nesting of a section ("next" or "root") for leading dimensions `lead`."""
        keys = self.next_keys if section == "next" else self.root_keys
        return Shell(
            {key: index for index, key in enumerate(keys)},
            dict(self._spec.groups),
            lead,
            self._spec.batch_shape,
            self._label,
        )

    # ---- from the simulator ------------------------------------------------------------------

    def fit(
        self,
        what: str,
        leaves: Sequence[LeafSpec],
        values: Sequence[Any],
    ) -> Leaves:
        """Return an adapter's values as tensors that fit their leaves, the simulator's own where possible.

        Raises:
            SpecError: too few or too many values, or a value that breaks the spec.
        """
        if len(values) != len(leaves):
            raise SpecError(
                f"writing {what} failed: expected {len(leaves)} values, got {len(values)}."
            )
        return [
            self._fit(leaf, value) for leaf, value in zip(leaves, values, strict=True)
        ]

    def _fit(self, leaf: LeafSpec, value: Any) -> torch.Tensor:
        dtype = self._dtypes[leaf.key]
        is_alike = value.__class__ is torch.Tensor and value.shape == leaf.shape
        if (
            not is_alike
            or value.dtype is not dtype
            or value.device != self.place
            or value.requires_grad
        ):
            # `coerce` also takes other types of values, and names what does not fit.
            if not is_alike or not torch.can_cast(value.dtype, dtype):
                value = (
                    value.cpu().numpy() if isinstance(value, torch.Tensor) else value
                )
                value = torch.from_numpy(np.asarray(coerce(leaf, value)))
            value = value.detach().to(self.place, dtype)
        if (
            leaf.key in self._finite
            and dtype.is_floating_point
            and not bool(torch.isfinite(value).all())
        ):
            raise not_finite(
                leaf,
                values := value.numpy(force=True),
                np.isfinite(values),
            )
        return value

    def flags(self, terminated: Any, truncated: Any) -> np.ndarray:
        """Return done, terminated and truncated of bools `[B, 1]`, as `Row` has them."""
        flags = np.empty(self.present.flags.shape, bool)
        flags[1] = terminated
        flags[2] = truncated
        np.logical_or(flags[1], flags[2], out=flags[0])
        return flags

    # ---- batches -----------------------------------------------------------------------------

    def next_of(self, row: Row, rewards: Leaves, *, is_copy: bool) -> Leaves:
        """Return the leaves of a `next`, `[1, ...]` each: copies, or the simulator's own."""
        # `stack` copies.
        handed = [
            torch.stack((leaf,)) if is_copy else leaf.unsqueeze(0)
            for leaf in (*row.observation, *rewards)
        ]
        return [*handed, *self._flag_leaves(row)]

    def _flag_leaves(self, row: Row) -> Sequence[torch.Tensor]:
        """Return done, terminated and truncated, `[1, B, 1]` each, a copy."""
        flags = torch.from_numpy(row.flags[:, None].copy())
        return (flags if self.place.type == "cpu" else flags.to(self.place)).unbind(0)

    def next_td(self, leaves: Leaves) -> TensorDict:
        """Return the `next` batch over given leaves (no copy)."""
        return self.shells["next"].build(leaves)

    def root_over(self, leaves: Leaves) -> TensorDict:
        """Return the root batch that shares the leaves of a `next`."""
        return self.shells["root"].build(
            [*leaves[: len(self.present.observation)], *leaves[-3:]]
        )

    def current(self, env_ids: np.ndarray) -> TensorDict:
        """Return the present root, batch `[k]` with k 0 or 1, in its own memory."""
        handed = [torch.stack((leaf,)) for leaf in self.present.observation]
        self.note_given(handed)
        td = self.shells["root"].build([*handed, *self._flag_leaves(self.present)])
        return td if len(env_ids) else td[:0]

    def note_given(
        self,
        leaves: Sequence[torch.Tensor],
        *,
        is_shared: bool = True,
    ) -> None:
        """Keep the observation of a batch with the present root, for `keep`.

        Args:
            leaves: of the batch, `[1, ...]`, those of the observation first; none if no batch has the present root.
            is_shared: the caller may write to them.
        """
        self._given = [*leaves[: len(self.present.observation)]]
        self._num_writes = num_writes(self._given) if is_shared else None

    # ---- after a failure, and saved roots ----------------------------------------------------

    def keep(self) -> None:
        """Undo what a broken-off command has written to tensors that the simulator uses again.

        The observation is copied from the batch that was returned last, unless the caller has written to that.
        """
        if self._given and self._num_writes in (None, num_writes(self._given)):
            self.present = Row(
                [leaf[0].clone() for leaf in self._given],
                self.present.flags,
            )

    def repeated(self) -> Leaves:
        """Return the leaves of a `next` without a step: the present observation, reward 0, and the present flags."""
        return self.next_of(
            self.present,
            self._zeros(self._spec.reward),
            is_copy=True,
        )

    def _zeros(self, leaves: Sequence[LeafSpec]) -> Leaves:
        return [
            torch.zeros(leaf.shape, dtype=self._dtypes[leaf.key], device=self.place)
            for leaf in leaves
        ]

    def mark_lost(self, _: np.ndarray) -> None:
        """Note that the episodes of all rows were lost: the present root is truncated, where it has not ended."""
        lost = ~self.present.flags[0]
        self.present = Row(
            self.present.observation,
            self.present.flags | np.stack([lost, np.zeros_like(lost), lost]),
        )

    def mark_running(self) -> None:
        """Note that all rows are running."""
        self.present = Row(self.present.observation, np.zeros_like(self.present.flags))

    def ended_parts(self) -> np.ndarray:
        """Return which rows have ended, bool `[1, B]`; all if none has."""
        done: np.ndarray = self.present.flags[0][None, ..., 0]
        return done if done.any() else ~done

    def roots(self, _: np.ndarray) -> list[dict[str, Any]]:
        """Return the present root, as nested dicts of tensors (copies)."""
        return [self.current(np.zeros(1))[0].to_dict()]

    def put_roots(self, _: np.ndarray, roots: Sequence[Mapping[str, Any]]) -> None:
        """Set the present root, from `roots`."""
        root = roots[0]
        self.present = Row(
            [
                torch.as_tensor(entry(root, leaf.key), device=self.place).clone()
                for leaf in self._spec.observation
            ],
            np.stack([to_numpy(entry(root, leaf.key)) for leaf in self._spec.done]),
        )
        self._given = []


# ---- actions -----------------------------------------------------------------------------------
# Actions for a simulator that accepts tensors: the caller's tensors are checked on their device and passed on.
#
# Guarantees: a whole batch is checked before the simulator gets it, as in `batches.actions`. The simulator gets the
# caller's memory, on any device; the executor only reads it.


class TensorIntake(GroupIntake):
    """Checks the inputs of one simulator.

    Args:
        slab: the arrays of its group, to which nothing is written.
        level: see `ExecutorOptions.check_actions`.
    """

    def __init__(self, slab: GroupSlab, level: ActionCheck) -> None:
        super().__init__(slab, level)
        self._level = level
        self._torch_dtypes = [getattr(torch, leaf.dtype) for leaf in self.leaves]

    def tensors(self, td: TensorDictBase) -> Leaves:
        """Return the checked inputs, one tensor `[1, ...]` per leaf: the caller's own (VIEW) where they fit.

        Raises:
            ActionError: as of `GroupIntake.read`.
        """
        tensors = []
        for index, leaf in enumerate(self.leaves):
            value = self._get(td, leaf, None)
            if isinstance(value, torch.Tensor) and self._fits(index, value):
                tensors.append(value.detach())
            else:
                tensors.append(
                    torch.from_numpy(
                        np.ascontiguousarray(self._read_leaf(index, value, None))
                    )
                )
        return tensors

    def _fits(self, index: int, value: torch.Tensor) -> bool:
        leaf = self.leaves[index]
        check = self._checks[index]
        if (
            value.is_meta
            or value.shape != (1, *leaf.shape)
            or value.dtype is not self._torch_dtypes[index]
        ):
            return False
        if check is None:
            return True
        return (
            check(as_array(value)) is None
            if value.is_cpu
            else is_legal(leaf, value, self._level)
        )


#: Integers that torch cannot compare.
_NOT_COMPARED = frozenset({torch.uint16, torch.uint32, torch.uint64})


def is_legal(leaf: LeafSpec, value: torch.Tensor, level: ActionCheck) -> bool:
    """Return whether all values are known to be legal, checked on their device; `GroupIntake` decides the rest."""
    if level == "off":
        return True
    domain = leaf.domain
    if value.dtype in _NOT_COMPARED:
        return False
    if isinstance(domain, Discrete):
        # N itself may be too large for the dtype.
        return bool(((value >= 0) & (value <= domain.n - 1)).all())
    if isinstance(domain, MultiDiscrete):
        return bool(
            (
                (value >= 0)
                & (value < torch.as_tensor(domain.nvec, device=value.device))
            ).all()
        )
    if not value.dtype.is_floating_point:
        return False
    if isinstance(domain, Box) and level == "strict":
        # Torch rounds a bound without dimensions to the dtype of the values, so it gets one.
        low = torch.as_tensor(np.atleast_1d(domain.low), device=value.device)
        high = torch.as_tensor(np.atleast_1d(domain.high), device=value.device)
        return bool(((value >= low) & (value <= high)).all())
    return bool(torch.isfinite(value).all())
