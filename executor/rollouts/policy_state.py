"""What a policy adds: its state from step to step, and its own entries in rollouts and in steps that were sent.

Guarantees: the envs' own keys are never changed. A key that the policy wrote as `("next", key)` is `key` in its next
root, unchanged row by row. Rows of envs that were reset in between get the primer's values, or keep the old ones if
there is no primer (policies can read `done`).
"""

from collections.abc import Callable
from traceback import walk_tb
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    is_leaf_nontensor,
)

from envherd.executor.batches.arguments import WRAP, WRAP_MODEL
from envherd.executor.batches.fast_tensordict import (
    IS_AS_EXPECTED,
    get_leaf,
    outside_inference_mode,
    without_grad,
)
from envherd.shm.specs import Key

_NOTE = (
    f"A policy is called with the batch, a TensorDict, "
    f"and this one seems to take something else. {WRAP} {WRAP_MODEL}"
)
_UNLIKE = (
    "The envs have different shapes, so their batch is a lazy stack, and this entry has no common shape. "
    "td.unbind(0) returns the rows; what you write to a row is in the batch."
)
#: What an error of a policy that takes tensors or arrays may have.
_SIGNS = ("TensorDict", "__torch_function__", "generator raised StopIteration")
#: Root names that belong neither to the envs nor to the policy.
NOT_STATE = ("next", "env_ids", "interrupted")


class Carried:
    """The state of one policy over one rollout.

    Args:
        known: the envs' keys.
        start: a root batch `[N]`; its other keys are the state before the first step. Or None.
        primer: batch `[N]`, the state at the beginning of an episode; or None.

    Attributes:
        state: that belongs to the envs' present roots, by root key; None if there is none.
    """

    def __init__(
        self,
        known: set[Key],
        start: TensorDictBase | None,
        primer: TensorDictBase | None,
    ) -> None:
        self._known = known
        self._primer = primer
        self.state = own_leaves(start, known)

    @property
    def is_in_use(self) -> bool:
        """Whether there is any state."""
        return self.state is not None or self._primer is not None

    def hand_over(self, root: TensorDictBase, fresh: np.ndarray) -> None:
        """Write the state into the policy's next root.

        Args:
            root: batch `[N]`, or `[N, *B]`.
            fresh: bool of that shape or `[N]`, what was reset since the last step.
        """
        self.renew(fresh)
        if self.state is not None:
            root.update(self.state)

    def renew(self, fresh: np.ndarray) -> None:
        """Set the primer's values for what was reset since the last step, see `hand_over`."""
        if self._primer is None:
            return
        if self.state is None or fresh.all():
            self.state = self._primer
        elif fresh.any():
            self.state = _where(fresh, self._primer, self.state)

    def keep(self, acted: TensorDictBase) -> None:
        """Copy the state from the policy's result, after its actions were accepted."""
        state = own_leaves(get_leaf(acted, "next"), self._known)
        # The policy may reuse its memory, as CUDA graphs do.
        if state is not None:
            state = state.clone()
        # One store: an interrupt leaves the old state or the new one.
        self.state = state


def own_leaves(td: TensorDictBase | None, known: set[Key]) -> TensorDictBase | None:
    """Return a batch's entries that are the policy's and not the envs' (VIEW); None if there are none."""
    if td is None:
        return None
    keys = own_keys(td, known)
    if not keys:
        return None
    return td.select(*keys)


def own_keys(td: TensorDictBase, known: set[Key]) -> list[Key]:
    """Return the keys of a batch's leaves that are the policy's and not the envs', nor in place of the envs'."""
    return [
        key
        for key in leaf_keys(td)
        if key not in known
        and key[0] not in NOT_STATE
        # Such as a tensor in place of a group of the envs.
        and not any(own[: len(key)] == key[: len(own)] for own in known)
    ]


def run_policy(
    policy: Callable[[TensorDictBase], Any],
    root: TensorDictBase,
) -> TensorDictBase:
    """Call a policy and return its result.

    Raises:
        TypeError: the result is no TensorDict. Anything else: of the policy; an error that shows that the policy takes
            something else, or reads a key that is not there, has a note that explains it.
    """
    try:
        acted = policy(root)
    except (TypeError, AttributeError, AssertionError, RuntimeError) as error:
        note = _UNLIKE if "Failed to stack tensors" in str(error) else _NOTE
        # Once, for one that another rollout has raised before.
        if note not in getattr(error, "__notes__", ()) and (
            any(sign in str(error) for sign in _SIGNS) or _is_of_call(error)
        ):
            error.add_note(note)
        raise
    except KeyError as error:
        if "tensordict" in str(error).lower():
            error.add_note(
                f"The policy was called with a batch of these keys: "
                f"{', '.join(str(short(key)) for key in leaf_keys(root, is_leaf_nontensor))}."
            )
        raise
    if not isinstance(acted, TensorDictBase):
        raise TypeError(
            f"rollout failed: expected the policy to return a TensorDict with the action, got "
            f"{type(acted).__name__}. {WRAP}"
        )
    return acted


