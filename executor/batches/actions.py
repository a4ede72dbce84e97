"""Check actions and reset masks, and write actions to the slab.

Guarantees: a whole batch is checked before anything is written, so a refused batch changes nothing. The caller's
values are read, never kept or changed.
"""

import copy
import struct
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from envherd.executor.batches.arguments import MASK_ADVICE
from envherd.executor.batches.fast_tensordict import (
    IS_AS_EXPECTED,
    Find,
    finder,
    outside_inference_mode,
)
from envherd.executor.options import ActionCheck
from envherd.shm.slab import GroupSlab
from envherd.shm.specs import (
    Binary,
    Box,
    Discrete,
    EnvSpec,
    Key,
    LeafSpec,
    MultiDiscrete,
    OneHot,
    Unbounded,
)
from envherd.workers import seeding
from envherd.workers.errors import ActionError
from envherd.workers.random_values import Draw, draw_masked, drawer, mask_key

# ---- plain actions -----------------------------------------------------------------------------
# The actions of a step of all envs of one kind, compiled for these envs.
#
# Plain actions are one tensor on the CPU with the slab's dtype and shape, and legal values.
#
# Guarantees: an accepted batch of actions has the effect of `GroupIntake.read` and `write`; a batch that is not
# accepted changes nothing.

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

    def take(value: Any, rows: Any, shape: tuple[int, ...]) -> bool:
        if not is_plain(value, shape):
            return False
        array = value.numpy()
        if check is not None and check(array) is not None:
            return False
        target[rows] = array
        return True

    take_all: Callable[[Any], bool] = partial(take, rows=..., shape=target.shape)
    if (
        legal is Legal.INDEX
        and leaf.shape == ()
        and len(target) <= _FEW
        and limit <= _FEW_LEGAL
    ):
        take_all = _take_few(is_plain, target, limit)
    return PlainIntake(
        find,
        dtype,
        target,
        legal,
        limit,
        take_all,
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


def _take_few(
    is_plain: Callable[[Any, tuple[int, ...]], bool],
    target: np.ndarray,
    limit: int,
) -> Callable[[Any], bool]:
    """Return `take_all` of a few int64 in `0 .. limit - 1`, as python's own numbers."""
    memory = target.data
    shape = torch.Size(target.shape)
    pack = struct.Struct(f"{len(target)}q").pack_into
    # One call of C for all numbers; True and 1.0 cannot be among them, because the dtype is int64.
    are_legal = frozenset(range(limit)).issuperset

    def take_all(value: Any) -> bool:
        if not is_plain(value, shape) or not are_legal(values := value.tolist()):
            return False
        pack(memory, 0, *values)
        return True

    return take_all


# ---- actions -----------------------------------------------------------------------------------

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


# ---- random actions ----------------------------------------------------------------------------
# Random actions: uniform over each leaf's legal values, from a generator seeded by the root seed.
#
# If a batch holds the envs' `action_mask` of a discrete action (at the root, or in a group of agents), only actions
# that it allows are drawn; action 0 if it allows none.

# spawn_key of the sampler's generator: different from those of envs (workers.seeding).
_STREAM = 2**32 - 2


class _Action(NamedTuple):
    """A leaf of an action, what draws its values, and the key of its mask; None without one."""

    leaf: LeafSpec
    draw: Draw
    mask: Key | None


class ActionSampler:
    """Draws action batches for a list of envs."""

    def __init__(
        self,
        specs: Sequence[EnvSpec],
        seed: int,
        first_env_id: int = 0,
    ) -> None:
        # Executors that run shares of one batch draw different actions.
        share = (first_env_id,) if first_env_id else ()
        self._rng = np.random.default_rng(
            np.random.SeedSequence(seed, spawn_key=(_STREAM, *share))
        )
        self._specs = specs
        # Of each env, the first env with an equal spec.
        self._kinds = [specs.index(spec) for spec in specs]
        # All envs have the first one's spec.
        self._is_uniform = not any(self._kinds)
        self._actions = {
            kind: [
                _Action(
                    leaf,
                    drawer(leaf) or _refuser(leaf),
                    mask_key(specs[kind], leaf),
                )
                for leaf in specs[kind].action
            ]
            for kind in set(self._kinds)
        }

    @property
    def state(self) -> dict[str, Any]:
        """The state of its generator: plain data."""
        return dict(self._rng.bit_generator.state)

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        self._rng.bit_generator.state = state

    def check(self, state: Any) -> None:
        """Refuse what is no state of this generator, with an exception of any type."""
        np.random.PCG64().state = dict(seeding.bits_of(state).state)  # type: ignore[assignment]

    @outside_inference_mode
    def fill(
        self,
        td: TensorDictBase | None,
        batch_size: torch.Size,
        device: torch.device | None,
        env_ids: np.ndarray | None = None,
    ) -> TensorDictBase:
        """Set the action leaves of `td`, or of a new batch of `batch_size`.

        Args:
            td: of all envs, or of some.
            batch_size: of all envs.
            device: of a new batch.
            env_ids: `[k]`, of the rows; None for all.

        Returns:
            `td` itself; or a lazy stack of its rows, if the envs are different tasks and `td` is no lazy stack.
        """
        kinds = self._kinds
        if env_ids is not None:
            kinds = [self._kinds[env_id] for env_id in env_ids]
        is_stack = isinstance(td, LazyStackedTensorDict)
        if self._is_uniform or (
            td is not None and not is_stack and len(set(kinds)) == 1
        ):
            if td is None:
                td = TensorDict({}, batch_size, device=device)
            self._draw(td, next(iter(kinds), 0), (len(kinds),))
            return td
        if td is None:
            rows = [TensorDict({}, self._specs[kind].batch_shape) for kind in kinds]
        else:
            rows = [td[i] for i in range(len(kinds))]
        for row, kind in zip(rows, kinds, strict=True):
            self._draw(row, kind, ())
        # The rows of a stack were set in place. Those of a batch are new TensorDicts over its other leaves.
        if td is not None and is_stack:
            return td
        return LazyStackedTensorDict(*rows, stack_dim=0)

    def _draw(self, td: TensorDictBase, kind: int, lead: tuple[int, ...]) -> None:
        """Set the action leaves of rows of one kind, `[*lead]`."""
        for leaf, draw, masking in self._actions[kind]:
            # Without a mask in the batch, as before the first reset, every action is allowed.
            mask = masking and td.get(masking, None)
            if mask is None:
                drawn = draw(self._rng, (*lead, *leaf.shape))
            else:
                drawn = draw_masked(self._rng, to_numpy(mask), leaf)
            td.set(leaf.key, torch.from_numpy(np.asarray(drawn)))


def _refuser(leaf: LeafSpec) -> Draw:
    """Return what refuses to draw the values of a leaf without a uniform distribution."""

    def refuse(_rng: np.random.Generator, _shape: tuple[int, ...]) -> np.ndarray:
        raise ValueError(
            f"rand_action failed: expected an action of a fixed shape, got {'/'.join(leaf.key)} without one (a text, a "
            f"graph or a sequence). Pass a policy that sets it."
        )

    return refuse
