"""Carry a policy's state from step to step: recurrent state, and all other keys that it writes into `next`.

Guarantees: the envs' own keys are never changed. A key that the policy wrote as `("next", key)` is `key` in its next
root, unchanged row by row. Rows of envs that were reset in between get the primer's values, or keep the old ones if
there is no primer (policies can read `done`).
"""

from collections.abc import Callable
from traceback import walk_tb
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_leaf_nontensor

from envherd.executor.batches.arguments import WRAP, WRAP_MODEL
from envherd.executor.batches.fast_tensordict import get_leaf
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
