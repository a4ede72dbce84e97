"""What a policy adds to the batches of `send`, such as log-probabilities, kept until `recv` returns the steps.

Guarantees: an env has at most one step under way, so its row belongs to the step that `recv` returns. After an
interrupt at any line, an env has the row of its latest step or none.
Limits: only tensors with a row for each env, only at the root, and none of a lazy stack.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from envherd.executor.batches.fast_tensordict import IS_AS_EXPECTED, get_leaf
from envherd.executor.batches.grad_mode import outside_inference_mode, without_grad
from envherd.executor.rollouts.policy_state import NOT_STATE, own_keys
from envherd.shm.specs import Key

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
