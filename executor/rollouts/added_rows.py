"""What a policy adds to the batches of `send`, such as log-probabilities, kept until `recv` returns the steps.

Guarantees: an env has at most one step under way, so its row belongs to the step that `recv` returns.
Limits: only tensors, only at the root, and only for envs of one kind.
"""

from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from envherd.executor.batches.grad_mode import outside_inference_mode, without_grad
from envherd.executor.rollouts.policy_state import NOT_STATE, Key, own_leaves


class AddedRows:
    """The rows that were added for the latest step of each env.

    Args:
        known: the envs' keys.
        num_envs: N.

    Attributes:
        rows: batch `[N]`; None until something was added.
    """

    def __init__(self, known: set[Key], num_envs: int) -> None:
        self._known = known
        self._names = {*NOT_STATE, *(key[0] for key in known)}
        self._is_nested = any(len(key) > 1 for key in known)
        self._kinds: dict[Any, Any] = {}
        # Whether the policy has added something for each env's latest step.
        self._has_row = np.zeros(num_envs, bool)
        self.rows: Any = None

    def find(self, td: Any) -> TensorDictBase | None:
        """Return what was added to a batch of actions (VIEW), or None."""
        if (
            not isinstance(td, TensorDictBase)
            or isinstance(td, LazyStackedTensorDict)
            # The names of a flat batch show it at once.
            or not (self._is_nested or td.keys() - self._names)
        ):
            return None
        return own_leaves(td, self._known)

    @outside_inference_mode
    @without_grad
    def keep(self, env_ids: np.ndarray, added: TensorDictBase | None) -> None:
        """Copy what was added for envs that are not under way, batch `[k]`; None for nothing."""
        self._has_row[env_ids] = False
        if added is None:
            return
        kinds = {
            key: (leaf.shape[1:], leaf.dtype, leaf.device)
            for key, leaf in added.items(include_nested=True, leaves_only=True)
        }
        if kinds != self._kinds:
            # Those of other envs have other kinds, and are dropped.
            self._has_row[:] = False
            self._kinds = kinds
            shape = (len(self._has_row), *added.batch_size[1:])
            self.rows = added[:1].expand(shape).clone()
        self.rows[torch.from_numpy(env_ids)] = added
        self._has_row[env_ids] = True

    @outside_inference_mode
    def give(self, env_ids: np.ndarray, td: TensorDictBase) -> None:
        """Add a copy of their rows to the batch of received envs, if all of them have one."""
        if len(env_ids) and self._has_row[env_ids].all():
            td.update(self.rows[torch.from_numpy(env_ids)])