def _is_of_call(error: Exception) -> bool:
    """Return whether a policy does not take one argument: no code of the policy has begun."""
    modules = {
        frame.f_globals.get("__name__", "").partition(".")[0]
        for frame, _ in walk_tb(error.__traceback__)
    }
    return "positional argument" in str(error) and modules <= {"envherd", "torch"}


def short(key: Key) -> str | Key:
    """Return a key as a policy would write it: a name alone at the root."""
    if len(key) == 1:
        return key[0]
    return key


def leaf_keys(
    td: TensorDictBase,
    is_leaf: Callable[[type], bool] | None = None,
) -> list[Key]:
    """Return the keys of a batch's leaves, each as a tuple; of different tasks, those that all rows have.

    Args:
        td: the batch.
        is_leaf: TensorDict's, by the class of an entry; None leaves out texts and other values that are no tensors.
    """
    # The keys of a stack itself fail if a row has a leaf where another has a group.
    if isinstance(td, LazyStackedTensorDict):
        rows = [leaf_keys(row, is_leaf) for row in td.tensordicts]
        return [key for key in rows[0] if all(key in keys for keys in rows)]
    keys: Any = td.keys(include_nested=True, leaves_only=True, is_leaf=is_leaf)
    return [key if isinstance(key, tuple) else (key,) for key in keys]


def _where(
    chosen_where: np.ndarray,
    chosen: TensorDictBase,
    other: TensorDictBase,
) -> TensorDictBase:
    """Return `other` with the values of `chosen` where a mask is true, for keys that `chosen` has."""
    mask = torch.from_numpy(chosen_where)
    result = other.clone(recurse=False)
    for key in leaf_keys(chosen):
        new = chosen.get(key)
        old = other.get(key, None)
        if old is not None:
            on_device = mask.to(old.device).reshape(
                *mask.shape,
                *(1 for _ in old.shape[mask.ndim :]),
            )
            new = torch.where(on_device, new.to(old.device), old)
        result.set(key, new)
    return result


# ---- run ---------------------------------------------------------------------------------------
# What all ways to make a rollout have in common: the policy, its own entries, and the callback.

E = TypeVar("E")


class Run(Generic[E]):
    """One rollout in progress.

    Args:
        engine: of the executor.
        policy: takes a root batch `[N]`, on the device of the batches.
        carried: the policy's own state.
        callback: called with each step's batch; or None.
        break_when_any_done: stop after the first step at which an env ends.
    """

    def __init__(
        self,
        engine: E,
        policy: Callable[[TensorDictBase], TensorDictBase],
        carried: Carried,
        callback: Callable[[TensorDictBase], Any] | None,
        *,
        break_when_any_done: bool,
    ) -> None:
        self._engine = engine
        self._policy = policy
        self._carried = carried
        self._callback = callback
        self._breaks = break_when_any_done
        self._extra_keys: list[Key] | None = None
        self._extras: list[TensorDictBase] = []

    def _keep_extras(self, acted: TensorDictBase, known: set[Key]) -> None:
        """Keep the entries of a step that are the policy's own.

        Args:
            acted: batch `[N]` from the policy.
            known: the envs' keys.
        """
        # Found in the first step: the steps of a rollout are stacked, so all must have the same.
        if self._extra_keys is None:
            own = {*known, ("env_ids",)}
            self._extra_keys = [
                key
                for key in leaf_keys(acted)
                if (key[1:] if key[0] == "next" else key) not in own
            ]
        if self._extra_keys:
            # The policy may reuse its memory, as CUDA graphs do.
            self._extras.append(acted.select(*self._extra_keys).clone())

    def _with_next(
        self,
        acted: TensorDictBase,
        next_td: TensorDictBase,
    ) -> TensorDictBase:
        """Return a step's batch with its `next` (VIEWS), including the policy's entries there."""
        if self._carried.state is not None:
            next_td.update(self._carried.state)
        return acted.copy().set("next", next_td)

    def _finished(self, data: TensorDictBase) -> TensorDictBase:
        """Return the batch of all steps, `[N, T]`, with the entries of the policy."""
        if self._extras:
            data.update(torch.stack(self._extras, 1))
        data.refine_names(None, "time", ...)
        return data


# ---- added rows --------------------------------------------------------------------------------
# What a policy adds to the batches of `send`, such as log-probabilities, kept until `recv` returns the steps.
#
# Guarantees: an env has at most one step under way, so its row belongs to the step that `recv` returns. After an
# interrupt at any line, an env has the row of its latest step or none.
# Limits: only tensors with a row for each env, only at the root, and none of a lazy stack.

#: Types whose rows torch cannot write, and types of the same size.
_WRITTEN_AS = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


class _Names:
    """The names of keys, to see at once that a batch has no others.

    Args:
        keys: at least one.
    """

    def __init__(self, keys: set[Key]) -> None:
        self._own = {key[0] for key in keys}
        groups: dict[str, set[Key]] = {}
        for name, *rest in keys:
            if rest:
                groups.setdefault(name, set()).add(tuple(rest))
        self._groups = [(name, _Names(inner)) for name, inner in groups.items()]

    def are_all_of(self, td: Any) -> bool:
        """Return whether a batch is a plain one without other names (0.5 us; `leaf_keys` takes 12)."""
        if not IS_AS_EXPECTED or td.__class__ is not TensorDict:
            return False
        entries = td._tensordict  # noqa: SLF001  # `keys` takes as long as all else
        # Without a generator, which takes as long as all else.
        for name, inner in self._groups:
            if not inner.are_all_of(entries.get(name)):
                return False
        return self._own.issuperset(entries)


class _Kept(NamedTuple):
    """The rows of one key.

    Attributes:
        key: where they were added.
        values: `[N, ...]`.
        is_latest: which rows are of the envs' latest steps, bool `[N]`.
    """

    key: Key
    values: torch.Tensor
    is_latest: np.ndarray


class AddedRows:
    """The rows that were added for the latest step of each env.

    Args:
        known: the envs' keys.
        num_envs: N.

    Attributes:
        rows: key, dtype, device and shape of a row -> what is kept of these.
    """

    def __init__(self, known: set[Key], num_envs: int) -> None:
        self._known = known
        self._names = _Names({*known, *((name,) for name in NOT_STATE)})
        self._num_envs = num_envs
        self.rows: dict[Any, _Kept] = {}

    def find(self, td: Any) -> dict[Key, torch.Tensor]:
        """Return what was added to a batch of actions (VIEWS)."""
        if (
            self._names.are_all_of(td)
            or not isinstance(td, TensorDictBase)
            or isinstance(td, LazyStackedTensorDict)
        ):
            return {}
        added = (
            (key, td.get(key))
            for key in own_keys(td, self._known)
            # Whose tensors may have no common shape.
            if not isinstance(get_leaf(td, key[0]), LazyStackedTensorDict)
        )
        # Ragged and sparse tensors have no rows.
        return {
            key: leaf
            for key, leaf in added
            if leaf.layout is torch.strided and not leaf.is_nested
        }

    @outside_inference_mode
    @without_grad
    def keep(self, env_ids: np.ndarray, added: dict[Key, torch.Tensor]) -> None:
        """Copy what was added for envs that are not under way, `[k, ...]`."""
        for kept in self.rows.values():
            kept.is_latest[env_ids] = False
        for key, leaf in added.items():
            name = key, leaf.dtype, leaf.device, leaf.shape[1:]
            if name not in self.rows:
                # A policy may add tensors of another length in each step.
                self.rows = {
                    used: kept
                    for used, kept in self.rows.items()
                    if kept.is_latest.any()
                }
                self.rows[name] = _Kept(
                    key,
                    leaf.new_empty((self._num_envs, *leaf.shape[1:])),
                    np.zeros(self._num_envs, bool),
                )
            kept = self.rows[name]
            dtype = _WRITTEN_AS.get(leaf.dtype, leaf.dtype)
            # Torch does not view lazy conjugates and negatives.
            values = leaf.resolve_conj().resolve_neg().view(dtype)
            kept.values.view(dtype)[torch.from_numpy(env_ids)] = values
            kept.is_latest[env_ids] = True

    @outside_inference_mode
    def give(self, env_ids: np.ndarray, td: TensorDictBase) -> None:
        """Add a copy of their rows to the batch of received envs: of each tensor that all of them have."""
        for kept in self.rows.values():
            if kept.is_latest[env_ids].all():
                td.set(kept.key, kept.values[torch.from_numpy(env_ids)])
